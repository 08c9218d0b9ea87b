"""What outlives a controller, in etcd: its fence and its memory, under ``dynamo_snapshot/<namespace>/``.

The fence is a counter that each controller raises by compare-and-swap when it starts. It is not etcd's
own revision, which begins anew when etcd's data is lost, while nodes remember the highest fence for ever.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Protocol

import aetcd
import msgspec
import structlog

from dynamo_snapshot.discovery.client import connected, etcd_errors
from dynamo_snapshot.errors import SnapshotError
from dynamo_snapshot.fleet.core.messages import Memory
from dynamo_snapshot.model import Reason, decode, encode

log = structlog.get_logger()


class Store(Protocol):
    """Every method may raise ``SnapshotError(server_unreachable)``."""

    async def take_fence(self, at_least: int) -> int:
        """Makes the caller the one writer; returns its fence, above every one before and ``at_least``."""

    async def load(self) -> Memory:
        """What the last writer remembered; empty without one."""

    async def save(self, memory: Memory) -> None:
        """Remembers; raises ``stale_fence`` when another has taken the fence since."""


class EtcdStore:
    """Use :func:`etcd_store`."""

    def __init__(self, client: aetcd.Client, url: str, namespace: str) -> None:
        self._client = client
        self._url = url
        self._fence_key = f"dynamo_snapshot/{namespace}/fence".encode()
        self._memory_key = f"dynamo_snapshot/{namespace}/memory".encode()
        self._fence = 0

    async def take_fence(self, at_least: int) -> int:
        transactions = self._client.transactions
        while True:
            with etcd_errors(self._url, "take the fleet's fence"):
                present = await self._client.get(self._fence_key)
                last = 0 if present is None else int(present.value)
                fence = max(last + 1, at_least)
                unchanged = (
                    transactions.version(self._fence_key) == 0
                    if present is None
                    else transactions.mod(self._fence_key) == present.mod_revision
                )
                taken, _ = await self._client.transaction(
                    compare=[unchanged],
                    success=[transactions.put(self._fence_key, str(fence).encode())],
                    failure=[],
                )
            if taken:
                self._fence = fence
                return fence
            await asyncio.sleep(0)  # another controller was faster: read again

    async def load(self) -> Memory:
        with etcd_errors(self._url, "read what the last controller left"):
            present = await self._client.get(self._memory_key)
        if present is None:
            return Memory()
        try:
            return decode(present.value, Memory)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            log.warning("memory_unreadable", key=self._memory_key.decode(), cause=str(error))
            return Memory()

    async def save(self, memory: Memory) -> None:
        transactions = self._client.transactions
        fence = str(self._fence).encode()
        put = transactions.put(self._memory_key, encode(memory))
        with etcd_errors(self._url, "remember targets"):
            saved, _ = await self._client.transaction(
                compare=[transactions.value(self._fence_key) == fence], success=[put], failure=[]
            )
            if not saved:  # an etcd that lost its data knows of no fence at all: that is nobody else's
                saved, _ = await self._client.transaction(
                    compare=[transactions.version(self._fence_key) == 0],
                    success=[transactions.put(self._fence_key, fence), put],
                    failure=[],
                )
        if not saved:
            raise SnapshotError(
                Reason.STALE_FENCE,
                f"fence {self._fence} is not the highest any more: another controller has started",
                "Run one controller for each Dynamo namespace.",
            )


@asynccontextmanager
async def etcd_store(url: str, namespace: str) -> AsyncIterator[EtcdStore]:
    """The store of Dynamo ``namespace`` in the etcd at ``url``; it may be down, each call tries anew."""
    async with connected(url) as client:
        yield EtcdStore(client, url, namespace)
