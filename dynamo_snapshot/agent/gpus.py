"""All that is resident on a node for its GPUs: the CUDA helper, and a weight loader for each."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import structlog

from dynamo_snapshot.agent.cuda.client import FAKE_DRIVER, REAL_DRIVER, CudaHelper
from dynamo_snapshot.agent.cuda.fake import SCRIPT_ENV
from dynamo_snapshot.agent.loader.client import ReplicaLoad, WeightLoader, lanes_beside
from dynamo_snapshot.agent.loader.process import MemoryKind
from dynamo_snapshot.agent.loader.process import Settings as LoaderSettings
from dynamo_snapshot.agent.loader.run import Reading
from dynamo_snapshot.agent.loader.wire import Loaded
from dynamo_snapshot.agent.process import marked_processes, wait_pid
from dynamo_snapshot.config import Gpu as Settings
from dynamo_snapshot.errors import SnapshotError
from dynamo_snapshot.snapshots.manifest import WeightSegment
from worker_hooks.weights.segment import Segment, SegmentStore

log = structlog.get_logger()

SERVES_ENV = "DYNAMO_SNAPSHOT_SERVES"
"""Names the runtime folder in the environment of every resident process, so that a later agent finds them."""
VISIBLE_ENV = "CUDA_VISIBLE_DEVICES"
_DRIVER_FILES = (Path("/proc/driver/nvidia/version"), Path("/dev/nvidiactl"))
CLOSE_S = 10.0
_FAKE_HOST_BYTES = 8 << 30


class Gpus:
    """The GPUs of one node. Nothing is started before it is needed, or before :meth:`warm`.

    Args:
        settings: of the agent.
        runtime_dir: where logs go.
        segments: the store of weight segments.
        fake: a driver without a GPU and loaders on host memory, for drills and tests.
    """

    def __init__(self, settings: Settings, runtime_dir: Path, segments: Path, *, fake: bool = False) -> None:
        self.settings = settings
        self._fake = fake
        self._logs = runtime_dir / "agent"
        self._segments = SegmentStore(segments)
        self._environment = {**os.environ, SERVES_ENV: str(runtime_dir)}
        self.driver = CudaHelper(
            self._logs / "cuda-helper.log", FAKE_DRIVER if fake else REAL_DRIVER, self._environment
        )
        self._loaders: dict[str, WeightLoader] = {}
        self._leaving: set[asyncio.Task[None]] = set()

    @classmethod
    def of_host(cls, settings: Settings, runtime_dir: Path, segments: Path) -> Gpus | None:
        """None: there is no NVIDIA driver here, or the agent is to leave it alone."""
        fake = SCRIPT_ENV in os.environ
        if not settings.enabled or not (fake or any(file.exists() for file in _DRIVER_FILES)):
            return None
        return cls(settings, runtime_dir, segments, fake=fake)

    async def warm(self) -> None:
        """Starts what is resident, so that no order waits for contexts and pinned memory. Failures are logged."""
        try:
            inventory = await self.driver.inventory()
            if self.settings.loader:
                for device in inventory.devices:
                    await self.loader(device.uuid).ready()
        except (SnapshotError, OSError) as error:
            log.warning("gpus_not_ready", cause=str(error))

    def loader(self, uuid: str) -> WeightLoader:
        """The loader of one GPU."""
        if uuid not in self._loaders:
            settings = LoaderSettings(
                memory=MemoryKind.HOST if self._fake else MemoryKind.CUDA,
                lanes=self.settings.loader_lanes,
                buffers=self.settings.loader_buffers,
                reading=Reading(self.settings.loader_reading),
                pinned_segment_bytes=self.settings.pinned_segment_bytes,
                host_bytes=_FAKE_HOST_BYTES,
            )
            self._loaders[uuid] = WeightLoader(uuid, self._logs / f"loader-{uuid}.log", settings, self._environment)
        return self._loaders[uuid]

    def load_for(
        self,
        replica_id: str,
        house: Path,
        segments: Sequence[WeightSegment],
        assigned: Sequence[str],
        image_bytes: int,
    ) -> ReplicaLoad | None:
        """What brings a replica's weights, not begun yet; None: the worker loads by itself.

        Args:
            assigned: the replica's GPUs, in the worker's order. A house has room for one loader: weights on
                several devices are the worker's own to load.
            image_bytes: what CRIU restores beside it.
        """
        devices = {segment.device for segment in segments}
        if not self.settings.loader or len(devices) != 1:
            return None
        lanes = lanes_beside(image_bytes, sum(one.size for one in segments), self.settings.loader_lanes)
        loader = self.loader(assigned[devices.pop()])
        return ReplicaLoad(loader, replica_id, house, _as_hooks_have_them(segments), self._segments, lanes)

    def leave(self, load: ReplicaLoad) -> asyncio.Task[None]:
        """Has a load given up, however long its loader takes for that; whoever calls may go on."""
        task = asyncio.create_task(load.give_up())
        self._leaving.add(task)
        task.add_done_callback(self._leaving.discard)
        return task

    async def prefetch(self, uuid: str, segments: Sequence[WeightSegment], *, pin: bool = False) -> Loaded:
        """Has the loader of one GPU read ``segments``, into the page cache or, as far as settings allow, pinned."""
        return await self.loader(uuid).prefetch(_as_hooks_have_them(segments), self._segments, pin=pin)

    async def close(self) -> None:
        """Ends the helper and the loaders: in order, or, if a call of the driver does not end, by force."""
        with suppress(TimeoutError):
            async with asyncio.timeout(CLOSE_S):
                await asyncio.gather(
                    self.driver.close(), *(loader.close() for loader in self._loaders.values()), *self._leaving
                )


def residents(runtime_dir: Path) -> list[int]:
    """The resident processes that serve ``runtime_dir``, of whichever agent."""
    return marked_processes(SERVES_ENV, str(runtime_dir))


async def outlive_residents(runtime_dir: Path, timeout_s: float) -> None:
    """Returns once nothing of an earlier agent talks to the driver any more; kills it after the timeout.

    A call under way goes on when its agent has died: no process may be judged by its CUDA state meanwhile.
    """
    left = await asyncio.to_thread(residents, runtime_dir)
    if left:
        log.info("waiting_for_earlier_residents", pids=left)
    try:
        async with asyncio.timeout(timeout_s):
            await asyncio.gather(*(wait_pid(pid) for pid in left))
    except TimeoutError:
        for pid in await asyncio.to_thread(residents, runtime_dir):
            log.warning("ending_earlier_resident", pid=pid)
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def _as_hooks_have_them(segments: Sequence[WeightSegment]) -> list[Segment]:
    return [
        Segment(address=one.address, size=one.size, device=one.device, tag=one.tag, digest=one.digest)
        for one in segments
    ]
