"""Capture: the images of a worker that waits at ready-for-snapshot, and its release.

The source runs on throughout, and is let go as soon as its images are on disk; they are digested and
published beside it. Whatever fails, the source goes on and nothing can be selected.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import os
import shutil
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import structlog

from dynamo_snapshot.agent.criu import shm
from dynamo_snapshot.agent.criu.zero_pages import drop_zero_pages
from dynamo_snapshot.agent.house import LOG_INSIDE, House
from dynamo_snapshot.agent.node import Node
from dynamo_snapshot.agent.pipelines.phases import Result
from dynamo_snapshot.agent.pipelines.source_gpus import freeze_source, thaw_source
from dynamo_snapshot.agent.process import children
from dynamo_snapshot.agent.replica import Replica, new_incarnation
from dynamo_snapshot.errors import SnapshotError
from dynamo_snapshot.model import Order, Phase, Reason
from dynamo_snapshot.snapshots.compatibility import CompatibilityParts
from dynamo_snapshot.snapshots.manifest import Capture as CaptureFacts
from dynamo_snapshot.snapshots.manifest import CudaRecord, WeightSegment
from dynamo_snapshot.snapshots.staging import Staging
from worker_hooks import holder
from worker_hooks.reasons import HookError
from worker_hooks.weights.segment import SEGMENTS_FILE, decode_segments

log = structlog.get_logger()

T = TypeVar("T")

# Pages of a tree that were counted by its processes' resident sizes, plus CRIU's own records.
_IMAGE_OVERHEAD_BYTES = 16 << 20


class Capture:
    """The steps of one capture, by the names of its phases."""

    def __init__(self, node: Node, order: Order, on_publish: Callable[[], None] = lambda: None) -> None:
        self._node, self._order, self._on_publish = node, order, on_publish
        self.snapshot_id: str | None = None
        """What was published."""
        self._source: Replica | None = None
        self._staging: Staging | None = None
        self._parts: CompatibilityParts | None = None
        self._weights: tuple[WeightSegment, ...] = ()
        self._cuda: CudaRecord | None = None
        self._began = node.monotonic()

    async def admit(self) -> None:
        replica = self._node.replicas.get(self._order.replica_id)
        if replica is None:
            raise SnapshotError(Reason.UNKNOWN_REPLICA, f"replica {self._order.replica_id} is not on this node")
        if replica.exit is not None or replica.pid is None or replica.ready_at is None or replica.released:
            raise SnapshotError(
                Reason.WORKER_NOT_READY,
                f"replica {replica.id} does not wait at ready-for-snapshot; it is {replica.phase}",
                "Only a worker that was started for a capture, and not yet let go, can be captured.",
            )
        if replica.capturing:
            raise SnapshotError(Reason.WORKER_NOT_READY, f"replica {replica.id} is being captured already")
        self._source = replica
        replica.capturing = True
        replica.update()

    async def inspect(self) -> None:
        source = self._replica
        assert source.pid is not None
        if await self._node.discoverable(source.record.rpc_port):
            raise SnapshotError(
                Reason.DISCOVERABLE_AT_CAPTURE,
                f"the worker of {source.id} is registered already (port {source.record.rpc_port})",
                "It must create its runtime after restore-complete: every clone would carry its identity.",
            )
        findings, self._parts = await asyncio.gather(
            asyncio.to_thread(self._node.guard, source.pid), self._node.parts(source.record.pool, source.record.spec)
        )
        if findings:
            raise SnapshotError(
                Reason.WORKER_NOT_READY,
                f"the worker of {source.id} holds what cannot be captured: " + "; ".join(map(str, findings)),
                "Close it before ready-for-snapshot; docs/worker-hooks.md says how for each kind.",
            )

    async def stage(self) -> None:
        source = self._replica
        assert source.pid is not None
        self._weights = await asyncio.to_thread(listed_weights, self._house)
        await asyncio.to_thread(self._node.store.segments.require, self._weights)
        needed = _tree_bytes(source.pid) + shutil.disk_usage(self._house.shm).used + _IMAGE_OVERHEAD_BYTES
        self._staging = await asyncio.to_thread(self._node.store.stage, source.record.pool)
        free = shutil.disk_usage(self._staging.path).free
        if free < needed + self._node.settings.minimum_free_bytes:
            raise SnapshotError(
                Reason.DISK_FULL,
                f"{self._node.store.root} has {free >> 20} MiB free; a snapshot of {source.id} takes up to "
                f"{needed >> 20} MiB and {self._node.settings.minimum_free_bytes >> 20} MiB are to stay free",
                "Free space there, lower agent.minimum_free_bytes, or remove snapshots.",
            )

    async def freeze(self) -> None:
        self._cuda = await freeze_source(self._node, self._replica, self._weights)

    async def dump(self) -> None:
        assert self._replica.inner_pid is not None
        await self._node.criu.dump(self._house, self._replica.inner_pid, self._staged.path)

    async def thaw(self) -> None:
        if self._cuda is not None:
            await thaw_source(self._node, self._replica)

    async def keep_shm(self) -> None:
        await asyncio.to_thread(shm.save, self._house.shm, self._staged.path)
        await asyncio.to_thread(shm.remove_links, self._house.shm)

    async def drop_zeros(self) -> None:
        # Before the images are flushed: what is dropped need not be written. In an image without a CUDA process
        # there is next to nothing to drop, and the look alone takes as long as flushing half of it.
        if self._cuda is not None and self._node.settings.gpu.drop_zero_pages:
            dropped = await asyncio.to_thread(drop_zero_pages, self._staged.path, self._node.criu.path)
            log.info("zero_pages_dropped", before=dropped.bytes_before, after=dropped.bytes_after)

    async def sync(self) -> None:
        await asyncio.to_thread(self._staged.sync)

    async def release(self) -> None:
        source = self._replica
        self._node.note(source, incarnation=new_incarnation())
        source.let_go(self._node.release_environment(source))

    async def publish(self) -> None:
        source, parts = self._replica, self._parts
        assert parts is not None
        assert source.inner_pid is not None
        assert source.ready_at is not None
        facts = CaptureFacts(
            pool=source.record.pool,
            compatibility=parts,
            source_pid=source.inner_pid,
            house=holder.HOUSE,
            log_path=LOG_INSIDE,
            criu_version=self._node.criu.version,
            kernel=os.uname().release,
            phases=(Phase(name="images", seconds=self._node.monotonic() - self._began),),
            cold_start_s=source.ready_at - source.record.ordered_at,
            weights=self._weights,
            cuda=self._cuda,
        )
        manifest = await _stoppable(lambda progress: self._staged.publish(facts, progress))
        self.snapshot_id = manifest.id
        self._on_publish()

    async def release_source(self) -> None:
        """Undo: the source goes on as the incarnation that it is, unless it is being ended."""
        source = self._replica
        if not source.released and source.exit is None and source.ending is None:
            source.let_go(self._node.release_environment(source))

    async def thaw_source(self) -> None:
        """Undo: back on its GPUs, wherever freeze, dump or thaw stopped."""
        await thaw_source(self._node, self._replica)

    async def settle_source(self) -> None:
        """Undo: a CRIU that was killed may have left the worker stopped, and links in its shared memory."""
        await settle(self._replica)

    async def discard(self) -> None:
        """Undo: nothing of it was selectable, and nothing of it stays."""
        if self._staging is not None:
            await asyncio.to_thread(self._staging.discard)

    def finish(self, result: Result) -> Result:
        """After the pipeline, however it ended; a source that ended by itself is why whatever failed did."""
        source = self._source
        if source is None:
            return result
        source.capturing = False
        source.update()
        ended_here = source.ending is not None and source.ending[0] is Reason.CUDA_RESTORE_FAILED
        if result.error is not None and source.exit is not None and not ended_here:
            return dataclasses.replace(result, error=source.exited_error())
        return result

    @property
    def _replica(self) -> Replica:
        assert self._source is not None
        return self._source

    @property
    def _house(self) -> House:
        assert self._replica.house is not None
        return self._replica.house

    @property
    def _staged(self) -> Staging:
        assert self._staging is not None
        return self._staging


async def settle(source: Replica) -> None:
    """Makes a worker whose dump was cut short run again, and removes what CRIU left in its shared memory."""
    if source.pid is None or source.house is None or source.exit is not None:
        return
    for pid in _tree(source.pid):
        with contextlib.suppress(OSError):
            if _is_stopped(pid):
                os.kill(pid, signal.SIGCONT)
    await asyncio.to_thread(shm.remove_links, source.house.shm)


def listed_weights(house: House) -> tuple[WeightSegment, ...]:
    """The weight segments that a quiesced worker lists in its control directory; raises ``weights_corrupt``."""
    try:
        segments = decode_segments((house.control.path / SEGMENTS_FILE).read_bytes())
    except FileNotFoundError:
        return ()
    except HookError as error:
        raise SnapshotError(Reason.WEIGHTS_CORRUPT, error.message, "Mend the engine's quiesce.") from error
    return tuple(
        WeightSegment(address=one.address, size=one.size, device=one.device, tag=one.tag, digest=one.digest)
        for one in segments
    )


class _Stopped(Exception):
    """Raised inside the working thread when nobody wants its result any more."""


async def _stoppable(work: Callable[[Callable[[int], None]], T]) -> T:
    """Runs ``work`` in a thread; when cancelled, makes it stop at its next progress and waits for that."""
    stop = threading.Event()

    def progress(_: int) -> None:
        if stop.is_set():
            raise _Stopped

    task = asyncio.create_task(asyncio.to_thread(work, progress))
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        stop.set()
        await asyncio.gather(task, return_exceptions=True)
        raise


def _tree(pid: int) -> list[int]:
    return [pid, *(below for child in children(pid) for below in _tree(child))]


def _is_stopped(pid: int) -> bool:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][:1] == "T"


def _tree_bytes(pid: int) -> int:
    """Memory of a process tree that an image may have to hold: resident and swapped, files left out."""
    total = 0
    for one in _tree(pid):
        with contextlib.suppress(OSError):
            for line in Path(f"/proc/{one}/status").read_text().splitlines():
                if line.startswith(("RssAnon:", "RssShmem:", "VmSwap:")):
                    total += int(line.split()[1]) * 1024
    return total
