"""The node agent: takes what is wanted off the bus, carries it out, and reports what is so."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Mapping
from typing import Protocol

import structlog

from dynamo_snapshot.agent.compatibility_cache import REFRESH_S, CompatibilityCache
from dynamo_snapshot.agent.idle import IdleShare
from dynamo_snapshot.agent.journal import FenceSeen
from dynamo_snapshot.agent.node import Node
from dynamo_snapshot.agent.orders import Orders
from dynamo_snapshot.agent.recovery import REPEATABLE, recover
from dynamo_snapshot.agent.upkeep import Upkeep
from dynamo_snapshot.bus.interface import Bus
from dynamo_snapshot.config import SnapshotPolicy
from dynamo_snapshot.errors import SnapshotError
from dynamo_snapshot.model import Order, Outcome, Reason, Reported, SnapshotSummary, Wanted, WorkerSpec
from dynamo_snapshot.snapshots.compatibility import compatibility_key

log = structlog.get_logger()

COALESCE_S = 0.002
"""Changes that come this close together make one report."""
HEARTBEAT_S = 5.0
"""A report goes out at least this often."""
KEEP_EXITED_S = 60.0
"""An exited replica stays in the report at least this long."""
_RETRY_S = 0.5


class Observer(Protocol):
    """Who is told what an agent does. Must not raise."""

    def ended(self, order: Order, outcome: Outcome) -> None:
        """An order ended."""

    def reported(self, report: Reported) -> None:
        """What is so on this node was reported."""


class AgentService:
    """One node's agent. :meth:`run` returns when ``stop`` is set; replicas that serve live on."""

    def __init__(
        self,
        name: str,
        node: Node,
        bus: Bus,
        compatibility: CompatibilityCache,
        policies: Mapping[str, SnapshotPolicy],
        observer: Observer | None = None,
    ) -> None:
        self._observer = observer
        self._name, self._node, self._bus, self._compatibility = name, node, bus, compatibility
        self._changed = asyncio.Event()
        node.on_change = self._changed.set
        self._idle = IdleShare()
        self._upkeep = Upkeep(node, policies, lambda: self._keys)
        on_end = {} if observer is None else {"on_end": observer.ended}
        self._orders = Orders(node, self._idle.share, self._upkeep.wake, **on_end)
        self._wanted: Wanted | None = None
        self._keys: dict[str, str] = {}
        self._workers_changed = asyncio.Event()
        # Greater than any of an earlier agent's, without a file to keep it in.
        self._sequence = int(node.clock() * 1000)

    async def run(self, stop: asyncio.Event) -> None:
        """Recovers, then serves until ``stop``."""
        self._idle.sample()
        await recover(self._node, self._orders)
        await self._node.houses.begin()
        tasks = {
            "wanted": self._follow_wanted(),
            "report": self._report(),
            "idle": self._idle.run(),
            "keys": self._refresh_keys(),
            "exited": self._forget_exited(),
            "upkeep": self._upkeep.run(),
        }
        if self._node.gpus is not None:
            tasks["gpus"] = self._node.gpus.warm()
        try:
            async with asyncio.TaskGroup() as group:
                running = [group.create_task(work, name=name) for name, work in tasks.items()]
                self._changed.set()
                await stop.wait()
                for task in running:
                    task.cancel()
        finally:
            await self._orders.stop()
            with contextlib.suppress(SnapshotError):
                await self._bus.publish_reported(self.report())
            for replica in self._node.replicas.values():
                await replica.close()
            await self._node.houses.close()
            if self._node.gpus is not None:
                await self._node.gpus.close()
            self._node.journal.close()

    def report(self) -> Reported:
        """All that is so on this node, with the next sequence number."""
        self._sequence += 1
        state = self._node.journal.state
        wanted = None if self._wanted is None else {order.id for order in self._wanted.orders}
        return Reported(
            node=self._name,
            sequence=self._sequence,
            fence=state.fence,
            at=self._node.clock(),
            compatibility_keys=dict(self._keys),
            replicas=tuple(replica.report() for replica in self._node.replicas.values()),
            outcomes=tuple(
                outcome for order_id, outcome in state.outcomes.items() if wanted is None or order_id in wanted
            ),
            snapshots=self._snapshots(),
        )

    def take(self, wanted: Wanted) -> None:
        """Takes in a new wanted list: begins what is new in it, and forgets outcomes that nobody waits for."""
        state = self._node.journal.state
        if wanted.fence < state.fence:
            log.warning("stale_wanted_ignored", fence=wanted.fence, highest=state.fence)
            return
        if wanted.fence > state.fence:
            self._node.journal.append(FenceSeen(fence=wanted.fence))
        if self._wanted is None or self._wanted.workers != wanted.workers:
            self._workers_changed.set()
        self._wanted = wanted
        for order in wanted.orders:
            if order.id in state.outcomes or order.id in self._orders.under_way:
                continue
            if order.id in state.open and order.kind not in REPEATABLE:
                continue
            self._begin(order, wanted)
        self._changed.set()

    def _begin(self, order: Order, wanted: Wanted) -> None:
        spec = self._spec(order, wanted)
        if order.fence < self._node.journal.state.fence:
            self._orders.refuse(
                order,
                Reason.STALE_FENCE,
                f"order {order.id} has fence {order.fence}; a newer controller has taken over",
            )
        elif order.deadline <= self._node.clock():
            self._orders.refuse(
                order, Reason.DEADLINE_EXCEEDED, f"the deadline of order {order.id} passed before it came"
            )
        elif spec is None:
            self._orders.refuse(
                order,
                Reason.CONFIGURATION_INVALID,
                f"the wanted list does not say how workers of {order.pool} are started",
            )
        else:
            self._orders.begin(order, spec)

    def _spec(self, order: Order, wanted: Wanted) -> WorkerSpec | None:
        if spec := wanted.workers.get(order.pool):
            return spec
        replica = self._node.replicas.get(order.replica_id)
        return replica.record.spec if replica else None

    def _snapshots(self) -> tuple[SnapshotSummary, ...]:
        return self._upkeep.summaries

    async def _follow_wanted(self) -> None:
        while True:
            try:
                async for wanted in self._bus.watch_wanted(self._name):
                    self.take(wanted)
            except SnapshotError as error:
                log.warning("wanted_not_read", cause=str(error))
                await asyncio.sleep(_RETRY_S)

    async def _report(self) -> None:
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(HEARTBEAT_S):
                    await self._changed.wait()
                await asyncio.sleep(COALESCE_S)
            self._changed.clear()
            try:
                report = self.report()
                if self._observer is not None:
                    self._observer.reported(report)
                await self._bus.publish_reported(report)
            except SnapshotError as error:
                log.warning("report_not_published", cause=str(error))
                await asyncio.sleep(_RETRY_S)
                self._changed.set()

    async def _refresh_keys(self) -> None:
        while True:
            workers = self._wanted.workers if self._wanted else {}
            keys = {}
            for pool, spec in workers.items():
                try:
                    keys[pool] = compatibility_key(await self._compatibility.refresh(pool, spec))
                except SnapshotError as error:
                    log.warning("compatibility_unknown", pool=pool, cause=str(error))
            if keys != self._keys:
                self._keys = keys
                self._changed.set()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(REFRESH_S):
                    await self._workers_changed.wait()
            self._workers_changed.clear()

    async def _forget_exited(self) -> None:
        while True:
            wanted = {order.replica_id for order in self._wanted.orders} if self._wanted else set()
            for replica in list(self._node.replicas.values()):
                old = replica.exit is not None and self._node.clock() - replica.since > KEEP_EXITED_S
                if old and replica.id not in wanted:
                    await self._node.forget(replica)
            await asyncio.sleep(1.0)
