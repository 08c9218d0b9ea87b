"""Capture and restore on a GPU with the agent's own parts: houses, CRIU, the CUDA helper and a loader.

What the agent's pipelines do around them (journal, store, bus) is left out; the order of the steps is theirs.
"""

from __future__ import annotations

import asyncio
import os
import sys
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

from dynamo_snapshot.agent.criu import shm
from dynamo_snapshot.agent.criu.command import Criu
from dynamo_snapshot.agent.criu.zero_pages import ZeroPages, drop_zero_pages
from dynamo_snapshot.agent.cuda.client import CudaHelper
from dynamo_snapshot.agent.cuda.devices import device_map, record_devices
from dynamo_snapshot.agent.cuda.driver import DeviceMap
from dynamo_snapshot.agent.cuda.tree import cuda_processes, freeze, process_tree, thaw
from dynamo_snapshot.agent.house import CONTROL_INSIDE, LOG_INSIDE, HostHouses, House
from dynamo_snapshot.agent.loader.client import ReplicaLoad, WeightLoader
from dynamo_snapshot.agent.loader.process import Settings
from dynamo_snapshot.snapshots.manifest import CudaRecord
from worker_hooks import control, holder
from worker_hooks.weights.segment import SEGMENTS_FILE, Segment, SegmentStore, decode_segments

ROOT = Path(__file__).parents[2]
ENGINE = ROOT / "examples" / "torch_engine.py"
LOCK_TIMEOUT_MS = 10_000


@dataclass
class Captured:
    """One capture: where its images are and what a restore must know."""

    images: Path
    inner_pid: int
    record: CudaRecord
    segments: list[Segment]
    seconds: dict[str, float]
    zero_pages: ZeroPages | None

    @property
    def image_bytes(self) -> int:
        return sum(path.stat().st_size for path in self.images.iterdir())


@dataclass
class Restored:
    """One restore: the house it is in, how long each step took, and what the worker said."""

    house: House
    seconds: dict[str, float]
    evidence: dict[str, str]
    load_lost: str
    """Why the loader's work was lost, if it was."""


@dataclass
class Rig:
    """Everything resident on a node with one GPU."""

    folder: Path
    houses: HostHouses
    criu: Criu
    driver: CudaHelper
    loader: WeightLoader
    store: SegmentStore
    gpu: str
    names: list[str] = field(default_factory=list)

    async def start(self, name: str, *command: str) -> House:
        """Starts ``command`` as the worker of a house of its own."""
        house = await self.make(name)
        environment = {
            **os.environ,
            control.STATE_DIR_ENV: CONTROL_INSIDE,
            control.CONTROL_DIR_ENV: CONTROL_INSIDE,
            control.LEGACY_CONTROL_DIR_ENV: CONTROL_INSIDE,
            control.INCARNATION_ENV: f"{name}-cold",
            "CUDA_VISIBLE_DEVICES": self.gpu,
            "PYTHONUNBUFFERED": "1",
        }
        await house.holder.start([sys.executable, *command], environment, "/", LOG_INSIDE)
        return house

    async def cold_start(self, name: str, *engine: str) -> House:
        """Starts the torch engine; returns once it is ready-for-snapshot."""
        return await self.ready(name, str(ENGINE), "--house", holder.HOUSE, *engine)

    async def ready(self, name: str, *command: str, timeout_s: float = 180) -> House:
        """Starts ``command`` as a worker; returns once it is ready-for-snapshot."""
        house = await self.start(name, *command)
        await self.until(house, lambda: house.control.is_ready_for_snapshot() or _refused(house), timeout_s)
        assert not _refused(house), _refused(house)
        return house

    async def capture(self, house: House, images: Path, *, drop_zeros: bool) -> Captured:
        """Captures a ready worker and lets it run on, quiesced, as the agent's pipeline does."""
        watch = Stopwatch()
        os.mkdir(images)
        inner = await house.holder.worker()
        assert inner is not None
        pid = house.host_pid(inner)
        assert pid is not None
        pids = list(await cuda_processes(self.driver, process_tree(pid)))
        watch.lap("probe")
        free = (await self.driver.inventory()).devices
        watch.lap("inventory")
        await freeze(self.driver, pids, LOCK_TIMEOUT_MS)
        watch.lap("cuda_checkpoint")
        after = await self.driver.inventory()
        held = after.devices[0].free_bytes or 0
        needed = held - (free[0].free_bytes or 0)
        watch.lap("inventory_after")
        try:
            await self.criu.dump(house, inner, images)
            shm.save(house.shm, images)
            watch.lap("dump")
        finally:
            await thaw(self.driver, pids)
        watch.lap("thaw")
        zero_pages = await asyncio.to_thread(drop_zero_pages, images, self.criu.path) if drop_zeros else None
        watch.lap("zero_pages")
        listed = house.control.path / SEGMENTS_FILE
        segments = decode_segments(listed.read_bytes()) if listed.exists() else []
        needed += sum(segment.size for segment in segments)
        return Captured(
            images=images,
            inner_pid=inner,
            record=record_devices(after, [self.gpu], [needed]),
            segments=segments,
            seconds=watch.laps,
            zero_pages=zero_pages,
        )

    async def restore(self, name: str, captured: Captured, *, prefetch: bool, timeout_s: float = 120) -> Restored:
        """From the order to a worker that has passed its self-test, every step timed."""
        watch = Stopwatch()
        devices = device_map(captured.record, await self.driver.inventory(), [self.gpu])
        watch.lap("admit")
        load = ReplicaLoad(self.loader, name, self.houses.path(name), captured.segments, self.store)
        loading = prefetch and bool(captured.segments)
        if loading:
            # Before the house is complete: the loader needs only its folder, and works beside all that follows.
            os.makedirs(self.houses.path(name))
            begun = asyncio.create_task(load.begin())
        house = await self.make(name)
        watch.lap("house")
        if loading:
            await begun
            watch.lap("weights_begun")
        await self.bring_back(house, captured, devices, watch)
        house.control.release(f"{name}-1", {})
        await self.until(house, lambda: _state(house) == "REGISTERED", timeout_s)
        watch.lap("worker")
        watch.laps["total"] = sum(watch.laps.values())
        loaded = await load.finished() if loading else None
        if loaded is not None:
            watch.laps["loader"] = loaded.seconds
            watch.laps["loader_cached_share"] = loaded.cached_bytes / loaded.bytes
        state = house.control.state()
        assert state is not None
        return Restored(house, watch.laps, dict(state.evidence), load.lost)

    async def make(self, name: str) -> House:
        self.names.append(name)
        return await self.houses.make(name, None)

    async def bring_back(self, house: House, captured: Captured, devices: DeviceMap, watch: Stopwatch) -> None:
        """CRIU, then the driver."""
        shm.load(captured.images, house.shm)
        await house.holder.expect(captured.inner_pid)
        await self.criu.restore(house, captured.images, LOG_INSIDE)
        watch.lap("criu")
        pid = house.host_pid(captured.inner_pid)
        assert pid is not None
        pids = list(await cuda_processes(self.driver, process_tree(pid)))
        await thaw(self.driver, pids, devices)
        watch.lap("cuda")

    async def remove(self, *names: str) -> None:
        for name in names or tuple(self.names):
            await self.houses.remove(name)

    async def until(self, house: House, condition: Callable[[], object], timeout_s: float) -> None:
        """Polls ``condition``; fails with the worker's log when it has ended or the time is up."""
        deadline = time.monotonic() + timeout_s
        while not condition():
            state = _state(house)
            exited = house.holder.exited
            if state == "FAILED" or exited.done() or time.monotonic() > deadline:
                log = house.log.read_text(errors="replace")[-3000:] if house.log.exists() else "no log"
                detail = house.control.state()
                raise AssertionError(f"the worker is {state}, exit {exited}, {detail}:\n{log}")
            await asyncio.sleep(0.001)


class Stopwatch:
    """Names the time since the last lap."""

    def __init__(self) -> None:
        self.laps: dict[str, float] = {}
        self._last = time.monotonic()

    def lap(self, name: str) -> None:
        now = time.monotonic()
        self.laps[name] = now - self._last
        self._last = now


@asynccontextmanager
async def rig(folder: Path, criu: Path | None, settings: Settings | None = None) -> AsyncIterator[Rig]:
    """A node with its resident processes up; everything is gone when the block ends."""
    os.makedirs(folder, exist_ok=True)
    driver = CudaHelper(folder / "cuda-helper.log")
    gpu = (await driver.inventory()).devices[0].uuid
    loader = WeightLoader(gpu, folder / "loader.log", settings)
    node = Rig(
        folder, HostHouses(folder / "run"), Criu.locate(criu), driver, loader, SegmentStore(folder / "segments"), gpu
    )
    try:
        await loader.ready()
        yield node
    finally:
        await node.remove()
        await loader.close()
        await driver.close()
        node.houses.dismantle()


def _refused(house: House) -> str | None:
    """Why the worker could not be captured and went on as a cold start; None: it did not."""
    state = house.control.state()
    return None if state is None else state.evidence.get("capture_refused")


def _state(house: House) -> str | None:
    state = house.control.state()
    return None if state is None else state.state
