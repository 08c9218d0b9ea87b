"""What follows when a replica fails: its place is vacant, its snapshot may be to blame, its pool may pause."""

from __future__ import annotations

from msgspec.structs import replace

from dynamo_snapshot.fleet.core.draft import Draft
from dynamo_snapshot.fleet.core.lifecycle import WANTED, Happening
from dynamo_snapshot.fleet.core.messages import Quarantine
from dynamo_snapshot.fleet.core.state import Block, Replica
from dynamo_snapshot.model import OrderStatus, Outcome, Reason, ReplicaPhase, ReplicaState, Way

NOT_THE_SNAPSHOT = frozenset(
    {
        Reason.CANCELLED,
        Reason.AGENT_RESTARTED,
        Reason.STALE_FENCE,
        Reason.UNKNOWN_REPLICA,
        Reason.NODE_AT_CAPACITY,
        Reason.PORT_IN_USE,
        Reason.DISK_FULL,
        Reason.DISK_FAILED,
        Reason.NOT_PRIVILEGED,
        Reason.CRIU_MISSING,
        Reason.CRIU_TOO_OLD,
        Reason.SERVER_UNREACHABLE,
        Reason.CUDA_MISSING,
        Reason.CUDA_HELPER_DIED,
        Reason.LOADER_DIED,
        Reason.GPU_OUT_OF_MEMORY,
        Reason.GPU_COUNT_MISMATCH,
        Reason.GPU_MODEL_MISMATCH,
        Reason.DRIVER_MISMATCH,
        Reason.MIG_UNSUPPORTED,
    }
)
"""Failures of a restore or a capture that say nothing of the snapshot."""
CERTAINLY_THE_SNAPSHOT = frozenset({Reason.SNAPSHOT_CORRUPT, Reason.SNAPSHOT_CHANGED, Reason.WEIGHTS_CORRUPT})
"""Failures after which a snapshot is never tried again."""


def fail(draft: Draft, replica_id: str, happening: Happening, reason: str, message: str = "") -> None:
    """Moves a replica to FAILED (``happening``: BROKE or OVERDUE) and accounts for it once."""
    replica = draft.replicas[replica_id]
    was_wanted = replica.state in WANTED
    draft.move(replica_id, happening, reason=reason, deadline=None)
    if not was_wanted:
        return
    what = f"{replica.id} failed after {draft.now - replica.since:.1f} s {replica.state}"
    draft.record(replica.pool, what, f"{reason}: {message}" if message else reason)
    # While discovery cannot be read no worker can register: that is nobody's failure.
    blameless = not draft.state.discovery_known
    new = replica.served_since is None and replica.state is not ReplicaState.PARKED
    if new and replica.way is not Way.COLD_START and not blameless:
        _blame_snapshot(draft, replica, reason)
    if replica.parks:
        _pause_parking(draft, replica, reason)
    elif new and replica.way is Way.WAKE:
        wake_failed(draft, replica, reason)
    else:
        attempts = 0 if _proven(draft, replica) else replica.attempts + (not blameless)
        _vacate(draft, replica.pool, attempts, reason)


def wake_failed(draft: Draft, replica: Replica, reason: str) -> None:
    """Its place is filled otherwise, which is as good a try as if it had never been woken."""
    draft.set_pool(replica.pool, wake_failed_at=draft.now)
    _vacate(draft, replica.pool, replica.attempts, reason)


def succeeded(draft: Draft, replica: Replica) -> None:
    """A replica serves: its snapshot is good again."""
    if replica.way is not Way.COLD_START and replica.snapshot_id in draft.state.snapshot_failures:
        failures = dict(draft.state.snapshot_failures)
        del failures[replica.snapshot_id]
        draft.set(snapshot_failures=failures)


def end_pauses(draft: Draft) -> None:
    """Ends the pause of each pool in which a replica that was ordered since has proven itself."""
    for pool, state in list(draft.pools.items()):
        block = state.block
        if block is None:
            continue
        for replica in draft.alive(pool):
            if (
                replica.state is ReplicaState.SERVING
                and (replica.ordered_at or 0.0) >= block.since
                and _proven(draft, replica)
            ):
                draft.record(pool, f"{replica.id} has proven itself", "every deficit is ordered again")
                draft.set_pool(pool, block=None)
                break


def _proven(draft: Draft, replica: Replica) -> bool:
    return replica.served_since is not None and draft.now - replica.served_since >= draft.rules.proven_s


def captured(draft: Draft, pool: str, key: str | None, outcome: Outcome) -> None:
    """A capture of a worker with compatibility ``key`` ended."""
    if outcome.status is OrderStatus.DONE:
        samples = (*draft.pools[pool].capture_seconds, outcome.finished_at - outcome.started_at)[-32:]
        draft.set_pool(pool, capture_seconds=samples)
        draft.set(capture_failures={k: count for k, count in draft.state.capture_failures.items() if k != key})
    elif outcome.status is OrderStatus.FAILED and outcome.reason not in NOT_THE_SNAPSHOT:
        capture_failed(draft, key)


def capture_failed(draft: Draft, key: str | None) -> None:
    """Notes a failed capture against its compatibility key, where that is known."""
    if key is not None:
        failures = draft.state.capture_failures
        draft.set(capture_failures={**failures, key: failures.get(key, 0) + 1})


def _blame_snapshot(draft: Draft, replica: Replica, reason: str) -> None:
    snapshot_id = replica.snapshot_id
    # A worker that does not know how to park, or was not parked when it was to be woken, may well be restored.
    if snapshot_id is None or reason in NOT_THE_SNAPSHOT or reason == Reason.WORKER_NOT_READY:
        return
    if reason == Reason.DEADLINE_EXCEEDED and replica.phase in (None, ReplicaPhase.PARKED):
        return  # its node never began, or never let it go: that says something of the node
    count = draft.state.snapshot_failures.get(snapshot_id, 0) + 1
    draft.set(snapshot_failures={**draft.state.snapshot_failures, snapshot_id: count})
    limit = 1 if reason in CERTAINLY_THE_SNAPSHOT else draft.pool_rules(replica.pool).quarantine_after
    memory = draft.state.memory
    if count >= limit and snapshot_id not in memory.quarantined:
        reported = draft.nodes[replica.node].reported
        keys = {summary.id: summary.compatibility_key for summary in reported.snapshots} if reported else {}
        entry = Quarantine(compatibility_key=keys.get(snapshot_id, ""), reason=reason)
        draft.set(memory=replace(memory, quarantined={**memory.quarantined, snapshot_id: entry}))
        draft.record(replica.pool, f"snapshot {snapshot_id} quarantined", f"{count} failed in a row, last: {reason}")


def _pause_parking(draft: Draft, replica: Replica, reason: str) -> None:
    """What fails when it is parked is tried again more and more seldom: nobody waits for it."""
    if replica.state is ReplicaState.PARKED and draft.now - replica.since >= draft.rules.proven_s:
        return
    known = draft.pools[replica.pool].parking_pause
    pause = min(known.pause * 2, draft.rules.block_limit_s) if known else draft.rules.block_s
    block = Block(since=draft.now, until=draft.now + pause, pause=pause, reason=reason)
    draft.set_pool(replica.pool, parking_pause=block)
    draft.record(replica.pool, f"nothing is parked for {pause:.0f} s", f"{replica.id} failed: {reason}")


def _vacate(draft: Draft, pool: str, attempts: int, reason: str) -> None:
    state = draft.set_pool(pool, vacancies=(*draft.pools[pool].vacancies, attempts))
    rules = draft.pool_rules(pool)
    if attempts < rules.max_attempts:
        return
    block = state.block
    if block is not None and draft.now < block.until:
        return  # replicas that were on their way when the pause began
    pause = min(block.pause * 2, draft.rules.block_limit_s) if block else draft.rules.block_s
    draft.set_pool(pool, block=Block(since=draft.now, until=draft.now + pause, pause=pause, reason=reason))
    draft.record(pool, f"no starts for {pause:.0f} s", f"{attempts} failed in a row for one replica, last: {reason}")
