"""A bus within one process: for tests, and for a fleet whose controller and agent share an event loop."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

from dynamo_snapshot.model import Reported, Wanted


class InProcessBus:
    """Keeps the newest lists in memory. Used from one event loop."""

    def __init__(self) -> None:
        self._wanted: dict[str, Wanted] = {}
        self._reported: dict[str, Reported] = {}
        self._changed = asyncio.Event()

    async def publish_wanted(self, wanted: Wanted) -> None:
        self._wanted[wanted.node] = wanted
        self._wake()

    async def publish_reported(self, reported: Reported) -> None:
        self._reported[reported.node] = reported
        self._wake()

    async def read_wanted(self, node: str) -> Wanted | None:
        return self._wanted.get(node)

    async def read_reported(self) -> dict[str, Reported]:
        return dict(self._reported)

    async def watch_wanted(self, node: str) -> AsyncIterator[Wanted]:
        seen: Wanted | None = None
        while True:
            changed = self._changed  # taken before looking, so that no change between the two is missed
            current = self._wanted.get(node)
            if current is not None and current != seen:
                seen = current
                yield current
            else:
                await changed.wait()

    async def watch_reported(self) -> AsyncIterator[Reported]:
        seen: dict[str, Reported] = {}
        while True:
            changed = self._changed
            news = [report for node, report in self._reported.items() if seen.get(node) != report]
            for report in news:
                seen[report.node] = report
                yield report
            if not news:
                await changed.wait()

    def _wake(self) -> None:
        # A fresh event for those who wait next; the old one stays set for those who wait now.
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()
