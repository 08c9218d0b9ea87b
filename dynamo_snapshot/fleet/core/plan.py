"""Brings every pool towards its target: starts, captures, and ends."""

from __future__ import annotations

from dynamo_snapshot.fleet import identity
from dynamo_snapshot.fleet.core.draft import Draft
from dynamo_snapshot.fleet.core.lifecycle import PENDING, Happening
from dynamo_snapshot.fleet.core.spares import keep_ready, make_room
from dynamo_snapshot.fleet.core.state import Replica
from dynamo_snapshot.fleet.core.victims import victims
from dynamo_snapshot.fleet.core.ways import Start, Wait, Wake, choose
from dynamo_snapshot.model import OrderKind, Reason, ReplicaPhase, ReplicaState, Way

ORPHAN_DRAIN_S = 60.0
ORPHAN_KILL_S = 10.0


def plan(draft: Draft) -> None:
    """Orders what is missing and withdraws what is too much; neither while discovery is unknown."""
    for pool in draft.rules.pools:
        _scale(draft, pool)
    keep_ready(draft)
    for replica in list(draft.replicas.values()):
        _capture(draft, replica)
        _stop(draft, replica)


def _scale(draft: Draft, pool: str) -> None:
    if not draft.state.discovery_known:
        _hold(draft, pool, _held_by_discovery(draft, pool))
        return
    alive = draft.alive(pool)
    deficit = draft.pools[pool].target - len(alive)
    kept = sorted(draft.pools[pool].vacancies)[: max(0, deficit)]
    draft.set_pool(pool, vacancies=tuple(kept))
    if deficit > 0:
        _grow(draft, pool, deficit)
        return
    _hold(draft, pool, "")
    if deficit < 0 and _may_go_down(draft):
        reason = f"{len(alive)} are too many for target {draft.pools[pool].target}"
        for replica in victims(draft, alive, -deficit):
            draft.record(pool, f"{replica.id} withdrawn", reason)
            draft.move(replica.id, Happening.WITHDRAWN)


def _held_by_discovery(draft: Draft, pool: str) -> str:
    """Why ``pool`` is kept from its target; empty where it is not, or where the controller has only just started."""
    if len(draft.alive(pool)) == draft.pools[pool].target:
        return ""
    if draft.state.discovery_heard:
        return "discovery cannot be read: numbers are held"
    starting = draft.now < draft.state.started_at + draft.rules.settle_s
    return "" if starting else "discovery has not been read yet: numbers are held"


def _may_go_down(draft: Draft) -> bool:
    """A controller that has just started may know an old target: its decision is then about to come again."""
    return draft.state.decision_seen or draft.now >= draft.state.started_at + draft.rules.settle_s


def _grow(draft: Draft, pool: str, deficit: int) -> None:
    unheard = any(node.reported is None for node in draft.nodes.values())
    if unheard and draft.now < draft.state.started_at + draft.rules.settle_s:
        _hold(draft, pool, "a node has not reported since the controller started")
        return
    block = draft.pools[pool].block
    if block is not None:
        if draft.now < block.until:
            _hold(draft, pool, f"starts pause after failures: {block.reason}")
            return
        if any(replica.state in PENDING for replica in draft.alive(pool)):
            _hold(draft, pool, "one start at a time until one succeeds")
            return
        deficit = 1
    for missing in range(deficit, 0, -1):
        vacancies = draft.pools[pool].vacancies
        attempts = vacancies[0] if vacancies else 0
        choice = choose(draft, pool, attempts)
        if isinstance(choice, Wait):
            _hold(draft, pool, choice.reason)
            if choice.reason == Reason.NODE_AT_CAPACITY:
                make_room(draft, pool, missing)
            return
        draft.set_pool(pool, vacancies=vacancies[1:])
        if isinstance(choice, Wake):
            _wake(draft, pool, choice, attempts)
        else:
            _start(draft, pool, choice, attempts)
    _hold(draft, pool, "")


def _hold(draft: Draft, pool: str, reason: str) -> None:
    if draft.pools[pool].waits_for == reason:
        return
    draft.set_pool(pool, waits_for=reason)
    if reason:
        draft.record(pool, "no order now", reason)


def _start(draft: Draft, pool: str, choice: Start, attempts: int) -> None:
    rules = draft.pool_rules(pool)
    restores = choice.way is Way.RESTORE
    replica = Replica(
        id=identity.replica_id(pool, draft.state.fence, draft.next_serial()),
        pool=pool,
        node=choice.node,
        way=choice.way,
        state=ReplicaState.ORDERED,
        since=draft.now,
        ordered_at=draft.now,
        attempts=attempts,
        snapshot_id=choice.snapshot_id,
        captures=choice.capture,
    )
    seconds = rules.restore_s if restores else rules.cold_start_s + (rules.capture_s if choice.capture else 0.0)
    order = draft.issue(
        OrderKind.RESTORE if restores else OrderKind.COLD_START,
        replica,
        seconds,
        choice.reason,
        snapshot_id=choice.snapshot_id,
        capture=choice.capture,
    )
    draft.replicas[replica.id] = replica
    draft.set_replica(replica.id, start_order=order.id, deadline=order.deadline + draft.rules.outcome_grace_s)
    draft.record(pool, f"{order.kind} of {replica.id} on {choice.node}", choice.reason)


def _wake(draft: Draft, pool: str, choice: Wake, attempts: int) -> None:
    replica = draft.move(
        choice.replica_id, Happening.WOKEN, parks=False, way=Way.WAKE, ordered_at=draft.now, attempts=attempts
    )
    order = draft.issue(OrderKind.WAKE, replica, draft.pool_rules(pool).wake_s, choice.reason)
    draft.set_replica(replica.id, start_order=order.id, deadline=order.deadline + draft.rules.outcome_grace_s)
    draft.record(pool, f"wake of {replica.id} on {replica.node}", choice.reason)


def _capture(draft: Draft, replica: Replica) -> None:
    """A worker that waits for its capture gets it, once."""
    waits = replica.phase is ReplicaPhase.READY_FOR_SNAPSHOT and replica.state is ReplicaState.STARTING
    if not waits or replica.capture_tried or replica.capture_order is not None:
        return
    seconds = draft.pool_rules(replica.pool).capture_s
    order = draft.issue(OrderKind.CAPTURE, replica, seconds, "it is ready-for-snapshot")
    draft.set_replica(replica.id, capture_order=order.id, capture_tried=True)
    draft.record(replica.pool, f"capture of {replica.id}", order.reason)


def _stop(draft: Draft, replica: Replica) -> None:
    """Sees to it that what is withdrawn or failed comes to its end: cancel or drain first, kill when that is late."""
    kind = _next_stop(replica)
    if kind is None:
        return
    seconds = _stop_seconds(draft, replica.pool, kind)
    order = draft.issue(kind, replica, seconds, replica.reason or "not wanted any more")
    draft.set_replica(
        replica.id,
        stop_order=order.id,
        # A kill is repeated until the node answers, however long that takes.
        stops_tried=replica.stops_tried if kind in replica.stops_tried else (*replica.stops_tried, kind),
        deadline=order.deadline + draft.rules.outcome_grace_s,
    )


def _next_stop(replica: Replica) -> OrderKind | None:
    if replica.stop_order is not None:
        return None
    if replica.state is ReplicaState.FAILED:
        return OrderKind.KILL
    if replica.state is not ReplicaState.DRAINING:
        return None
    kind = OrderKind.DRAIN if replica.start_order is None else OrderKind.CANCEL
    return None if kind in replica.stops_tried else kind


def _stop_seconds(draft: Draft, pool: str, kind: OrderKind) -> float:
    rules = draft.rules.pools.get(pool)
    if rules is None:  # no longer configured: nobody said how long its workers may take
        return ORPHAN_DRAIN_S if kind is OrderKind.DRAIN else ORPHAN_KILL_S
    return rules.drain_s if kind is OrderKind.DRAIN else rules.kill_s
