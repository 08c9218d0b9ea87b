"""Prefetch: a snapshot's images and weight segments read into the page cache, for restores to come."""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import structlog

from dynamo_snapshot.agent.node import Node
from dynamo_snapshot.agent.page_cache import available_bytes, cached_bytes, read_into_cache
from dynamo_snapshot.agent.pipelines.held_snapshot import HeldSnapshot
from dynamo_snapshot.agent.replica import Replica
from dynamo_snapshot.model import Order, WorkerSpec

log = structlog.get_logger()

LANES = 4
"""Files that are read at once."""
SHARE_OF_AVAILABLE = 0.5
"""Of the memory that programs could still have, at most this much is read into."""


class Prefetch:
    """The steps of one prefetch, by the names of its phases. One at a time a node, as they share its disks."""

    def __init__(self, node: Node, order: Order, spec: WorkerSpec) -> None:
        self._node, self._order = node, order
        self.replica: Replica | None = None
        """There is none."""
        self._slot = False
        self._snapshot: HeldSnapshot | None = None
        self._files: list[Path] = []

    async def queue(self) -> None:
        await self._node.prefetch_slot.acquire()
        self._slot = True

    async def admit(self) -> None:
        snapshot = self._snapshot = HeldSnapshot.of(self._node, self._order)
        manifest = await snapshot.take()
        segments = self._node.store.segments.folder
        self._files = [snapshot.images / entry.path for entry in manifest.files]
        self._files += [segments / digest for digest in dict.fromkeys(w.digest for w in manifest.capture.weights)]

    async def read(self) -> None:
        stopped = threading.Event()
        reading = asyncio.create_task(asyncio.to_thread(self._read, stopped), name=f"prefetch-{self._order.id}")
        try:
            done = await asyncio.shield(reading)
        finally:
            stopped.set()
            await asyncio.wait({reading})
            await self.give_back()
            await self.leave_queue()
        log.info("prefetched", snapshot=self._order.snapshot_id, **done)

    async def give_back(self) -> None:
        """Undo: the hold on the snapshot."""
        if self._snapshot is not None:
            self._snapshot.leave()

    async def leave_queue(self) -> None:
        """Undo: the slot."""
        if self._slot:
            self._slot = False
            self._node.prefetch_slot.release()

    def _read(self, stopped: threading.Event) -> dict[str, int]:
        """Reads what is missing, images before weights; returns how many bytes of which kind. Blocks."""
        missing = [(path, path.stat().st_size - cached_bytes(path)) for path in self._files]
        missing = [(path, size) for path, size in missing if size > 0]
        room = int(available_bytes() * SHARE_OF_AVAILABLE)
        wanted: list[Path] = []
        for path, size in missing:
            room -= size
            if room < 0:
                break
            wanted.append(path)
        with ThreadPoolExecutor(LANES, "prefetch") as pool:
            read = sum(pool.map(lambda path: read_into_cache(path, stopped.is_set), wanted))
        return {"read_bytes": read, "left_out_bytes": sum(size for _, size in missing[len(wanted) :])}
