"""What each pool's worker is compatible with here, computed off the event loop and remembered for a while."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from dynamo_snapshot.model import WorkerSpec
from dynamo_snapshot.snapshots.compatibility import CompatibilityParts
from dynamo_snapshot.snapshots.fingerprint import fingerprint
from dynamo_snapshot.snapshots.host_facts import HostFacts, read_host_facts

REFRESH_S = 30.0
"""Files of a model or of an installed package that change are noticed within this time."""


class CompatibilityCache:
    """Called with a pool and its worker; answers from memory where that is fresh."""

    def __init__(self, criu_version: str, clock: Callable[[], float] = time.monotonic) -> None:
        self._criu_version, self._clock = criu_version, clock
        self._host: HostFacts | None = None
        self._known: dict[str, tuple[WorkerSpec, float, CompatibilityParts]] = {}
        self._locks: dict[str, asyncio.Lock] = {}

    async def __call__(self, pool: str, spec: WorkerSpec) -> CompatibilityParts:
        """Returns the parts of ``pool``'s worker; raises ``configuration_invalid`` when its files cannot be read."""
        async with self._locks.setdefault(pool, asyncio.Lock()):
            known = self._known.get(pool)
            if known and known[0] == spec and self._clock() - known[1] < 2 * REFRESH_S:
                return known[2]
            return await self._compute(pool, spec)

    async def refresh(self, pool: str, spec: WorkerSpec) -> CompatibilityParts:
        """Looks again."""
        async with self._locks.setdefault(pool, asyncio.Lock()):
            return await self._compute(pool, spec)

    async def _compute(self, pool: str, spec: WorkerSpec) -> CompatibilityParts:
        if self._host is None:
            self._host = await asyncio.to_thread(read_host_facts)
        parts = await asyncio.to_thread(fingerprint, spec, self._host, self._criu_version)
        self._known[pool] = (spec, self._clock(), parts)
        return parts
