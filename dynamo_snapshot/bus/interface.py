"""How a node learns what is wanted of it, and how the fleet learns what is so.

Two retained lists a node: *wanted* (written by the fleet) and *reported* (written by the node). An
order stays in the first until its outcome stands in the second; the outcome stays until the order
has left the first. Delivery may skip intermediate versions, never the newest.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Protocol

from dynamo_snapshot.model import Reported, Wanted


class Bus(Protocol):
    """One fleet's bus. Every method may raise ``SnapshotError(SERVER_UNREACHABLE)``."""

    async def publish_wanted(self, wanted: Wanted) -> None:
        """Replaces the wanted list of ``wanted.node``; returns once it is retained."""

    async def publish_reported(self, reported: Reported) -> None:
        """Replaces the reported list of ``reported.node``; returns once it is retained."""

    async def read_wanted(self, node: str) -> Wanted | None:
        """The retained wanted list of ``node``; None if there is none."""

    async def read_reported(self) -> dict[str, Reported]:
        """The retained reports, by node."""

    def watch_wanted(self, node: str) -> AsyncIterator[Wanted]:
        """Yields the retained list, if any, then every newer one until the iterator is closed."""

    def watch_reported(self) -> AsyncIterator[Reported]:
        """Yields every node's retained report, then every newer one until the iterator is closed."""
