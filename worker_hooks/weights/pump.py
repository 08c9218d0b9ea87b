"""Bytes between files and device memory: parallel reads, asynchronous copies, bounded pinned buffers."""

from __future__ import annotations

import hashlib
import os
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, Protocol, TypeVar

from worker_hooks.reasons import HookError, HookReason
from worker_hooks.weights.memory import DeviceMemory, Lane, Pinned
from worker_hooks.weights.segment import LEAF, combine, leaf_offsets

Chunk = TypeVar("Chunk")

CHUNK = LEAF
"""Bytes of one read and one copy: a leaf, so that what is in a buffer can be digested as it is."""


class Source(Protocol):
    """Where a segment's bytes come from."""

    size: int

    def send(self, lane: Lane, buffer: int, offset: int, count: int, address: int) -> None:
        """Queues ``count`` bytes from ``offset`` on for device ``address``; may use buffer number ``buffer``."""


class SegmentFile:
    """A segment's bytes on disk: from the page cache, or past it (``direct``: O_DIRECT)."""

    def __init__(self, path: Path, size: int, direct: bool = False) -> None:
        self.path, self.size = path, size
        try:
            self._descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | (os.O_DIRECT if direct else 0))
        except FileNotFoundError as error:
            raise HookError(HookReason.WEIGHTS_CORRUPT, f"weight segment {path} is missing") from error
        held = os.fstat(self._descriptor).st_size
        if held != size:
            self.close()
            raise HookError(HookReason.WEIGHTS_CORRUPT, f"weight segment {path} has {held} bytes instead of {size}")

    def send(self, lane: Lane, buffer: int, offset: int, count: int, address: int) -> None:
        lane.wait(buffer)
        self.read_into(lane.buffers[buffer][:count], offset)
        lane.to_device(address, buffer, count)

    def read_into(self, view: memoryview, offset: int) -> None:
        """Fills ``view`` from ``offset`` on; raises ``weights_corrupt`` where the file ends early."""
        done = 0
        while done < len(view):
            try:
                got = os.preadv(self._descriptor, [view[done:]], offset + done)
            except OSError as error:
                raise HookError(
                    HookReason.WEIGHTS_LOAD_FAILED,
                    f"weight segment {self.path} cannot be read at {offset}: {error.strerror}",
                ) from error
            if not got:
                raise HookError(
                    HookReason.WEIGHTS_CORRUPT,
                    f"weight segment {self.path} ends at byte {offset + done} of {self.size}",
                )
            done += got

    def close(self) -> None:
        os.close(self._descriptor)


class PinnedBytes:
    """A segment's bytes in pinned memory: the device fetches them without the processor's help."""

    def __init__(self, pinned: Pinned, size: int) -> None:
        self.pinned, self.size = pinned, size

    def send(self, lane: Lane, buffer: int, offset: int, count: int, address: int) -> None:
        lane.from_pinned(address, self.pinned.address + offset, count)


@dataclass(frozen=True, slots=True)
class Transfer:
    """A segment's bytes and where they go."""

    source: Source
    address: int


class Pump:
    """Lanes ready to move bytes: made once, since pinning memory is slow. One transfer at a time uses them all.

    Args:
        memory: the device.
        lanes: threads that read and copy.
        buffers: of each lane, of :data:`CHUNK` bytes: pinned memory is ``lanes * buffers * CHUNK``.
    """

    def __init__(self, memory: DeviceMemory, lanes: int = 14, buffers: int = 3) -> None:
        self._lanes = [memory.lane(buffers, CHUNK) for _ in range(lanes)]
        self._busy = threading.Lock()

    def load(
        self, transfers: Sequence[Transfer], cancelled: threading.Event | None = None, lanes: int | None = None
    ) -> None:
        """Returns when all bytes are on the device; raises ``HookError``, also when ``cancelled`` gets set.

        Args:
            lanes: at most so many take part; None: all.
        """
        chunks = [
            (transfer, offset, min(CHUNK, transfer.source.size - offset))
            for transfer in transfers
            for offset in leaf_offsets(transfer.source.size)
        ]

        def work(lane: Lane, chunk: tuple[Transfer, int, int], buffer: int) -> None:
            if cancelled is not None and cancelled.is_set():
                raise HookError(HookReason.WEIGHTS_LOAD_FAILED, "the load was cancelled")
            transfer, offset, count = chunk
            transfer.source.send(lane, buffer, offset, count, transfer.address + offset)

        self._run(chunks, work, lanes)

    def pin(self, file: SegmentFile, pinned: Pinned) -> None:
        """Reads a whole file into pinned memory."""

        def work(lane: Lane, offset: int, buffer: int) -> None:
            file.read_into(pinned.view[offset : min(offset + CHUNK, file.size)], offset)

        self._run(leaf_offsets(file.size), work)

    def warm(self, files: Iterable[SegmentFile]) -> None:
        """Reads files through, so that the page cache holds them."""
        chunks = [(file, at, min(CHUNK, file.size - at)) for file in files for at in leaf_offsets(file.size)]

        def work(lane: Lane, chunk: tuple[SegmentFile, int, int], buffer: int) -> None:
            file, offset, count = chunk
            lane.wait(buffer)
            file.read_into(lane.buffers[buffer][:count], offset)

        self._run(chunks, work)

    def digest(self, address: int, size: int) -> str:
        """Returns the digest (see :mod:`worker_hooks.weights.segment`) of device memory."""
        leaves = [b""] * len(leaf_offsets(size))

        def digest_leaf(view: memoryview, offset: int) -> None:
            leaves[offset // LEAF] = hashlib.sha256(view).digest()

        self._from_device(address, size, digest_leaf)
        return combine(leaves)

    def save(self, address: int, size: int, descriptor: int) -> None:
        """Writes device memory to a file, from its start."""

        def write(view: memoryview, offset: int) -> None:
            done = 0
            while done < len(view):
                done += os.pwrite(descriptor, view[done:], offset + done)

        self._from_device(address, size, write)

    def close(self) -> None:
        with self._busy:
            for lane in self._lanes:
                lane.close()
            self._lanes = []

    def _from_device(self, address: int, size: int, use: Callable[[memoryview, int], None]) -> None:
        def work(lane: Lane, offset: int, buffer: int) -> None:
            count = min(CHUNK, size - offset)
            lane.to_host(buffer, address + offset, count)
            lane.wait(buffer)
            use(lane.buffers[buffer][:count], offset)

        self._run(leaf_offsets(size), work)

    def _run(self, chunks: Sequence[Chunk], work: Callable[[Lane, Chunk, int], None], lanes: int | None = None) -> None:
        """Hands the chunks to the lanes until all are done or one fails; raises the first failure."""
        left = _Shared(iter(chunks))
        failures: list[BaseException] = []

        def drain(lane: Lane) -> None:
            try:
                lane.enter()
                try:
                    for turn, chunk in enumerate(left):
                        if failures:
                            break
                        work(lane, chunk, turn % len(lane.buffers))
                finally:
                    # Whatever happened: nothing may still be copied once the caller goes on.
                    lane.drain()
            except BaseException as failure:
                failures.append(failure)

        with self._busy:
            taking_part = self._lanes[:lanes]
            if chunks and not taking_part:
                raise HookError(HookReason.WEIGHTS_LOAD_FAILED, "no lane may move these bytes, or the pump is closed")
            threads = [threading.Thread(target=drain, args=(lane,), name="weights") for lane in taking_part]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        if failures:
            raise failures[0]


class _Shared(Generic[Chunk]):
    """An iterator that several threads may draw from."""

    def __init__(self, items: Iterator[Chunk]) -> None:
        self._items = items
        self._lock = threading.Lock()

    def __iter__(self) -> Iterator[Chunk]:
        return self

    def __next__(self) -> Chunk:
        with self._lock:
            return next(self._items)
