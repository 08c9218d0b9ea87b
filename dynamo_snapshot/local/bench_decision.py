"""From a decision in etcd to its order on the bus: real etcd, NATS and controller, and a node that only keeps books."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import NamedTuple

import msgspec

from dynamo_snapshot.bus.interface import Bus
from dynamo_snapshot.errors import SnapshotError
from dynamo_snapshot.local.etcd import Etcd
from dynamo_snapshot.model import (
    Order,
    OrderKind,
    OrderStatus,
    Outcome,
    Reason,
    ReplicaPhase,
    ReplicaReport,
    Reported,
    Wanted,
    Way,
)

NODE = "local"
ANSWER_S = 10.0
BETWEEN_S = 0.1
"""No planner decides again within the millisecond of an acknowledgement: Dynamo's client begins a new watch then, and
etcd tells a watch that begins amid writes up to 100 ms late."""
STARTS = (OrderKind.COLD_START, OrderKind.RESTORE)

Say = Callable[[str], None]


class BookkeepingNode:
    """Reports every start as begun and every stop as done at once; nothing runs. ``seen`` tells each new order."""

    def __init__(self, bus: Bus) -> None:
        self._bus = bus
        self._replicas: dict[str, ReplicaReport] = {}
        self._outcomes: dict[str, Outcome] = {}
        self._known: set[str] = set()
        self._sequence = int(time.time() * 1000)
        self._port = 20000
        self.seen: asyncio.Queue[Order] = asyncio.Queue()

    async def run(self) -> None:
        await self._report(0)
        async for wanted in self._bus.watch_wanted(NODE):
            new = [order for order in wanted.orders if order.id not in self._known]
            for order in new:
                self._known.add(order.id)
                self.seen.put_nowait(order)
            self._carry_out(wanted, new)
            await self._report(wanted.fence)

    def _carry_out(self, wanted: Wanted, new: list[Order]) -> None:
        now = time.time()
        for order in new:
            if order.kind in STARTS:
                self._port += 1
                self._replicas[order.replica_id] = ReplicaReport(
                    replica_id=order.replica_id,
                    pool=order.pool,
                    incarnation=f"{order.replica_id}-1",
                    way=Way.COLD_START if order.kind is OrderKind.COLD_START else Way.RESTORE,
                    phase=ReplicaPhase.STARTING,
                    since=now,
                    rpc_port=self._port,
                )
            else:
                self._replicas.pop(order.replica_id, None)
                self._outcomes[order.id] = _ended(order, OrderStatus.DONE, now)
                for start in wanted.orders:
                    if start.kind in STARTS and start.replica_id == order.replica_id:
                        self._outcomes[start.id] = _ended(start, OrderStatus.CANCELLED, now)
        standing = {order.id for order in wanted.orders}
        self._outcomes = {name: outcome for name, outcome in self._outcomes.items() if name in standing}

    async def _report(self, fence: int) -> None:
        self._sequence += 1
        await self._bus.publish_reported(
            Reported(
                node=NODE,
                sequence=self._sequence,
                fence=fence,
                at=time.time(),
                replicas=tuple(self._replicas.values()),
                outcomes=tuple(self._outcomes.values()),
            )
        )


class DecisionTimes(NamedTuple):
    """Milliseconds of each decision that got its order, and what went wrong with the others."""

    to_order_ms: list[float]
    write_ms: list[float]
    failures: list[str]


class DecisionBench:
    """Writes decisions as Dynamo's planner does, one more replica and one fewer in turn, and times each order.

    The clock of an order starts when etcd has acknowledged the decision; what the write took stands beside it.
    """

    def __init__(self, etcd: Etcd, namespace: str, node: BookkeepingNode) -> None:
        self._etcd = etcd
        self._prefix = f"v1/{namespace}/planner"
        self._node = node

    async def run(self, repeats: int, warm_up: int, say: Say) -> DecisionTimes:
        await self._first_order()
        times = DecisionTimes([], [], [])
        for number in range(1, warm_up + repeats + 1):
            target = 2 if number % 2 else 1
            while not self._node.seen.empty():
                self._node.seen.get_nowait()
            begun = time.perf_counter()
            await self._decide(number, target)
            written = time.perf_counter()
            try:
                async with asyncio.timeout(ANSWER_S):
                    await self._node.seen.get()
                if number > warm_up:
                    times.to_order_ms.append((time.perf_counter() - written) * 1000)
                    times.write_ms.append((written - begun) * 1000)
            except TimeoutError:
                times.failures.append(f"no order within {ANSWER_S:.0f} s for decision {number} (target {target})")
            await self._acknowledged(number)
            await asyncio.sleep(BETWEEN_S)
            if number % 100 == 0:
                say(f"{number} of {warm_up + repeats} decisions, {len(times.failures)} failed")
        return times

    async def _first_order(self) -> None:
        """The controller has made its minimum of one replica a matter of course."""
        try:
            async with asyncio.timeout(60):
                await self._node.seen.get()
        except TimeoutError:
            raise SnapshotError(Reason.DEADLINE_EXCEEDED, "the controller ordered nothing within 60 s") from None

    async def _decide(self, number: int, target: int) -> None:
        await self._etcd.put_all(
            {
                f"{self._prefix}/num_prefill_workers": "-1",
                f"{self._prefix}/num_decode_workers": str(target),
                f"{self._prefix}/decision_id": str(number),
            }
        )

    async def _acknowledged(self, number: int) -> None:
        """Waits until the controller has completed the decision: it takes the next one only then."""
        async with asyncio.timeout(ANSWER_S):
            while True:
                keys = await self._etcd.keys(f"{self._prefix}/scaled_decision_id")
                if keys and int(keys[0].value) >= number:
                    return
                await asyncio.sleep(0.005)


def _ended(order: Order, status: OrderStatus, now: float) -> Outcome:
    outcome = Outcome(order_id=order.id, status=status, started_at=order.issued_at, finished_at=now)
    cancelled = status is OrderStatus.CANCELLED
    return msgspec.structs.replace(outcome, reason=Reason.CANCELLED.value) if cancelled else outcome
