"""Stand-ins around a real controller: a node that keeps the agent's side of the bus contract, and Dynamo's planner."""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys
import time
from asyncio.subprocess import DEVNULL, PIPE, Process
from collections import Counter
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

from dynamo_snapshot.bus.interface import Bus
from dynamo_snapshot.discovery.client import connected, etcd_errors
from dynamo_snapshot.errors import SnapshotError
from dynamo_snapshot.model import (
    Exit,
    Order,
    OrderKind,
    OrderStatus,
    Outcome,
    Reason,
    ReplicaPhase,
    ReplicaReport,
    Reported,
    SnapshotSummary,
    Wanted,
    Way,
)

STARTS = (OrderKind.COLD_START, OrderKind.RESTORE, OrderKind.PARK)


@dataclass
class Replica:
    id: str
    pool: str
    way: Way
    port: int
    phase: ReplicaPhase
    since: float
    snapshot_id: str | None = None
    lease: int | None = None
    exit: Exit | None = None

    @property
    def live(self) -> bool:
        return self.exit is None


class StandInNode:
    """Carries orders out at once, with registrations in a real etcd; its workers are only keys."""

    def __init__(self, bus: Bus, etcd_url: str, namespace: str, first_port: int = 30000) -> None:
        self.bus, self.etcd_url, self.namespace = bus, etcd_url, namespace
        self.port = first_port
        self.fence = 0
        self.sequence = 0
        self.replicas: dict[str, Replica] = {}
        self.outcomes: dict[str, Outcome] = {}
        self.executed: Counter[str] = Counter()
        self.orders: list[tuple[float, Order]] = []
        self.snapshots: list[SnapshotSummary] = []
        self.start_s = 0.05
        self.changed = asyncio.Event()
        self.captured = asyncio.Event()

    async def run(self) -> None:
        """Works until it is cancelled."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._report())
            async for wanted in self.bus.watch_wanted("local"):
                self._see(wanted, group)

    def _see(self, wanted: Wanted, group: asyncio.TaskGroup) -> None:
        if wanted.fence < self.fence:
            return
        self.fence = wanted.fence
        ids = {order.id for order in wanted.orders}
        self.outcomes = {order_id: outcome for order_id, outcome in self.outcomes.items() if order_id in ids}
        for order in wanted.orders:
            if not self.executed[order.id]:
                self.executed[order.id] += 1
                self.orders.append((time.time(), order))
                group.create_task(self._carry_out(order))
        self.changed.set()

    async def _carry_out(self, order: Order) -> None:
        began = time.time()
        snapshot_id, reason = None, None
        if order.kind in STARTS:
            reason = await self._start(order)
        elif order.kind is OrderKind.CAPTURE:
            snapshot_id = f"snapshot-{order.id}"
            summary = SnapshotSummary(
                id=snapshot_id, compatibility_key="key", size_bytes=1, created_at=time.time(), admitted=True
            )
            self.snapshots.append(summary)
            self.captured.set()
        elif order.kind is OrderKind.WAKE:
            reason = await self._serve(self.replicas[order.replica_id])
        elif order.kind is not OrderKind.PREFETCH:
            reason = await self._stop(order)
        self.outcomes[order.id] = Outcome(
            order_id=order.id,
            status=OrderStatus.FAILED if reason else OrderStatus.DONE,
            started_at=began,
            finished_at=time.time(),
            reason=reason,
            snapshot_id=snapshot_id,
        )
        self.changed.set()

    async def _start(self, order: Order) -> Reason | None:
        restores = order.kind is not OrderKind.COLD_START
        self.port += 1
        replica = Replica(
            id=order.replica_id,
            pool=order.pool,
            way=Way.RESTORE if restores else Way.COLD_START,
            port=self.port,
            phase=ReplicaPhase.RESTORING if restores else ReplicaPhase.STARTING,
            since=time.time(),
            snapshot_id=order.snapshot_id,
        )
        self.replicas[replica.id] = replica
        self.changed.set()
        await asyncio.sleep(self.start_s)
        if order.capture:
            self._move(replica, ReplicaPhase.READY_FOR_SNAPSHOT)
            async with asyncio.timeout(20):
                await self.captured.wait()
        if order.kind is OrderKind.PARK:
            self._move(replica, ReplicaPhase.PARKED)
            return None
        return await self._serve(replica)

    async def _serve(self, replica: Replica) -> Reason | None:
        if not replica.live:
            return Reason.WORKER_EXITED
        try:
            await self.register(replica)
        except SnapshotError:
            self._exited(replica, 1)
            return Reason.SERVER_UNREACHABLE
        self._move(replica, ReplicaPhase.REGISTERED)
        return None

    async def _stop(self, order: Order) -> Reason | None:
        replica = self.replicas.get(order.replica_id)
        if replica is None:
            return Reason.UNKNOWN_REPLICA
        if replica.live:
            if order.kind is OrderKind.DRAIN and replica.lease is not None:
                self._move(replica, ReplicaPhase.DRAINING)
                with contextlib.suppress(SnapshotError):
                    await self.deregister(replica)
            self._exited(replica, 0)
        return None

    async def register(self, replica: Replica) -> None:
        async with connected(self.etcd_url) as client:
            with etcd_errors(self.etcd_url, "register"):
                lease = await client.lease(60)
                replica.lease = lease.id
                value = {
                    "namespace": self.namespace,
                    "component": "backend",
                    "endpoint": "generate",
                    "instance_id": lease.id,
                    "transport": {"tcp": f"127.0.0.1:{replica.port}/{lease.id:x}/{self.namespace}/backend/generate"},
                }
                key = f"v1/instances/{self.namespace}/backend/generate/{lease.id:x}"
                await client.put(key.encode(), json.dumps(value).encode(), lease)

    async def deregister(self, replica: Replica) -> None:
        async with connected(self.etcd_url) as client:
            with etcd_errors(self.etcd_url, "deregister"):
                await client.revoke_lease(replica.lease)

    def crash(self, replica: Replica) -> None:
        """Its process dies; its registration stays."""
        self._exited(replica, -9)

    def live(self) -> list[Replica]:
        return [replica for replica in self.replicas.values() if replica.live]

    def _exited(self, replica: Replica, code: int) -> None:
        replica.exit = Exit(code=code, at=time.time())
        self._move(replica, ReplicaPhase.EXITED)

    def _move(self, replica: Replica, phase: ReplicaPhase) -> None:
        replica.phase, replica.since = phase, time.time()
        self.changed.set()

    async def _report(self) -> None:
        while True:
            self.changed.clear()
            self.sequence += 1
            await self.bus.publish_reported(
                Reported(
                    node="local",
                    sequence=self.sequence,
                    fence=self.fence,
                    at=time.time(),
                    compatibility_keys={"decode": "key"},
                    replicas=tuple(
                        ReplicaReport(
                            replica_id=r.id,
                            pool=r.pool,
                            incarnation=r.id,
                            way=r.way,
                            phase=r.phase,
                            since=r.since,
                            rpc_port=r.port,
                            snapshot_id=r.snapshot_id,
                            exit=r.exit,
                        )
                        for r in self.replicas.values()
                    ),
                    outcomes=tuple(self.outcomes.values()),
                    snapshots=tuple(self.snapshots),
                )
            )
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(1.0):
                    await self.changed.wait()


_PLANNER = """
import asyncio, json, sys, time
from dynamo._core import VirtualConnectorCoordinator
from dynamo.runtime import DistributedRuntime
async def main():
    runtime = DistributedRuntime(asyncio.get_running_loop(), "etcd", "tcp", event_plane="nats")
    coordinator = VirtualConnectorCoordinator(runtime, sys.argv[1], 1, 10, 10)
    await coordinator.async_init()
    print(json.dumps({"ready": True}), flush=True)
    loop = asyncio.get_running_loop()
    while line := await loop.run_in_executor(None, sys.stdin.readline):
        want = json.loads(line)
        at = time.time()
        try:
            await coordinator.update_scaling_decision(want.get("prefill"), want.get("decode"))
            published = time.time()
            async with asyncio.timeout(want["timeout"]):
                while not await coordinator.is_scaling_ready():
                    await asyncio.sleep(0.002)
            answer = {"published": published, "began": at, "completed": time.time()}
        except Exception as error:
            answer = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(answer), flush=True)
asyncio.run(main())
"""


class PlannerSide:
    """A process with Dynamo's own coordinator, as its planner runs it."""

    def __init__(self, process: Process) -> None:
        self.process = process

    async def decide(self, decode: int, timeout_s: float = 10.0) -> dict[str, Any]:
        """Publishes a decision and waits for its acknowledgement; returns when both were, or an ``error``."""
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps({"decode": decode, "timeout": timeout_s}).encode() + b"\n")
        return await self._answer(timeout_s + 30)

    async def _answer(self, timeout_s: float) -> dict[str, Any]:
        assert self.process.stdout is not None
        async with asyncio.timeout(timeout_s):
            while line := await self.process.stdout.readline():
                with contextlib.suppress(ValueError):
                    answer = json.loads(line)
                    if isinstance(answer, dict):
                        return answer
        raise AssertionError("the planner side has died")


@asynccontextmanager
async def planner_side(namespace: str, environment: Mapping[str, str]) -> AsyncIterator[PlannerSide]:
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", _PLANNER, namespace, stdin=PIPE, stdout=PIPE, stderr=DEVNULL, env=dict(environment)
    )
    side = PlannerSide(process)
    try:
        await side._answer(60)
        yield side
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
