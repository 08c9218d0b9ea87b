"""The end of a fleet: its replicas drained, by orders of a writer above the controller that has stopped."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Callable

from dynamo_snapshot.bus.interface import Bus
from dynamo_snapshot.model import Order, OrderKind, ReplicaPhase, ReplicaReport, Reported, Wanted

KILL_TIMEOUT_S = 10.0
POLL_S = 0.1


def closing_orders(
    reported: Reported, standing: dict[str, Order], fence: int, now: float, timeout_s: float, late: bool
) -> dict[str, Order]:
    """The orders that end all of a node's replicas, by replica; ``standing`` ones are kept.

    A worker that serves, or may, is drained; one that never registered has nothing to finish and is
    killed; once it is ``late`` so is everything that is left.
    """
    orders = {}
    for replica in living(reported):
        order = standing.get(replica.replica_id)
        drained = replica.phase in (ReplicaPhase.REGISTERED, ReplicaPhase.DRAINING)
        kind = OrderKind.DRAIN if drained and not late else OrderKind.KILL
        if order is None or order.kind is not kind:
            order = Order(
                id=f"close-{kind}-{uuid.uuid4().hex[:12]}",
                kind=kind,
                replica_id=replica.replica_id,
                pool=replica.pool,
                fence=fence,
                issued_at=now,
                deadline=now + timeout_s,
                reason="the fleet is being stopped",
            )
        orders[replica.replica_id] = order
    return orders


def living(reported: Reported) -> list[ReplicaReport]:
    return [replica for replica in reported.replicas if replica.phase is not ReplicaPhase.EXITED]


async def drain(bus: Bus, timeout_s: float, say: Callable[[str], None] = lambda text: None) -> int:
    """Drains every replica that any node reports, then kills what is left; returns how many still live.

    Call it when the controller has stopped: it takes over as the writer, with the next fence.
    """
    deadline = time.monotonic() + timeout_s
    fences: dict[str, int] = {}
    standing: dict[str, dict[str, Order]] = {}
    told = None
    while True:
        late = time.monotonic() > deadline
        left = 0
        for node, reported in (await bus.read_reported()).items():
            left += len(living(reported))
            before = await bus.read_wanted(node) or Wanted(node=node, fence=0, sequence=0)
            fence = fences.setdefault(node, max(reported.fence, before.fence) + 1)
            orders = closing_orders(reported, standing.get(node, {}), fence, time.time(), timeout_s, late)
            if node not in standing or orders != standing[node]:
                standing[node] = orders
                await bus.publish_wanted(
                    Wanted(
                        node=node,
                        fence=fence,
                        sequence=before.sequence + 1,
                        workers=before.workers,
                        orders=tuple(orders.values()),
                    )
                )
        if left == 0 or time.monotonic() > deadline + KILL_TIMEOUT_S:
            return left
        if left != told:
            told = left
            say(f"{left} replica{'s' if left != 1 else ''} to {'kill' if late else 'drain'}")
        await asyncio.sleep(POLL_S)
