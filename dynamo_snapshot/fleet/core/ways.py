"""How and where the next replica of a pool is started, or what is better waited for."""

from __future__ import annotations

from collections import Counter

from dynamo_snapshot.fleet import start_times
from dynamo_snapshot.fleet.core.draft import Draft
from dynamo_snapshot.fleet.core.lifecycle import PENDING
from dynamo_snapshot.fleet.core.messages import Memory
from dynamo_snapshot.fleet.core.state import Node, Replica
from dynamo_snapshot.model import Reason, ReplicaPhase, ReplicaState, Reported, SnapshotSummary, Value, Way

SAMPLES_TO_JUDGE = 3
"""Restores are ruled out as slower than cold starts only on this many samples of each."""
QUARANTINES_TO_STOP = 2
"""A compatibility key that lost this many snapshots to quarantine is not captured again."""


class Start(Value, frozen=True):
    """Order it."""

    node: str
    way: Way
    reason: str
    snapshot_id: str | None = None
    capture: bool = False


class Wake(Value, frozen=True):
    """Order a parked replica to serve."""

    replica_id: str
    reason: str


class Wait(Value, frozen=True):
    """Order nothing now."""

    reason: str


def choose(draft: Draft, pool: str, attempts: int) -> Start | Wake | Wait:
    """Chooses for one place of ``pool`` for which ``attempts`` orders have failed in a row."""
    heard = [node for node in draft.nodes.values() if node.reported is not None]
    if not heard:
        return Wait(reason="no node has reported yet")
    heard = draft.heard()
    if not heard:
        return Wait(reason=f"no node has reported for {draft.rules.node_silent_s:.0f} s")
    parked = _to_wake(draft, pool, heard)
    if parked is not None:
        wake_s = expected(draft, pool, Way.WAKE)
        return Wake(replica_id=parked.id, reason=f"it is parked; a wake is expected to take {wake_s:.1f} s")
    free = [node for node in heard if draft.occupied(node.name) < draft.rules.node_capacity]
    if not free:
        return Wait(reason=Reason.NODE_AT_CAPACITY)
    memory = draft.state.memory
    node = min(
        free,
        key=lambda n: (newest_usable(memory, n.reported, pool) is None, draft.occupied(n.name), n.name),
    )
    snapshot = newest_usable(memory, node.reported, pool)
    if snapshot is None:
        return _without_snapshot(draft, node, pool, attempts)
    rules = draft.pool_rules(pool)
    if attempts and attempts >= rules.max_attempts - 1:
        return Start(node=node.name, way=Way.COLD_START, reason=f"{attempts} starts failed: the last try is cold")
    times = memory.start_times
    restores = start_times.samples(times, pool, Way.RESTORE)
    colds = start_times.samples(times, pool, Way.COLD_START)
    restore_s, cold_s = expected(draft, pool, Way.RESTORE), expected(draft, pool, Way.COLD_START)
    if min(len(restores), len(colds)) >= SAMPLES_TO_JUDGE and restore_s > cold_s:
        reason = f"a cold start is expected to take {cold_s:.1f} s, a restore {restore_s:.1f} s"
        return Start(node=node.name, way=Way.COLD_START, reason=reason)
    reason = f"a restore is expected to take {restore_s:.1f} s, a cold start {cold_s:.1f} s"
    return Start(node=node.name, way=Way.RESTORE, snapshot_id=snapshot.id, reason=reason)


def newest_usable(memory: Memory, report: Reported | None, pool: str) -> SnapshotSummary | None:
    """The newest snapshot of ``report`` that may stand in for a cold start of ``pool`` on that node."""
    fitting = usable(memory, report, pool)
    return max(fitting, key=lambda snapshot: (snapshot.created_at, snapshot.id), default=None)


def usable(memory: Memory, report: Reported | None, pool: str) -> list[SnapshotSummary]:
    """All of these."""
    return [
        snapshot
        for snapshot in _compatible(report, pool)
        if snapshot.admitted and snapshot.reason is None and snapshot.id not in memory.quarantined
    ]


def _to_wake(draft: Draft, pool: str, heard: list[Node]) -> Replica | None:
    """The parked replica to wake next, on the node with fewest replicas that serve or will; None: there is none."""
    failed_at = draft.pools[pool].wake_failed_at
    if failed_at is not None and draft.now < failed_at + draft.rules.wake_again_s:
        return None
    fitting = {node.name: {s.id for s in usable(draft.state.memory, node.reported, pool)} for node in heard}
    ready = [
        replica
        for replica in draft.spares(pool)
        # One whose own order has not ended yet would be woken in its middle.
        if replica.state is ReplicaState.PARKED
        and replica.start_order is None
        and replica.snapshot_id in fitting.get(replica.node, ())
    ]
    busy = Counter(replica.node for replica in draft.replicas.values() if replica.counts)
    return min(ready, key=lambda replica: (busy[replica.node], replica.since, replica.id), default=None)


def expected(draft: Draft, pool: str, way: Way) -> float:
    """Seconds from order to serving that ``way`` is expected to take: the median, or a prior until measured."""
    rules = draft.rules
    prior = {
        Way.WAKE: rules.wake_prior_s,
        Way.RESTORE: rules.restore_prior_s,
        Way.COLD_START: rules.cold_start_prior_s,
    }[way]
    measured = start_times.median(start_times.samples(draft.state.memory.start_times, pool, way))
    return prior if measured is None else measured


def _compatible(report: Reported | None, pool: str) -> list[SnapshotSummary]:
    key = report.compatibility_keys.get(pool) if report is not None else None
    if report is None or key is None:
        return []
    return [snapshot for snapshot in report.snapshots if snapshot.compatibility_key == key]


def _without_snapshot(draft: Draft, node: Node, pool: str, attempts: int) -> Start | Wait:
    key = node.reported.compatibility_keys.get(pool) if node.reported is not None else None
    being_admitted = any(not s.admitted and s.reason is None for s in _compatible(node.reported, pool))
    if draft.now < node.first_seen + draft.rules.node_wait_s:
        if key is None:
            return Wait(reason=f"node {node.name} is working out which snapshots fit it: model files, packages, CRIU")
        if being_admitted:
            return Wait(reason=f"node {node.name} is admitting a snapshot")
    capturing = [r for r in draft.replicas.values() if r.pool == pool and r.node == node.name and on_the_way(r)]
    cold_s = expected(draft, pool, Way.COLD_START)
    if capturing:
        wait_s = min(_until_published(draft, replica) for replica in capturing)
        if wait_s + expected(draft, pool, Way.RESTORE) < cold_s:
            return Wait(reason="the first snapshot is expected sooner than a cold start")
        reason = f"a cold start takes {cold_s:.1f} s, the first snapshot is expected in {wait_s:.1f} s"
        return Start(node=node.name, way=Way.COLD_START, reason=reason)
    capture, reason = _worth_capturing(draft, pool, key, attempts)
    return Start(node=node.name, way=Way.COLD_START, capture=capture, reason=reason)


def _worth_capturing(draft: Draft, pool: str, key: str | None, attempts: int) -> tuple[bool, str]:
    rules = draft.pool_rules(pool)
    if not rules.captures:
        return False, "no snapshot, and the pool's policy is never to capture"
    gain = expected(draft, pool, Way.COLD_START) - expected(draft, pool, Way.RESTORE)
    if gain < rules.minimum_gain_s:
        return False, f"no snapshot: a restore would gain {gain:.1f} s, below {rules.minimum_gain_s:.1f} s"
    if attempts and attempts >= rules.max_attempts - 1:
        return False, f"{attempts} starts failed: the last try is cold and without a capture"
    if draft.state.capture_failures.get(key or "", 0) >= rules.quarantine_after:
        return False, f"no snapshot: {rules.quarantine_after} captures of this key failed in a row"
    lost = sum(entry.compatibility_key == key for entry in draft.state.memory.quarantined.values())
    if lost >= QUARANTINES_TO_STOP:
        return False, f"no snapshot: {lost} of this key are in quarantine"
    return True, "first worker of its compatibility key: to be captured"


def on_the_way(replica: Replica) -> bool:
    """Whether a snapshot of this replica may still come."""
    if replica.capture_order is not None:
        return True
    before = {None, ReplicaPhase.STARTING, ReplicaPhase.READY_FOR_SNAPSHOT}
    return replica.captures and not replica.capture_tried and replica.state in PENDING and replica.phase in before


def _until_published(draft: Draft, replica: Replica) -> float:
    capture_s = start_times.median(draft.pools[replica.pool].capture_seconds) or draft.rules.capture_prior_s
    if replica.capture_began is not None:
        begun, total = replica.capture_began, capture_s
    else:
        begun = replica.since if replica.ordered_at is None else replica.ordered_at
        total = expected(draft, replica.pool, Way.COLD_START) + capture_s
    # What is late by some time is expected to take as long again: so nobody waits for ever.
    return abs(begun + total - draft.now)
