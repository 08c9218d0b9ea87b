"""Discovery within one process, for tests: the same behaviour as the real one, and a switch for its outage."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

from dynamo_snapshot.discovery.interface import DiscoveryView
from dynamo_snapshot.errors import SnapshotError
from dynamo_snapshot.model import Instance, Reason


class InMemoryDiscovery:
    """Used from one event loop."""

    def __init__(self) -> None:
        self._instances: dict[int, Instance] = {}
        self._reachable = True
        self._changed = asyncio.Event()

    async def watch(self) -> AsyncIterator[DiscoveryView]:
        first = True
        seen: DiscoveryView = None
        while True:
            changed = self._changed  # taken before looking, so that no change between the two is missed
            view = self._view()
            if first or view != seen:
                first, seen = False, view
                yield view
            else:
                await changed.wait()

    async def revoke(self, instance_id: int) -> None:
        if not self._reachable:
            raise SnapshotError(Reason.SERVER_UNREACHABLE, "discovery was switched off", "Switch it on.")
        self.unregister(instance_id)

    def register(self, instance: Instance) -> None:
        """A worker registers."""
        self._instances[instance.instance_id] = instance
        self._wake()

    def unregister(self, instance_id: int) -> None:
        """A worker leaves."""
        self._instances.pop(instance_id, None)
        self._wake()

    def set_reachable(self, reachable: bool) -> None:
        """Begins or ends an outage."""
        self._reachable = reachable
        self._wake()

    def _view(self) -> DiscoveryView:
        if not self._reachable:
            return None
        return tuple(self._instances[instance] for instance in sorted(self._instances))

    def _wake(self) -> None:
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()
