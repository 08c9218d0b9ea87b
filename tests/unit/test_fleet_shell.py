"""The controller's shell with servers that fail: nothing is lost, and nobody waits for somebody else."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
from fleet_world import rules

from dynamo_snapshot.bus.in_process import InProcessBus
from dynamo_snapshot.discovery.in_memory import InMemoryDiscovery
from dynamo_snapshot.errors import SnapshotError
from dynamo_snapshot.fleet.controller import Controller
from dynamo_snapshot.fleet.decisions import OnDecision, OnLoads
from dynamo_snapshot.fleet.in_memory import InMemoryStore, Shelf
from dynamo_snapshot.model import (
    Decision,
    Exit,
    FleetStatus,
    Instance,
    Order,
    OrderKind,
    Reason,
    ReplicaPhase,
    ReplicaReport,
    Reported,
    Wanted,
    Way,
)


class ScriptedPlanner:
    def __init__(self) -> None:
        self.say: OnDecision | None = None
        self.completed: list[Decision] = []

    async def run(self, on_decision: OnDecision, on_loads: OnLoads) -> None:
        self.say = on_decision
        await asyncio.Event().wait()

    def complete(self, decision: Decision) -> None:
        self.completed.append(decision)


class FlakyBus(InProcessBus):
    broken = False

    async def publish_wanted(self, wanted: Wanted) -> None:
        if self.broken:
            raise SnapshotError(Reason.SERVER_UNREACHABLE, "the bus was switched off")
        await super().publish_wanted(wanted)


class Statuses:
    def __init__(self) -> None:
        self.seen: list[FleetStatus] = []

    async def publish(self, status: FleetStatus) -> None:
        self.seen.append(status)


class Stage:
    def __init__(self) -> None:
        self.bus = FlakyBus()
        self.discovery = InMemoryDiscovery()
        self.shelf = Shelf()
        self.planner = ScriptedPlanner()
        self.statuses = Statuses()
        self.controller = self.another()

    def another(self) -> Controller:
        store = InMemoryStore(self.shelf)
        return Controller(rules(), self.bus, self.discovery, store, self.planner, self.statuses)

    async def report(self, *replicas: ReplicaReport, fence: int = 0) -> None:
        import time

        self.sequence = getattr(self, "sequence", 0) + 1
        await self.bus.publish_reported(
            Reported(
                node="one",
                sequence=self.sequence,
                fence=fence,
                at=time.time(),
                compatibility_keys={"decode": "key"},
                replicas=replicas,
            )
        )

    async def orders(self) -> tuple[Order, ...]:
        wanted = await self.bus.read_wanted("one")
        return wanted.orders if wanted is not None else ()


@asynccontextmanager
async def running(stage: Stage) -> AsyncIterator[asyncio.Task[None]]:
    task = asyncio.create_task(stage.controller.run())
    try:
        yield task
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def until(what: Callable[[], bool]) -> None:
    async with asyncio.timeout(10):
        while not what():  # noqa: ASYNC110  several tasks bring it about
            await asyncio.sleep(0.005)


def replica(phase: ReplicaPhase, port: int = 20001, **changes: Any) -> ReplicaReport:
    return ReplicaReport(
        replica_id="decode-0-1",
        pool="decode",
        incarnation="i",
        way=Way.RESTORE,
        phase=phase,
        since=0.0,
        rpc_port=port,
        **changes,
    )


def instance(port: int = 20001) -> Instance:
    return Instance(
        instance_id=7, namespace="dynamo", component="backend", endpoint="generate", host="127.0.0.1", port=port
    )


async def test_a_report_and_a_view_make_the_first_order() -> None:
    stage = Stage()
    async with running(stage):
        await stage.report()
        await until(lambda: bool(stage.controller.state.replicas))
        await until(lambda: bool(stage.bus._wanted))
        assert [order.kind for order in await stage.orders()] == [OrderKind.COLD_START]


async def test_a_wanted_list_is_written_as_soon_as_the_bus_can_be_and_only_the_newest() -> None:
    stage = Stage()
    stage.bus.broken = True
    async with running(stage):
        await stage.report()
        await until(lambda: bool(stage.controller.state.replicas) and stage.planner.say is not None)
        assert stage.planner.say is not None
        stage.planner.say(Decision(revision=1, id=0, decode=1))
        await until(lambda: bool(stage.planner.completed))
        assert await stage.orders() == ()
        stage.bus.broken = False
        await until(lambda: bool(stage.bus._wanted))
        newest = stage.controller.state.nodes["one"]
        assert stage.bus._wanted["one"].sequence == newest.sequence
        assert await stage.orders() == newest.orders


async def test_a_decision_is_acknowledged_though_nothing_can_be_remembered_and_is_remembered_later() -> None:
    stage = Stage()
    async with running(stage):
        await until(lambda: stage.planner.say is not None)
        stage.shelf.reachable = False
        assert stage.planner.say is not None
        stage.planner.say(Decision(revision=1, id=0, decode=3))
        await until(lambda: len(stage.planner.completed) == 1)
        assert stage.shelf.memory.targets == {}
        stage.shelf.reachable = True
        await until(lambda: stage.shelf.memory.targets == {"decode": 3})


async def test_a_revocation_is_tried_until_it_succeeds() -> None:
    stage = Stage()
    stage.discovery.register(instance())
    refusals = 3

    class Stubborn(InMemoryDiscovery):
        async def revoke(self, instance_id: int) -> None:
            nonlocal refusals
            refusals -= 1
            if refusals >= 0:
                raise SnapshotError(Reason.SERVER_UNREACHABLE, "not now")
            await super().revoke(instance_id)

    stage.discovery.__class__ = Stubborn
    async with running(stage):
        await stage.report(replica(ReplicaPhase.REGISTERED))
        await until(lambda: any(r.instance_id == 7 for r in stage.controller.state.replicas.values()))
        await stage.report(replica(ReplicaPhase.EXITED, exit=Exit(code=-9, at=1.0)))
        await until(lambda: stage.controller.state.instances == ())
        assert refusals == -1


async def test_what_left_discovery_meanwhile_is_not_revoked() -> None:
    stage = Stage()
    stage.discovery.register(instance())
    async with running(stage):
        await stage.report(replica(ReplicaPhase.REGISTERED))
        await until(lambda: any(r.instance_id == 7 for r in stage.controller.state.replicas.values()))
        stage.controller._leases.put(7, "decode-0-1")  # nobody reported an exit: the core does not want it
        await asyncio.sleep(0.05)
        assert [i.instance_id for i in stage.controller.state.instances] == [7]


async def test_it_waits_for_servers_that_are_away_at_its_start() -> None:
    stage = Stage()
    stage.shelf.reachable = False
    async with running(stage) as task:
        await asyncio.sleep(0.05)
        assert not task.done()
        stage.shelf.reachable = True
        await until(lambda: stage.controller.state.fence > 0)


async def test_it_gives_up_when_a_node_obeys_another() -> None:
    stage = Stage()
    async with running(stage) as task:
        await until(lambda: stage.planner.say is not None)
        await stage.report(fence=99)
        with pytest.raises(SnapshotError) as caught:
            async with asyncio.timeout(5):
                await task
    assert caught.value.reason is Reason.STALE_FENCE


async def test_it_gives_up_when_another_took_the_fence() -> None:
    stage = Stage()
    async with running(stage) as task:
        await until(lambda: stage.planner.say is not None)
        await InMemoryStore(stage.shelf).take_fence(1)
        assert stage.planner.say is not None
        stage.planner.say(Decision(revision=1, id=0, decode=3))
        with pytest.raises(SnapshotError) as caught:
            async with asyncio.timeout(5):
                await task
        assert len(stage.planner.completed) == 1, "also its last decision is acknowledged"
    assert caught.value.reason is Reason.STALE_FENCE


async def test_its_fence_is_above_all_that_nodes_and_lists_show() -> None:
    stage = Stage()
    await stage.report(fence=41)
    async with running(stage):
        await until(lambda: stage.controller.state.fence > 0)
        assert stage.controller.state.fence == 42


async def test_a_status_comes_at_once_and_at_least_every_second_or_so() -> None:
    stage = Stage()
    async with running(stage):
        await until(lambda: len(stage.statuses.seen) >= 1)
        await until(lambda: len(stage.statuses.seen) >= 3)
    assert stage.statuses.seen[-1].fleet == "fleet"
