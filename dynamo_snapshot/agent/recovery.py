"""What an agent does with what its predecessor left, before it takes any order.

Replicas that serve are adopted, and so are parked ones whose snapshot may still be used. A cold worker that waits at
ready-for-snapshot is adopted too, and goes on.
All else never served and is ended; its order fails with ``agent_restarted``, for the fleet to decide anew.
"""

from __future__ import annotations

import asyncio

import structlog

from dynamo_snapshot.agent.gpus import outlive_residents
from dynamo_snapshot.agent.house import House
from dynamo_snapshot.agent.journal import Ended, ReplicaGone, ReplicaRecord
from dynamo_snapshot.agent.node import Node
from dynamo_snapshot.agent.orders import Orders
from dynamo_snapshot.agent.pipelines.capture import settle
from dynamo_snapshot.agent.pipelines.cold_start import is_registered
from dynamo_snapshot.agent.pipelines.parking import held_for_parked, is_parked, noted_as_parked
from dynamo_snapshot.agent.pipelines.source_gpus import thaw_source
from dynamo_snapshot.errors import SnapshotError
from dynamo_snapshot.model import Order, OrderKind, OrderStatus, Outcome, Reason, Way

log = structlog.get_logger()

REPEATABLE = frozenset({OrderKind.DRAIN, OrderKind.KILL, OrderKind.CANCEL})
"""Orders that may be begun again: to end a replica twice is to end it once."""


async def recover(node: Node, orders: Orders) -> None:
    """Repairs, then settles every order that was under way; returns when the node is as its journal says."""
    swept = await asyncio.to_thread(node.store.sweep)
    if swept:
        log.info("store_swept", what=swept)
    records = dict(node.journal.state.replicas)
    if node.gpus is not None:
        await outlive_residents(node.settings.runtime_dir, node.settings.deadlines.dump_s)
    for replica_id in node.houses.existing():
        if replica_id not in records:
            log.warning("removing_unknown_house", replica=replica_id)
            await node.houses.remove(replica_id)
    await asyncio.gather(*(_take_over(node, record) for record in records.values()))
    for order in list(node.journal.state.open.values()):
        _settle(node, orders, order)
    await node.journal.synced()


async def _take_over(node: Node, record: ReplicaRecord) -> None:
    house = await node.houses.find(record.replica_id)
    if house is not None:
        await node.houses.quiet(house, node.settings.deadlines.dump_s)
        if await _adopt(node, record, house):
            return
        await house.holder.close()
    if record.served:  # it is not forgotten before the fleet has heard of its end
        exited = node.add(record)
        exited.settle(node.houses.exit_of(record.replica_id), node.houses.path(record.replica_id))
        log.info("replica_ended_without_agent", replica=record.replica_id)
        return
    log.warning("ending_unserved_replica", replica=record.replica_id, way=record.way)
    await node.houses.remove(record.replica_id)
    node.journal.keep(ReplicaGone(replica_id=record.replica_id))


async def _adopt(node: Node, record: ReplicaRecord, house: House) -> bool:
    replica = node.replica(record)
    inner: int | None = None
    try:
        inner = await house.holder.worker()
        replica.state = house.control.state()
    except SnapshotError as error:
        log.warning("house_broken", replica=record.replica_id, cause=str(error))
        # A holder that is there and silent may only be slow: what served is not called dead on its silence.
        if house.holder.lost.done() or not record.served:
            return False
    else:
        if inner is None:
            return False
    serves = record.served or is_registered(replica)
    waits = record.way is Way.COLD_START and house.control.is_ready_for_snapshot()
    replica.woken = house.control.is_woken()
    held = await held_for_parked(node, replica) if is_parked(replica) and not serves else None
    if not serves and not waits and held is None:
        return False
    woken, replica = replica.woken, node.add(record)
    replica.released, replica.woken = house.control.is_released(), woken
    replica.move_in(house)
    if inner is not None:
        replica.locate(inner)
    replica.update()
    await settle(replica)
    if waits and not serves:
        try:
            await thaw_source(node, replica)
        except SnapshotError as error:
            log.error("source_lost", replica=replica.id, cause=str(error))
    if serves:
        node.note(replica, served=True)
    elif held is not None:
        noted_as_parked(node, replica)
        replica.snapshot = held
    log.info("replica_adopted", replica=replica.id, phase=replica.phase)
    return True


def _settle(node: Node, orders: Orders, order: Order) -> None:
    replica = node.replicas.get(order.replica_id)
    alive = replica is not None and replica.exit is None
    if order.kind in REPEATABLE:
        if not alive:
            _end(node, order, None)
        return  # otherwise it is begun again, while it is wanted
    made = replica is not None and (replica.record.order_id == order.id or order.kind is OrderKind.WAKE)
    parked = alive and order.kind is OrderKind.PARK and replica is not None and replica.record.parked
    if made and replica is not None and (replica.record.served or parked):
        _end(node, order, None)
    elif made and alive and order.kind is OrderKind.COLD_START and replica is not None:
        orders.begin(order, replica.record.spec, replica)
    else:
        _end(node, order, Reason.AGENT_RESTARTED)


def _end(node: Node, order: Order, reason: Reason | None) -> None:
    now = node.clock()
    node.journal.keep(
        Ended(
            outcome=Outcome(
                order_id=order.id,
                status=OrderStatus.FAILED if reason else OrderStatus.DONE,
                started_at=now,
                finished_at=now,
                reason=reason.value if reason else None,
                message="the agent was restarted while it was under way" if reason else "settled by a restarted agent",
            )
        )
    )
