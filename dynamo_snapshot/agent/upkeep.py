"""The node's snapshots at rest: what is there, what is to be digested again, what may go."""

from __future__ import annotations

import asyncio
import contextlib
import errno
from collections.abc import Callable, Mapping

import structlog

from dynamo_snapshot.agent.node import Node
from dynamo_snapshot.config import SnapshotPolicy
from dynamo_snapshot.errors import SnapshotError
from dynamo_snapshot.model import Reason, SnapshotSummary
from dynamo_snapshot.snapshots.retention import Candidate, RetentionPolicy, to_remove

log = structlog.get_logger()

_LOOK_S = 5.0


class Upkeep:
    """Keeps :attr:`summaries` true, and does the store's background work."""

    def __init__(
        self, node: Node, policies: Mapping[str, SnapshotPolicy], current_keys: Callable[[], Mapping[str, str]]
    ) -> None:
        self._node, self._policies, self._current_keys = node, policies, current_keys
        self.summaries: tuple[SnapshotSummary, ...] = ()
        self._woken = asyncio.Event()
        self._scrubbed_at = node.monotonic()

    def wake(self) -> None:
        """There is something new in the store."""
        self._woken.set()

    async def run(self) -> None:
        while True:
            self._woken.clear()
            try:
                await self.once()
            except OSError as error:  # a store that cannot be read is no reason to leave the replicas alone
                log.error("store_upkeep_failed", cause=str(error))
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_LOOK_S):
                    await self._woken.wait()

    async def once(self) -> None:
        """Looks, admits what is new, removes what retention says, and scrubs when it is time."""
        await self._look()
        await self._admit()
        await self._retain()
        await self._collect()
        if self._node.monotonic() - self._scrubbed_at > self._node.settings.scrub_interval_s:
            await self._scrub()
            self._scrubbed_at = self._node.monotonic()

    async def _look(self) -> None:
        found = await asyncio.to_thread(self._node.store.list)
        summaries = tuple(self._judged(summary) for summary in found)
        if summaries != self.summaries:
            self.summaries = summaries
            self._node.on_change()

    def _judged(self, summary: SnapshotSummary) -> SnapshotSummary:
        if summary.id not in self._node.distrusted:
            return summary
        return SnapshotSummary(
            id=summary.id,
            compatibility_key=summary.compatibility_key,
            size_bytes=summary.size_bytes,
            created_at=summary.created_at,
            admitted=False,
            reason=Reason.SNAPSHOT_CORRUPT.value,
        )

    async def _admit(self) -> None:
        """Digests what came from elsewhere, once."""
        for summary in self.summaries:
            if not summary.admitted and summary.reason is None:
                await self._digest(summary.id, self._node.store.admit)

    async def _scrub(self) -> None:
        for summary in self.summaries:
            if summary.admitted:
                await self._digest(summary.id, self._node.store.verify)

    async def _digest(self, snapshot_id: str, check: Callable[[str], object]) -> None:
        try:
            await asyncio.to_thread(check, snapshot_id)
        except SnapshotError as error:
            if error.reason is not Reason.SNAPSHOT_MISSING:
                log.error("snapshot_distrusted", snapshot=snapshot_id, cause=str(error))
                self._node.distrusted[snapshot_id] = error.message
        except OSError as error:  # of this snapshot: the others are looked after all the same
            log.error("snapshot_not_digested", snapshot=snapshot_id, cause=str(error))
            if error.errno == errno.EIO:
                self._node.distrusted[snapshot_id] = f"snapshot {snapshot_id} cannot be read: {error}"
        await self._look()

    async def _retain(self) -> None:
        for removal in await asyncio.to_thread(self._removals):
            try:
                await asyncio.to_thread(self._node.store.remove, removal)
                log.info("snapshot_removed", snapshot=removal)
            except SnapshotError as error:
                log.info("snapshot_not_removed", snapshot=removal, cause=str(error))
            await self._look()

    async def _collect(self) -> None:
        """Removes weight segments that no snapshot names, unless a worker here may rely on some without saying so."""
        if any(record.capture and not record.served for record in self._node.living()):
            return
        removed = await asyncio.to_thread(self._node.store.collect_segments)
        if removed:
            log.info("segments_removed", count=len(removed))

    def _removals(self) -> list[str]:
        pools: dict[str, list[Candidate]] = {}
        for summary in self.summaries:
            try:
                pool = self._node.store.manifest(summary.id).capture.pool
            except SnapshotError:
                continue  # for a person to look at
            pools.setdefault(pool, []).append(
                Candidate(
                    id=summary.id,
                    compatibility_key=summary.compatibility_key,
                    size_bytes=summary.size_bytes,
                    created_at=summary.created_at,
                    in_use=self._node.store.in_use(summary.id),
                    usable=summary.admitted and summary.reason is None,
                )
            )
        removals: list[str] = []
        keys = self._current_keys()
        for pool, policy in self._policies.items():
            if pool not in keys:
                continue  # which of its snapshots is the one in use is not known (yet): none goes
            rule = RetentionPolicy(keep=policy.keep, keep_for_s=policy.keep_for_s, keep_bytes=policy.keep_bytes)
            found = to_remove(pools.get(pool, []), rule, frozenset(keys.values()), self._node.clock())
            removals += [removal.id for removal in found]
        return removals
