"""A fleet's keys in etcd: which are its own, and that they are gone when it is.

Keys of a process go with its lease, at its orderly end or when the lease runs out. Leases are not revoked
here: in an etcd that others use too, a lease tells nobody whose it is.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from dynamo_snapshot.config import Fleet
from dynamo_snapshot.local.etcd import Etcd

POLL_S = 0.25
EXPIRY_GRACE_S = 3.0
"""How much later than its time to live etcd may end a lease."""


class FleetKeys:
    """The keys under a fleet's prefixes that were not there before it."""

    def __init__(self, etcd: Etcd, fleet: Fleet) -> None:
        self._etcd = etcd
        self._ttl_s = fleet.lease_ttl_s
        self._own = f"dynamo_snapshot/{fleet.namespace}/"
        self._workers = tuple(
            f"v1/instances/{fleet.namespace}/{pool.component}/{pool.endpoint}/" for pool in fleet.pools.values()
        )
        self._prefixes = dynamo_prefixes(fleet.namespace)
        self._before: frozenset[str] = frozenset()

    async def remember(self) -> None:
        """Notes what is there before anything of the fleet runs; it is not the fleet's."""
        self._before = frozenset(await self._under(self._prefixes))

    async def workers(self) -> list[str]:
        """Workers' registrations that are there though every worker has ended."""
        return sorted(set(await self._under(self._workers)) - self._before)

    async def clear(self, say: Callable[[str], None]) -> list[str]:
        """Removes what the fleet remembers, waits for its processes' leases to run out, and returns what stays."""
        for name in await self._under((self._own,)):
            await self._etcd.delete(name)
        deadline = time.monotonic() + self._ttl_s + EXPIRY_GRACE_S
        told = False
        while left := sorted(set(await self._under((*self._prefixes, self._own))) - self._before):
            if time.monotonic() > deadline:
                return left
            if not told:
                told = True
                say(f"waiting up to {self._ttl_s} s for {len(left)} keys in etcd to run out")
            await asyncio.sleep(POLL_S)
        return []

    async def _under(self, prefixes: tuple[str, ...]) -> list[str]:
        return [key.name for prefix in prefixes for key in await self._etcd.keys(prefix)]


def dynamo_prefixes(namespace: str) -> tuple[str, ...]:
    """Where Dynamo keeps what belongs to ``namespace``."""
    return (
        f"v1/instances/{namespace}/",
        f"v1/mdc/{namespace}/",
        f"v1/event_channels/namespace/{namespace}/",
        f"v1/event_sources/namespace/{namespace}/",
        f"v1/{namespace}/",
    )
