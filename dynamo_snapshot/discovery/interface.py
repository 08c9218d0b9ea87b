"""What is registered right now, and how a dead worker's registration is taken away."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Protocol, TypeAlias

from dynamo_snapshot.model import Instance

DiscoveryView: TypeAlias = tuple[Instance, ...] | None
"""Every registered instance of the fleet's namespace, or None: unknown, discovery cannot be read now."""


class Discovery(Protocol):
    """One Dynamo namespace as its frontend sees it."""

    def watch(self) -> AsyncIterator[DiscoveryView]:
        """Yields the whole view at once, then again after each change, until the iterator is closed.

        Goes on for ever: while the store cannot be read it yields None once and tries again.
        Instances come in the order of their ids. Intermediate views may be skipped, never the newest; a
        view may come more than once.
        """

    async def revoke(self, instance_id: int) -> None:
        """Takes whatever routes to ``instance_id`` out of discovery; nothing to do if it is gone.

        What describes its model may stay until its lease ends, for the worker that replaces it.
        Only for an instance whose process a node has reported as exited.

        Raises:
            SnapshotError: ``server_unreachable``.
        """
