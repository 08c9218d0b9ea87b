"""Segments kept in pinned memory by a loader: the GPU fetches them at the bus's own speed, with no core at work.

Pinning is slow (seconds for some GiB) and takes memory from the host for as long as it lasts, so it is
done ahead, within a bound; what was used longest ago goes first.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from dynamo_snapshot.agent.loader.wire import SegmentBytes
from worker_hooks.weights.memory import DeviceMemory
from worker_hooks.weights.pump import PinnedBytes, Pump, SegmentFile


class PinnedSegments:
    """Pinned copies by digest, at most ``capacity`` bytes of them. Its methods may be called from any thread."""

    def __init__(self, memory: DeviceMemory, pump: Pump, capacity: int) -> None:
        self._memory, self._pump, self._capacity = memory, pump, capacity
        self._held: OrderedDict[str, PinnedBytes] = OrderedDict()
        self._users: dict[str, int] = {}
        self._lock = threading.Lock()
        self._filling = threading.Lock()

    @property
    def bytes(self) -> int:
        """What is pinned now."""
        return sum(held.size for held in self._held.values())

    def fill(self, segments: Sequence[SegmentBytes]) -> None:
        """Pins those of ``segments`` that fit beside what is in use; the others stay what they are."""
        with self._filling:
            for segment in segments:
                if segment.digest in self._held or not self._make_room(segment.size):
                    continue
                file = SegmentFile(Path(segment.path), segment.size)
                pinned = self._memory.pin(segment.size)
                try:
                    self._pump.pin(file, pinned)
                except BaseException:
                    pinned.free()
                    raise
                finally:
                    file.close()
                with self._lock:
                    self._held[segment.digest] = PinnedBytes(pinned, segment.size)

    @contextmanager
    def borrowed(self, digests: Sequence[str]) -> Iterator[dict[str, PinnedBytes]]:
        """Gives those of ``digests`` that are pinned; they stay so until the block ends."""
        with self._lock:
            found = {digest: self._held[digest] for digest in digests if digest in self._held}
            for digest in found:
                self._held.move_to_end(digest)
                self._users[digest] = self._users.get(digest, 0) + 1
        try:
            yield found
        finally:
            with self._lock:
                for digest in found:
                    self._users[digest] -= 1
                    if not self._users[digest]:
                        del self._users[digest]

    def close(self) -> None:
        with self._lock:
            for held in self._held.values():
                held.pinned.free()
            self._held.clear()

    def _make_room(self, size: int) -> bool:
        with self._lock:
            idle = [digest for digest in self._held if digest not in self._users]
            if self.bytes - sum(self._held[digest].size for digest in idle) + size > self._capacity:
                return False
            while self.bytes + size > self._capacity:
                self._held.pop(idle.pop(0)).pinned.free()
            return True
