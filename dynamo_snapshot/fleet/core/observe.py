"""Takes a node's report into the state: how orders ended, how each replica is, who is gone."""

from __future__ import annotations

from msgspec.structs import replace

from dynamo_snapshot.fleet.core.draft import Draft
from dynamo_snapshot.fleet.core.failures import capture_failed, captured, fail, wake_failed
from dynamo_snapshot.fleet.core.lifecycle import WANTED, Happening
from dynamo_snapshot.fleet.core.messages import Resign
from dynamo_snapshot.fleet.core.state import Node, Replica
from dynamo_snapshot.fleet.core.takeover import WAYS, claim_orders
from dynamo_snapshot.model import (
    Order,
    OrderKind,
    OrderStatus,
    Outcome,
    Reason,
    ReplicaPhase,
    ReplicaReport,
    ReplicaState,
    Reported,
    Way,
)

PROGRESS = {
    ReplicaPhase.STARTING: Happening.BOOTS,
    ReplicaPhase.READY_FOR_SNAPSHOT: Happening.BOOTS,
    ReplicaPhase.CAPTURING: Happening.BOOTS,
    ReplicaPhase.RESTORING: Happening.RESTORES,
    ReplicaPhase.PARKED: Happening.PARKED,
    ReplicaPhase.RESUMING: Happening.RELEASED,
    ReplicaPhase.REGISTERED: Happening.RELEASED,
}
NO_ROOM = frozenset({Reason.NODE_AT_CAPACITY, Reason.GPU_OUT_OF_MEMORY, Reason.AGENT_RESTARTED})
"""Why a wake may be refused that says nothing against the parked replica."""
AT_CAPTURE = frozenset({ReplicaPhase.READY_FOR_SNAPSHOT, ReplicaPhase.CAPTURING})


def reported(draft: Draft, report: Reported) -> None:
    """Takes a node's report in: how each replica is, how orders ended, who is gone."""
    if report.fence > draft.state.fence:
        draft.set(resigned=True)
        draft.commands.append(Resign(fence=report.fence))
        return
    node = draft.nodes.get(report.node)
    if node is None:
        node = Node(name=report.node, first_seen=draft.now)
        draft.announce.add(report.node)
    elif node.reported is None:
        node = replace(node, first_seen=draft.now)
    if report.fence < draft.state.fence and report.at > draft.state.started_at:
        # It has not seen this controller's list; a predecessor may have overwritten it with its own last one.
        draft.announce.add(report.node)
    draft.nodes[report.node] = replace(node, reported=report, heard_at=report.at)
    for replica_report in report.replicas:
        _follow(draft, report, replica_report)
    open_orders = {order.id: order for order in draft.nodes[report.node].orders}
    ended = [(open_orders[outcome.order_id], outcome) for outcome in report.outcomes if outcome.order_id in open_orders]
    # Captures first: a source that is gone takes the order of its capture along.
    for order, outcome in sorted(ended, key=lambda pair: pair[0].kind is not OrderKind.CAPTURE):
        _ended(draft, report, order, outcome)
    _note_exits(draft, report)


def _follow(draft: Draft, report: Reported, seen: ReplicaReport) -> None:
    if seen.replica_id not in draft.replicas:
        if seen.phase is ReplicaPhase.EXITED:
            return
        _adopt(draft, report.node, seen)
    replica = draft.replicas[seen.replica_id]
    # An order to wake names no snapshot, and may be all that a new controller found of the replica.
    changes: dict[str, object] = {"phase": seen.phase, "snapshot_id": replica.snapshot_id or seen.snapshot_id}
    if seen.phase in AT_CAPTURE and replica.capture_began is None:
        changes["capture_began"] = seen.since
    elif seen.phase is ReplicaPhase.RESUMING and replica.capture_began is not None and not replica.capture_took:
        changes["capture_took"] = max(0.0, seen.since - replica.capture_began)
    draft.set_replica(replica.id, **changes)
    if seen.phase is ReplicaPhase.DRAINING and replica.state in WANTED:
        # Somebody else told it to stop. It is replaced now and may finish what is in flight; no order
        # repeats the signal, which some engines take for impatience.
        seconds = draft.pool_rules(replica.pool).drain_s + draft.rules.outcome_grace_s
        draft.move(replica.id, Happening.WITHDRAWN, deadline=draft.now + seconds, stops_tried=(OrderKind.DRAIN,))
        draft.record(replica.pool, f"{replica.id} drains", "by itself: its node reports it draining")
    happening = PROGRESS.get(seen.phase)
    if happening is Happening.PARKED:
        if replica.way is not Way.WAKE:  # else it has not heard of its wake yet
            _parked(draft, replica.id)
    elif happening is Happening.RELEASED and replica.state is ReplicaState.PARKED:
        # Woken by an order that an earlier controller gave, and whose outcome it has seen.
        deadline = draft.now + draft.rules.discover_s
        draft.move(replica.id, happening, parks=False, way=Way.WAKE, deadline=deadline)
    elif happening is not None and replica.state is not ReplicaState.SERVING and draft.may(replica.id, happening):
        draft.move(replica.id, happening)


def _parked(draft: Draft, replica_id: str) -> None:
    """It is parked, for as long as nobody needs it: its start is over, and no sample of how long one takes."""
    if not draft.may(replica_id, Happening.PARKED):
        return
    new = draft.replicas[replica_id].state is not ReplicaState.PARKED
    replica = draft.move(
        replica_id, Happening.PARKED, parks=True, way=Way.RESTORE, deadline=None, ordered_at=None, attempts=0
    )
    if new:
        draft.set_pool(replica.pool, parking_pause=None)


def _adopt(draft: Draft, node: str, seen: ReplicaReport) -> None:
    """A live replica that this controller did not order, or has given up: it counts, unless it is parked."""
    rules = draft.rules.pools.get(seen.pool)
    allowance = 0.0
    if rules is not None:
        boots = rules.cold_start_s + rules.capture_s
        allowance = {Happening.BOOTS: boots, Happening.RESTORES: rules.restore_s}.get(
            PROGRESS.get(seen.phase, Happening.RELEASED), draft.rules.discover_s
        )
    draft.replicas[seen.replica_id] = Replica(
        id=seen.replica_id,
        pool=seen.pool,
        node=node,
        way=seen.way,
        state=ReplicaState.ORDERED if rules else ReplicaState.DRAINING,
        since=draft.now,
        deadline=draft.now + allowance if rules else None,
        snapshot_id=seen.snapshot_id,
        parks=seen.phase is ReplicaPhase.PARKED,
    )
    claim_orders(draft, seen.replica_id)
    if rules is not None:
        pool = draft.pools[seen.pool]
        alive = len(draft.alive(seen.pool))
        if not pool.decided and alive > pool.target:
            # Nobody has said how many there should be: those that are there hold the target up.
            draft.set_pool(seen.pool, target=min(alive, rules.max_replicas))


def _ended(draft: Draft, report: Reported, order: Order, outcome: Outcome) -> None:
    """Takes an outcome in, once: its order leaves the wanted list with it."""
    draft.withdraw(report.node, order.id)
    replica = draft.replicas.get(order.replica_id)
    if order.kind is OrderKind.CAPTURE:
        key = report.compatibility_keys.get(order.pool)
        if order.pool in draft.pools:
            captured(draft, order.pool, key, outcome)
            what = f"capture of {order.replica_id} {outcome.status}"
            draft.record(order.pool, what, outcome.reason or outcome.snapshot_id or "")
        if replica is not None:
            draft.set_replica(replica.id, capture_order=None)
        return
    if replica is None:
        return
    if order.kind in WAYS:
        draft.set_replica(replica.id, start_order=None)
        if outcome.status is OrderStatus.DONE:
            if order.kind is OrderKind.PARK:
                _parked(draft, replica.id)
            else:
                _released(draft, replica.id)
            return
        if order.kind is OrderKind.WAKE and outcome.reason in NO_ROOM and _is_parked(report, replica.id):
            _parked_again(draft, replica, outcome)
            return
        if replica.state in WANTED:
            fail(draft, replica.id, Happening.BROKE, outcome.reason or outcome.status, outcome.message)
        if not _lives(report, replica.id):
            _forget(draft, report, replica.id)
        return
    draft.set_replica(replica.id, stop_order=None)
    if outcome.status is OrderStatus.DONE or outcome.reason == Reason.UNKNOWN_REPLICA:
        started = draft.replicas[replica.id].start_order is not None
        if not _lives(report, replica.id) and (not started or order.kind is OrderKind.KILL):
            _forget(draft, report, replica.id)
    elif order.kind is not OrderKind.CANCEL and replica.state is ReplicaState.DRAINING:
        fail(draft, replica.id, Happening.OVERDUE, outcome.reason or outcome.status, outcome.message)


def _parked_again(draft: Draft, replica: Replica, outcome: Outcome) -> None:
    """Its wake was refused for want of room: it is as good as before, and its place is to be filled otherwise."""
    if not draft.may(replica.id, Happening.PARKED):
        return
    draft.record(replica.pool, f"{replica.id} stays parked", f"{outcome.reason}: {outcome.message}")
    _parked(draft, replica.id)
    wake_failed(draft, replica, outcome.reason or outcome.status)


def _released(draft: Draft, replica_id: str) -> None:
    replica = draft.replicas[replica_id]
    if replica.state is not ReplicaState.SERVING and draft.may(replica_id, Happening.RELEASED):
        draft.move(replica_id, Happening.RELEASED, deadline=draft.now + draft.rules.discover_s)


def _note_exits(draft: Draft, report: Reported) -> None:
    """Replicas that the node reports as exited, or does not report any more."""
    phases = {seen.replica_id: seen for seen in report.replicas}
    for replica in [r for r in draft.replicas.values() if r.node == report.node]:
        seen = phases.get(replica.id)
        if seen is not None and seen.phase is ReplicaPhase.EXITED:
            reason, message = Reason.WORKER_EXITED.value, ""
            if seen.exit is not None:
                reason = seen.exit.reason or reason
                code = seen.exit.code
                message = seen.exit.message or (f"exit status {code}" if code >= 0 else f"ended by signal {-code}")
            if replica.state in WANTED:
                fail(draft, replica.id, Happening.BROKE, reason, message)
            if replica.start_order is None:
                _forget(draft, report, replica.id)
        elif seen is None and replica.start_order is None and replica.state is not ReplicaState.SERVING:
            # The node does not know it: it is gone, or was never there. Whom discovery shows still counts.
            if replica.state in WANTED:
                fail(draft, replica.id, Happening.BROKE, Reason.UNKNOWN_REPLICA, "its node does not report it")
            _forget(draft, report, replica.id)


def _forget(draft: Draft, report: Reported, replica_id: str) -> None:
    replica = draft.replicas[replica_id]
    if replica.capture_order is not None and replica.state is ReplicaState.FAILED and replica.pool in draft.pools:
        capture_failed(draft, report.compatibility_keys.get(replica.pool))
    draft.remove(replica_id)


def _lives(report: Reported, replica_id: str) -> bool:
    return any(seen.replica_id == replica_id and seen.phase is not ReplicaPhase.EXITED for seen in report.replicas)


def _is_parked(report: Reported, replica_id: str) -> bool:
    return any(seen.replica_id == replica_id and seen.phase is ReplicaPhase.PARKED for seen in report.replicas)
