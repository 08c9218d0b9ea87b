"""What is kept ready beside what serves: parked replicas, and snapshots in nodes' memory.

Nobody waits for either, so they come after everything else: one is parked at a time, and only while nothing
is on its way to serving.
"""

from __future__ import annotations

from msgspec.structs import replace

from dynamo_snapshot.fleet import identity
from dynamo_snapshot.fleet.core.draft import Draft
from dynamo_snapshot.fleet.core.lifecycle import PENDING, Happening
from dynamo_snapshot.fleet.core.rules import PoolRules
from dynamo_snapshot.fleet.core.state import Node, Replica, State
from dynamo_snapshot.fleet.core.ways import newest_usable
from dynamo_snapshot.model import OrderKind, PoolHint, ReplicaState, SnapshotSummary, Way


def parked_target(state: State, pool: str, now: float) -> int:
    """How many replicas of ``pool`` are to be parked: as a fresh hint says, or else as it is set."""
    rules = state.rules.pools[pool]
    hint = _hint(state, rules, now)
    if hint is None or hint.parked is None or hint.parked < 0:  # unknown is not zero
        return rules.parked
    return min(rules.max_replicas, hint.parked)


def keep_ready(draft: Draft) -> None:
    """Parks what is missing, withdraws what is too much or of no use, and has snapshots read; nothing while blind."""
    if not draft.state.discovery_known:
        return
    for pool in draft.rules.pools:
        _withdraw(draft, pool)
    for pool in draft.rules.pools:
        _park(draft, pool)
        _prefetch(draft, pool)


def make_room(draft: Draft, pool: str, places: int) -> None:
    """Every node is full: what is parked gives way to ``places`` replicas of ``pool`` that are to serve."""
    heard = {node.name for node in draft.heard()}  # what ends on another makes no room that could be used
    ending = (ReplicaState.DRAINING, ReplicaState.FAILED)
    leaving = sum(replica.state in ending and replica.node in heard for replica in draft.replicas.values())
    spares = [spare for name in draft.rules.pools for spare in draft.spares(name) if spare.node in heard]
    spares.sort(key=lambda replica: (replica.pool == pool, *_worth(replica)))
    for replica in spares[: max(0, places - leaving)]:
        _end(draft, replica, f"its place is needed: a replica of {pool} is to serve, and every node is full")


def _hint(state: State, rules: PoolRules, now: float) -> PoolHint | None:
    hint = state.hint
    if hint is None or now >= hint.expires_at:
        return None
    return hint.prefill if rules.role == "prefill" else hint.decode


def _withdraw(draft: Draft, pool: str) -> None:
    for replica in draft.spares(pool):
        if (why := _useless(draft, replica)) is not None:
            _end(draft, replica, why)
    target = parked_target(draft.state, pool, draft.now)
    spares = sorted(draft.spares(pool), key=_worth)
    for replica in spares[: max(0, len(spares) - target)]:
        _end(draft, replica, f"{len(spares)} parked are too many for {target}")


def _worth(replica: Replica) -> tuple[bool, float]:
    """What is not parked yet costs least to lose, then the newest."""
    return replica.state is ReplicaState.PARKED, -replica.since


def _useless(draft: Draft, replica: Replica) -> str | None:
    """Why it will never be woken; None: it may be, as far as its node tells."""
    if replica.snapshot_id in draft.state.memory.quarantined:
        return f"its snapshot {replica.snapshot_id} is in quarantine"
    report = draft.nodes[replica.node].reported
    key = report.compatibility_keys.get(replica.pool) if report is not None else None
    if report is None or key is None:
        return None
    for snapshot in report.snapshots:
        if snapshot.id != replica.snapshot_id:
            continue
        if snapshot.reason is not None:
            return f"its snapshot {snapshot.id} may not be used: {snapshot.reason}"
        if snapshot.compatibility_key != key:
            return "the pool runs another configuration by now"
    return None


def _end(draft: Draft, replica: Replica, reason: str) -> None:
    draft.record(replica.pool, f"{replica.id} is not kept parked", reason)
    draft.move(replica.id, Happening.WITHDRAWN)


def _park(draft: Draft, pool: str) -> None:
    spares = draft.spares(pool)
    if len(spares) >= parked_target(draft.state, pool, draft.now) or _something_else_comes_first(draft, pool):
        return
    pause = draft.pools[pool].parking_pause
    if pause is not None and draft.now < pause.until:
        return
    choices = [
        (sum(spare.node == node.name for spare in spares), draft.occupied(node.name), node.name, snapshot)
        for node, snapshot in _with_snapshot(draft, pool)
        if draft.occupied(node.name) < draft.rules.node_capacity
    ]
    if not choices:
        return
    _, _, node_name, snapshot = min(choices, key=lambda choice: choice[:3])
    replica = Replica(
        id=identity.replica_id(pool, draft.state.fence, draft.next_serial()),
        pool=pool,
        node=node_name,
        way=Way.RESTORE,
        state=ReplicaState.ORDERED,
        since=draft.now,
        ordered_at=draft.now,
        snapshot_id=snapshot.id,
        parks=True,
    )
    reason = f"{len(spares)} of {parked_target(draft.state, pool, draft.now)} are parked"
    seconds = draft.pool_rules(pool).restore_s
    order = draft.issue(OrderKind.PARK, replica, seconds, reason, snapshot_id=snapshot.id)
    draft.replicas[replica.id] = replica
    draft.set_replica(replica.id, start_order=order.id, deadline=order.deadline + draft.rules.outcome_grace_s)
    draft.record(pool, f"park of {replica.id} on {node_name}", reason)


def _something_else_comes_first(draft: Draft, pool: str) -> bool:
    if any(replica.state in PENDING for replica in draft.replicas.values()):
        return True
    if len(draft.alive(pool)) < draft.pools[pool].target:
        return True
    # A node that is about to report may have parked ones already.
    unheard = any(node.reported is None for node in draft.nodes.values())
    return unheard and draft.now < draft.state.started_at + draft.rules.settle_s


def _prefetch(draft: Draft, pool: str) -> None:
    hint = _hint(draft.state, draft.pool_rules(pool), draft.now)
    if hint is None or not hint.prefetch:
        return
    for node, snapshot in _with_snapshot(draft, pool):
        asked_at = node.prefetched.get(snapshot.id)
        if asked_at is not None and draft.now < asked_at + draft.rules.prefetch_again_s:
            continue
        name = f"prefetch-{identity.order_id(draft.state.fence, draft.next_serial())}"
        seconds = draft.pool_rules(pool).prefetch_s
        draft.issue_to(
            node.name, OrderKind.PREFETCH, name, pool, seconds, "the planner's hint", snapshot_id=snapshot.id
        )
        known = {summary.id for summary in node.reported.snapshots} if node.reported is not None else set()
        asked = {name: at for name, at in node.prefetched.items() if name in known}
        draft.nodes[node.name] = replace(draft.nodes[node.name], prefetched={**asked, snapshot.id: draft.now})
        draft.record(pool, f"prefetch of {snapshot.id} on {node.name}", "the planner's hint")


def _with_snapshot(draft: Draft, pool: str) -> list[tuple[Node, SnapshotSummary]]:
    """The nodes that may be given work and have a usable snapshot, with the one that a restore would use."""
    found = [(node, newest_usable(draft.state.memory, node.reported, pool)) for node in draft.heard()]
    return [(node, snapshot) for node, snapshot in found if snapshot is not None]
