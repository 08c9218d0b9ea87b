"""A store within one process, for tests: the same behaviour as the one in etcd, and a switch for its outage."""

from __future__ import annotations

from dynamo_snapshot.errors import SnapshotError
from dynamo_snapshot.fleet.core.messages import Memory
from dynamo_snapshot.model import Reason


class Shelf:
    """What all stores of one fleet share."""

    def __init__(self) -> None:
        self.fence = 0
        self.memory = Memory()
        self.reachable = True


class InMemoryStore:
    """One controller's way to a :class:`Shelf`."""

    def __init__(self, shelf: Shelf) -> None:
        self._shelf = shelf
        self._fence = 0

    async def take_fence(self, at_least: int) -> int:
        self._reach()
        self._fence = self._shelf.fence = max(self._shelf.fence + 1, at_least)
        return self._fence

    async def load(self) -> Memory:
        self._reach()
        return self._shelf.memory

    async def save(self, memory: Memory) -> None:
        self._reach()
        if self._fence != self._shelf.fence:
            raise SnapshotError(Reason.STALE_FENCE, f"fence {self._fence} is not the highest any more")
        self._shelf.memory = memory

    def _reach(self) -> None:
        if not self._shelf.reachable:
            raise SnapshotError(Reason.SERVER_UNREACHABLE, "the store was switched off", "Switch it on.")
