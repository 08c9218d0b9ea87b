"""Everything that happens in a fleet while it is recorded: orders, outcomes, replicas, registrations, status.

It only reads: the bus, the status file, and an etcd watch from the first revision. What it writes down is
plain data with wall-clock times; what follows from it is computed elsewhere.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

import msgspec

from dynamo_snapshot.bus.interface import Bus
from dynamo_snapshot.local.etcd import Change, Etcd
from dynamo_snapshot.local.observe import read_view
from dynamo_snapshot.model import (
    DecisionRecord,
    FleetStatus,
    Order,
    Outcome,
    ReplicaReport,
    ReplicaState,
    Reported,
)

STATUS_INTERVAL_S = 0.1


@dataclass(frozen=True)
class Registration:
    """One life of an instance in discovery, by the clock of who watched. ``gone_at`` is None while it is there."""

    instance_id: int
    port: int
    at: float
    gone_at: float | None = None


@dataclass
class Record:
    """What was seen. Replicas are keyed by id, states are (state, since) in the order they were seen."""

    began_at: float
    orders: dict[str, Order] = field(default_factory=dict)
    outcomes: dict[str, Outcome] = field(default_factory=dict)
    reports: dict[str, ReplicaReport] = field(default_factory=dict)
    states: dict[str, list[tuple[ReplicaState, float]]] = field(default_factory=dict)
    registrations: list[Registration] = field(default_factory=list)
    decisions: list[DecisionRecord] = field(default_factory=list)
    statuses: list[FleetStatus] = field(default_factory=list)
    """Only those in which a count of a pool changed."""

    def take_status(self, status: FleetStatus) -> None:
        for replica in status.replicas:
            states = self.states.setdefault(replica.replica_id, [])
            if not states or states[-1][0] is not replica.state:
                states.append((replica.state, replica.since))
        known = {(decision.at, decision.what) for decision in self.decisions[-100:]}
        self.decisions += [decision for decision in status.decisions if (decision.at, decision.what) not in known]
        if not self.statuses or self.statuses[-1].pools != status.pools:
            self.statuses.append(status)

    def take_report(self, reported: Reported) -> None:
        for outcome in reported.outcomes:
            self.outcomes[outcome.order_id] = outcome
        for replica in reported.replicas:
            before = self.reports.get(replica.replica_id)
            # A pid is gone from the report of an exited replica, and still wanted here.
            if before is not None and replica.pid is None:
                replica = msgspec.structs.replace(replica, pid=before.pid)
            self.reports[replica.replica_id] = replica

    def take_change(self, change: Change, at: float) -> None:
        instance_id = int(change.key.name.rsplit("/", 1)[1], 16)
        if not change.deleted:
            if any(known.instance_id == instance_id and known.gone_at is None for known in self.registrations):
                return  # the same life, its card or address written anew
            address = json.loads(change.key.value)["transport"]["tcp"]
            port = int(address.split("/", 1)[0].rsplit(":", 1)[1])
            self.registrations.append(Registration(instance_id, port, at))
            return
        for index, known in enumerate(self.registrations):
            if known.instance_id == instance_id and known.gone_at is None:
                self.registrations[index] = replace(known, gone_at=at)

    def registration_of(self, replica_id: str) -> Registration | None:
        """The first registration of ``replica_id``; None if it has not been in discovery."""
        report = self.reports.get(replica_id)
        if report is None:
            return None
        return next((known for known in self.registrations if known.port == report.rpc_port), None)

    def serving(self) -> list[str]:
        """Replicas that are in discovery now."""
        ports = {known.port for known in self.registrations if known.gone_at is None}
        return [replica_id for replica_id, report in self.reports.items() if report.rpc_port in ports]


class Recorder:
    """Fills a :class:`Record` while its block runs."""

    def __init__(self, bus: Bus, runtime_dir: Path, etcd_url: str, prefix: str) -> None:
        self.record = Record(began_at=time.time())
        self._changed = asyncio.Condition()
        self._bus = bus
        self._runtime_dir = runtime_dir
        self._etcd = Etcd(etcd_url)
        self._prefix = prefix
        self._tasks: list[asyncio.Task[None]] = []
        self._nodes: set[str] = set()

    async def __aenter__(self) -> Recorder:
        self._tasks = [
            asyncio.create_task(self._follow_reports(), name="record reports"),
            asyncio.create_task(self._follow_status(), name="record status"),
            asyncio.create_task(self._follow_discovery(), name="record discovery"),
        ]
        return self

    async def __aexit__(self, *_: object) -> None:
        for task in self._tasks:
            task.cancel()
        results = await asyncio.gather(*self._tasks, return_exceptions=True)
        for result in results:
            if isinstance(result, Exception):
                raise result

    async def wait_for(self, condition: Callable[[], bool], timeout_s: float) -> bool:
        """Returns whether ``condition()`` of the record became true within ``timeout_s``."""
        deadline = time.monotonic() + timeout_s
        while not condition():
            left = deadline - time.monotonic()
            if left <= 0:
                return False
            try:
                async with asyncio.timeout(left):
                    await self.next_change()
            except TimeoutError:
                return condition()
        return True

    async def next_change(self) -> None:
        """Returns at the next event."""
        async with self._changed:
            await self._changed.wait()

    async def _notify(self) -> None:
        async with self._changed:
            self._changed.notify_all()

    async def _follow_reports(self) -> None:
        async for reported in self._bus.watch_reported():
            if reported.node not in self._nodes:
                self._nodes.add(reported.node)
                self._tasks.append(asyncio.create_task(self._follow_orders(reported.node), name="record orders"))
            self.record.take_report(reported)
            await self._notify()

    async def _follow_orders(self, node: str) -> None:
        async for wanted in self._bus.watch_wanted(node):
            for order in wanted.orders:
                self.record.orders.setdefault(order.id, order)
            await self._notify()

    async def _follow_discovery(self) -> None:
        async for changes in self._etcd.watch(self._prefix, start_revision=1):
            now = time.time()
            for change in changes:
                self.record.take_change(change, now)
            await self._notify()

    async def _follow_status(self) -> None:
        at = 0.0
        while True:
            status = read_view(self._runtime_dir).status
            if status is not None and status.at != at:
                at = status.at
                self.record.take_status(status)
                await self._notify()
            await asyncio.sleep(STATUS_INTERVAL_S)
