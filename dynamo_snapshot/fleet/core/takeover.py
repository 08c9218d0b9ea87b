"""A controller takes over: what its predecessor remembered, and the orders that stand in the wanted lists."""

from __future__ import annotations

from msgspec.structs import replace

from dynamo_snapshot.fleet.core.draft import Draft
from dynamo_snapshot.fleet.core.lifecycle import Happening
from dynamo_snapshot.fleet.core.messages import Started
from dynamo_snapshot.fleet.core.state import Node, PoolState, Replica
from dynamo_snapshot.model import Order, OrderKind, ReplicaState, Way

WAYS = {
    OrderKind.COLD_START: Way.COLD_START,
    OrderKind.RESTORE: Way.RESTORE,
    OrderKind.PARK: Way.RESTORE,
    OrderKind.WAKE: Way.WAKE,
}
"""Orders that make a replica or bring one to serving, and how."""
STOPS = frozenset({OrderKind.CANCEL, OrderKind.DRAIN, OrderKind.KILL})


def started(draft: Draft, event: Started) -> None:
    """Takes over: open orders keep their ids and get the new fence; nobody carries one out twice."""
    memory = event.memory
    draft.set(fence=event.fence, memory=memory, decision=memory.decision, started_at=draft.now)
    for name, rules in draft.rules.pools.items():
        remembered = memory.targets.get(name)
        target = rules.min_replicas if remembered is None else remembered
        target = max(rules.min_replicas, min(rules.max_replicas, target))
        draft.pools[name] = PoolState(target=target, decided=remembered is not None)
    for wanted in event.wanted:
        orders = tuple(replace(order, fence=event.fence) for order in wanted.orders)
        draft.nodes[wanted.node] = Node(name=wanted.node, first_seen=draft.now, orders=orders)
        draft.announce.add(wanted.node)
        for order in orders:
            if order.kind in WAYS and order.pool in draft.rules.pools:
                _take_over(draft, wanted.node, order)
            elif order.kind in WAYS:  # its pool is gone from the configuration
                draft.withdraw(wanted.node, order.id)
        for replica in list(draft.replicas.values()):
            claim_orders(draft, replica.id)


def _take_over(draft: Draft, node: str, order: Order) -> None:
    draft.replicas[order.replica_id] = Replica(
        id=order.replica_id,
        pool=order.pool,
        node=node,
        way=WAYS[order.kind],
        state=ReplicaState.ORDERED,
        since=order.issued_at,
        deadline=order.deadline + draft.rules.outcome_grace_s,
        ordered_at=order.issued_at,
        snapshot_id=order.snapshot_id,
        captures=order.capture,
        parks=order.kind is OrderKind.PARK,
        start_order=order.id,
    )


def claim_orders(draft: Draft, replica_id: str) -> None:
    """Gives a replica back what open orders say of it."""
    replica = draft.replicas[replica_id]
    for order in draft.nodes[replica.node].orders:
        if order.replica_id != replica_id:
            continue
        if order.kind is OrderKind.CAPTURE:
            draft.set_replica(replica_id, capture_order=order.id)
        elif order.kind in STOPS:
            deadline = order.deadline + draft.rules.outcome_grace_s
            happening = Happening.BROKE if order.kind is OrderKind.KILL else Happening.WITHDRAWN
            if draft.may(replica_id, happening):
                draft.move(replica_id, happening)
            tried = (*draft.replicas[replica_id].stops_tried, order.kind)
            draft.set_replica(replica_id, stop_order=order.id, stops_tried=tried, deadline=deadline)
