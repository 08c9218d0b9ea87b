"""Carries retention out on a store."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from dynamo_snapshot.errors import SnapshotError
from dynamo_snapshot.model import Reason
from dynamo_snapshot.snapshots.retention import Candidate, Removal, RetentionPolicy, to_remove
from dynamo_snapshot.snapshots.store import SnapshotStore, pool_of


def collect(
    store: SnapshotStore, policies: Mapping[str, RetentionPolicy], current_keys: Collection[str], now: float
) -> list[Removal]:
    """Removes what each pool's policy says and returns what is gone; snapshots of other pools stay.

    Args:
        policies: by pool.
        current_keys: the compatibility keys that a cold start would have now, of any pool.
        now: wall-clock seconds since the epoch.
    """
    candidates: dict[str, list[Candidate]] = {pool: [] for pool in policies}
    for summary in store.list():
        pool = pool_of(summary.id)
        if pool in candidates:
            candidates[pool].append(
                Candidate(
                    id=summary.id,
                    compatibility_key=summary.compatibility_key,
                    size_bytes=summary.size_bytes,
                    created_at=summary.created_at,
                    in_use=store.in_use(summary.id),
                    usable=summary.reason is None,
                )
            )
    gone = []
    for pool, policy in policies.items():
        for removal in to_remove(candidates[pool], policy, current_keys, now):
            try:
                store.remove(removal.id)
            except SnapshotError as error:
                # Taken into use, or removed by someone else, since we looked: either way not ours to remove now.
                if error.reason not in (Reason.SNAPSHOT_IN_USE, Reason.SNAPSHOT_MISSING):
                    raise
            else:
                gone.append(removal)
    return gone
