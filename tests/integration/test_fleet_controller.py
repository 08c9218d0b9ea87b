"""The real controller between a real etcd, NATS and Dynamo's own connector, with a node that only pretends to work."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time
from asyncio.subprocess import Process
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import nats
import pytest
from support.fleet_stand_ins import StandInNode, planner_side

from dynamo_snapshot.bus.directory import DirectoryBus
from dynamo_snapshot.discovery.client import connected
from dynamo_snapshot.fleet import hints
from dynamo_snapshot.model import (
    FleetStatus,
    OrderKind,
    PoolHint,
    ReplicaPhase,
    ReplicaState,
    ScalingHint,
    Way,
    decode,
    encode,
)

FLEET = """
name: trial
namespace: {namespace}
model: {{name: tiny, path: {folder}}}
agent: {{runtime_dir: {folder}/run, store_dir: {folder}/store}}
servers: {{etcd: "{etcd}", nats: "{nats}"}}
pools:
  decode:
    worker: {{command: [worker]}}
    max_replicas: 6
    deadlines: {{cold_start_s: 20, restore_s: 10, capture_s: 10, drain_s: 5, kill_s: 3}}
"""
STARTS = (OrderKind.COLD_START, OrderKind.RESTORE)


class Trial:
    """One fleet of the test's own."""

    def __init__(self, folder: Path, etcd: str, nats_url: str) -> None:
        self.folder, self.etcd, self.nats = folder, etcd, nats_url
        self.namespace = f"fleet-{os.getpid()}-{time.monotonic_ns()}"
        self.file = folder / "fleet.yaml"
        self.file.write_text(FLEET.format(namespace=self.namespace, folder=folder, etcd=etcd, nats=nats_url))
        self.environment = {
            **os.environ,
            "ETCD_ENDPOINTS": etcd,
            "ETCD_LEASE_TTL": "5",
            "NATS_SERVER": nats_url,
            "DYN_EVENT_PLANE": "nats",
            "DYN_DISCOVERY_BACKEND": "etcd",
            "DYN_TCP_RPC_HOST": "127.0.0.1",
            "DYN_TCP_RESPONSE_STREAM_HOST": "127.0.0.1",
        }
        self.bus = DirectoryBus(folder / "run" / "bus")
        self.node = StandInNode(self.bus, etcd, self.namespace)

    @asynccontextmanager
    async def controller(self) -> AsyncIterator[Process]:
        with (self.folder / "controller.log").open("ab") as log:
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "dynamo_snapshot.cli.main", "controller", str(self.file)),
                env=self.environment,
                stdout=log,
                stderr=log,
            )
        try:
            yield process
        finally:
            if process.returncode is None:
                process.send_signal(signal.SIGTERM)
                async with asyncio.timeout(20):
                    await process.wait()

    @asynccontextmanager
    async def running_node(self) -> AsyncIterator[StandInNode]:
        task = asyncio.create_task(self.node.run())
        try:
            yield self.node
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    def status(self) -> FleetStatus | None:
        path = self.folder / "run" / "fleet-status.json"
        return decode(path.read_bytes(), FleetStatus) if path.exists() else None

    def serving(self) -> set[str]:
        status = self.status()
        replicas = status.replicas if status is not None else ()
        return {replica.replica_id for replica in replicas if replica.state is ReplicaState.SERVING}

    async def until(self, what: Callable[[], bool], timeout_s: float = 30.0) -> None:
        end = time.monotonic() + timeout_s
        while not what():
            if time.monotonic() > end:
                log = (self.folder / "controller.log").read_text()[-4000:]
                pytest.fail(f"did not come true in {timeout_s} s: {self.status()}\n{log}")
            await asyncio.sleep(0.01)

    def settled(self, number: int) -> bool:
        return self.serving() == {replica.id for replica in self.node.live()} and len(self.node.live()) == number


@pytest.fixture
def trial(tmp_path: Path, etcd_url: str, nats_url: str) -> Trial:
    return Trial(tmp_path, etcd_url, nats_url)


async def test_decisions_become_replicas_and_are_always_acknowledged(trial: Trial) -> None:
    async with (
        trial.controller(),
        trial.running_node() as node,
        planner_side(trial.namespace, trial.environment) as side,
    ):
        await trial.until(lambda: trial.settled(1))
        assert [order.kind for _, order in node.orders] == [OrderKind.COLD_START, OrderKind.CAPTURE]
        answer = await side.decide(4)
        assert "error" not in answer
        await trial.until(lambda: trial.settled(4))
        assert sum(order.kind is OrderKind.RESTORE for _, order in node.orders) == 3
        answer = await side.decide(1)
        assert "error" not in answer
        await trial.until(lambda: trial.settled(1))
        assert side.process.returncode is None, "the planner lives"
        assert max(node.executed.values()) == 1
        await trial.until(lambda: not node.outcomes)


async def test_a_dead_worker_is_replaced_and_its_lease_revoked(trial: Trial) -> None:
    async with trial.controller(), trial.running_node() as node:
        await trial.until(lambda: trial.settled(1))
        dead = node.live()[0]
        began = time.monotonic()
        node.crash(dead)
        await trial.until(lambda: trial.settled(1) and node.live()[0].id != dead.id)
        took = time.monotonic() - began
        async with connected(trial.etcd) as client:
            keys = [item.key for item in await client.get_prefix(f"v1/instances/{trial.namespace}/".encode())]
        assert len(keys) == 1
        assert f"{dead.lease:x}".encode() not in keys[0]
        assert took < 1.5


async def test_a_controller_killed_with_orders_in_flight_orders_nothing_twice(trial: Trial) -> None:
    async with trial.running_node() as node, planner_side(trial.namespace, trial.environment) as side:
        async with trial.controller() as first:
            await trial.until(lambda: trial.settled(1))
            node.start_s = 3.0
            await side.decide(4)
            await trial.until(lambda: sum(order.kind in STARTS for _, order in node.orders) == 4)
            first.kill()
            await first.wait()
        node.start_s = 0.05
        async with trial.controller():
            await trial.until(lambda: trial.settled(4))
            await trial.until(lambda: not node.outcomes)
            status = trial.status()
            assert status is not None
            assert status.pools[0].target == 4
        assert sum(order.kind in STARTS for _, order in node.orders) == 4
        assert max(node.executed.values()) == 1
        assert not [order for _, order in node.orders if order.kind in (OrderKind.DRAIN, OrderKind.CANCEL)]


async def test_a_controller_that_was_down_takes_up_the_decision_made_meanwhile(trial: Trial) -> None:
    async with trial.running_node(), planner_side(trial.namespace, trial.environment) as side:
        async with trial.controller():
            await trial.until(lambda: trial.settled(1))
        waiting = asyncio.create_task(side.decide(3, timeout_s=30))
        await asyncio.sleep(0.5)
        async with trial.controller():
            assert "error" not in await waiting
            await trial.until(lambda: trial.settled(3))


async def test_a_status_is_published_in_a_file_and_on_nats(trial: Trial) -> None:
    received: asyncio.Queue[FleetStatus] = asyncio.Queue()

    async def take(message: Any) -> None:
        received.put_nowait(decode(message.data, FleetStatus))

    client = await nats.connect(trial.nats)
    await client.subscribe(f"dynamo_snapshot.{trial.namespace}.fleet_status", cb=take)
    try:
        async with trial.controller(), trial.running_node():
            await trial.until(lambda: trial.settled(1))
            async with asyncio.timeout(10):
                while (status := await received.get()).pools[0].serving != 1:
                    pass
            assert status.fleet == "trial"
            file = trial.status()
            assert file is not None
            assert abs(file.at - time.time()) < 3
    finally:
        await client.close()


async def test_a_hint_on_nats_parks_and_a_decision_wakes(trial: Trial) -> None:
    async with (
        trial.controller(),
        trial.running_node() as node,
        planner_side(trial.namespace, trial.environment) as side,
    ):
        await trial.until(lambda: trial.settled(1))
        client = await nats.connect(trial.nats)
        try:
            hint = ScalingHint(at=time.time(), expires_at=time.time() + 60, decode=PoolHint(parked=1, prefetch=True))
            await client.publish(hints.subject(trial.namespace), b"this is no hint")
            await client.publish(hints.subject(trial.namespace), encode(hint))
            await trial.until(lambda: [r.phase for r in node.live()].count(ReplicaPhase.PARKED) == 1)
        finally:
            await client.close()
        await trial.until(
            lambda: (s := trial.status()) is not None and (s.pools[0].parked, s.pools[0].serving) == (1, 1)
        )
        spare = next(replica for replica in node.live() if replica.phase is ReplicaPhase.PARKED)
        assert "error" not in await side.decide(2)
        await trial.until(lambda: spare.id in trial.serving())
        kinds = [order.kind for _, order in node.orders]
        assert kinds.count(OrderKind.WAKE) == kinds.count(OrderKind.PREFETCH) == 1
        status = trial.status()
        assert status is not None
        assert [times.way for times in status.start_times if times.seconds][-1] is Way.WAKE


async def test_a_second_controller_takes_over_and_the_first_gives_up(trial: Trial) -> None:
    async with trial.controller() as first, trial.running_node() as node:
        await trial.until(lambda: trial.settled(1))
        async with trial.controller():
            async with asyncio.timeout(20):
                assert await first.wait() != 0
            assert "stale_fence" in (trial.folder / "controller.log").read_text()
            await trial.until(lambda: trial.settled(1))
        assert len(node.live()) == 1


async def outage(
    folder: Path, server: Any, nats_url: str, seconds: float, decide_after: Callable[[Trial], Awaitable[None]]
) -> None:
    trial = Trial(folder, server.url, nats_url)
    async with trial.controller() as controller, trial.running_node() as node:
        await trial.until(lambda: trial.settled(1))
        before = len(node.orders)
        await asyncio.to_thread(server.stop)
        await trial.until(lambda: (status := trial.status()) is not None and not status.discovery_known)
        await asyncio.sleep(seconds / 2)
        for replica in node.live():
            node.crash(replica)  # as workers do whose lease is lost
        await asyncio.sleep(seconds / 2)
        assert len(node.orders) == before, "nothing is ordered while discovery is unknown"
        assert controller.returncode is None
        await asyncio.to_thread(server.start)
        await trial.until(lambda: trial.settled(1), 60)
        assert controller.returncode is None
        await decide_after(trial)


async def a_new_planner_is_heard(trial: Trial) -> None:
    async with planner_side(trial.namespace, trial.environment) as side:
        assert "error" not in await side.decide(2, timeout_s=60)
        await trial.until(lambda: trial.settled(2), 60)


async def test_a_short_outage_of_etcd_is_survived(tmp_path: Path, etcd_server: Any, nats_url: str) -> None:
    await outage(tmp_path, etcd_server, nats_url, 4, a_new_planner_is_heard)


@pytest.mark.timeout(300)
async def test_etcd_away_for_45_seconds_is_survived(tmp_path: Path, etcd_server: Any, nats_url: str) -> None:
    await outage(tmp_path, etcd_server, nats_url, 45, a_new_planner_is_heard)
