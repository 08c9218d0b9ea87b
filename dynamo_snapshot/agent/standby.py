"""Houses made ahead of need: one that is at hand spares a restore the making of it."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Awaitable, Callable
from typing import Generic, Protocol, TypeVar

import structlog

from dynamo_snapshot.errors import SnapshotError

log = structlog.get_logger()

REFILL_S = 1.0
"""How long after a house was taken the next is made: the restore that took it needs the processors first."""


class Standing(Protocol):
    """What is kept ready."""

    @property
    def usable(self) -> bool:
        """Whether it is still what it was when it was made."""


H = TypeVar("H", bound=Standing)


class Standby(Generic[H]):
    """Keeps ``count`` houses ready.

    Args:
        count: 0 keeps none.
        make: makes the house of a given name, which no other ever had: one that was taken is known by it for as
            long as it lives, and may outlive this agent; raises :class:`SnapshotError` and leaves nothing otherwise.
        discard: removes one that nobody took.
    """

    def __init__(
        self, count: int, make: Callable[[str], Awaitable[H]], discard: Callable[[H], Awaitable[None]]
    ) -> None:
        self._count, self._make, self._discard = count, make, discard
        self._ready: list[H] = []
        self._ended: list[H] = []
        """To be discarded."""
        self._wanted = asyncio.Event()
        self._full = asyncio.Event()
        """Set while nothing is being made."""
        self._task: asyncio.Task[None] | None = None

    def __repr__(self) -> str:
        return f"<Standby {len(self._ready)} of {self._count}>"

    def begin(self) -> None:
        """Begins to make houses, beside everything else."""
        if self._count and self._task is None:
            self._full.clear()
            self._task = asyncio.create_task(self._keep(), name="standby-houses")
            self._task.add_done_callback(lambda _: self._full.set())  # whatever ended it: nothing more will come

    def take(self) -> H | None:
        """Returns one that is ready, the caller's from now on; None: there is none."""
        self._wanted.set()
        self._full.clear()
        while self._ready:
            house = self._ready.pop(0)
            if house.usable:
                return house
            self._ended.append(house)
        return None

    async def full(self) -> None:
        """Returns once all are ready, or one could not be made; at once where nobody makes any."""
        if self._task is not None:
            await self._full.wait()

    async def end(self) -> None:
        """Makes no more, and removes what nobody took."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
            self._task = None
        self._ended += self._ready
        self._ready.clear()
        await self._clean()

    async def _clean(self) -> None:
        while self._ended:
            await self._discard(self._ended.pop(0))

    async def _keep(self) -> None:
        while True:
            self._wanted.clear()
            await self._clean()
            while len(self._ready) < self._count:
                try:
                    self._ready.append(await self._make(secrets.token_hex(8)))
                except SnapshotError as error:  # a restore that needs one says the same, to whom it concerns
                    log.warning("standby_house_not_made", cause=str(error))
                    break
            self._full.set()
            await self._wanted.wait()
            await asyncio.sleep(REFILL_S)
