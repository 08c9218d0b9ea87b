"""A box between a task that must not wait and one that carries out: the newest value of each key."""

from __future__ import annotations

import asyncio
from typing import Generic, TypeVar

K = TypeVar("K")
V = TypeVar("V")


class Mailbox(Generic[K, V]):
    """Used from one event loop. A value replaces an older one of its key that was not taken yet."""

    def __init__(self) -> None:
        self._values: dict[K, V] = {}
        self._filled = asyncio.Event()

    def put(self, key: K, value: V) -> None:
        self._values[key] = value
        self._filled.set()

    def put_back(self, key: K, value: V) -> None:
        """Puts a value back that could not be carried out, unless a newer one has come."""
        self._values.setdefault(key, value)
        self._filled.set()

    async def take(self) -> tuple[K, V]:
        """Waits for a value and takes it out; keys come in the order in which they were filled."""
        while not self._values:
            self._filled.clear()
            await self._filled.wait()
        key = next(iter(self._values))
        return key, self._values.pop(key)
