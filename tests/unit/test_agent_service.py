"""Which orders an agent takes: by fence, by deadline, and each one once."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import pytest

from dynamo_snapshot.agent.compatibility_cache import CompatibilityCache
from dynamo_snapshot.agent.criu.command import Criu
from dynamo_snapshot.agent.house import HostHouses
from dynamo_snapshot.agent.journal import Journal
from dynamo_snapshot.agent.node import Node
from dynamo_snapshot.agent.service import AgentService
from dynamo_snapshot.bus.in_process import InProcessBus
from dynamo_snapshot.config import Agent
from dynamo_snapshot.model import Order, OrderKind, Reason, Wanted, WorkerSpec
from dynamo_snapshot.snapshots.store import SnapshotStore


class World:
    """An agent that takes lists and is never given the time to carry anything out."""

    def __init__(self, folder: Path, port: int) -> None:
        self.journal = folder / "journal"
        compatibility = CompatibilityCache("4")
        self.node = Node(
            settings=Agent(runtime_dir=folder, rpc_ports=(port, port)),
            houses=HostHouses(folder),
            store=SnapshotStore(folder / "store"),
            criu=Criu(Path("criu"), "4"),
            journal=Journal(self.journal),
            parts=compatibility,
        )
        self.service = AgentService("n", self.node, InProcessBus(), compatibility, {})

    def take(self, fence: int, *orders: Order) -> None:
        workers = {"p": WorkerSpec(command=("true",))}
        self.service.take(Wanted(node="n", fence=fence, sequence=1, workers=workers, orders=orders))

    def begun(self) -> list[str]:
        return list(self.node.journal.state.open)

    def refused(self) -> dict[str, str | None]:
        return {order_id: outcome.reason for order_id, outcome in self.node.journal.state.outcomes.items()}


@pytest.fixture
def world(tmp_path: Path, free_port: Callable[[], int]) -> World:
    return World(tmp_path, free_port())


def order(order_id: str, fence: int, within_s: float = 60) -> Order:
    now = time.time()
    return Order(
        id=order_id, kind=OrderKind.COLD_START, replica_id=order_id, pool="p", fence=fence, issued_at=now,
        deadline=now + within_s,
    )  # fmt: skip


async def test_a_list_below_the_highest_fence_changes_nothing(world: World) -> None:
    world.take(7)
    world.take(6, order("usurped", 6))
    assert world.begun() == []
    assert world.refused() == {}
    world.take(7, order("rightful", 7))
    assert world.begun() == ["rightful"]


async def test_an_order_of_an_earlier_controller_in_a_newer_ones_list_is_refused(world: World) -> None:
    world.take(7, order("inherited", 6), order("own", 7))
    assert world.refused() == {"inherited": Reason.STALE_FENCE}
    assert world.begun() == ["own"]


async def test_the_highest_fence_outlives_the_agent(world: World) -> None:
    world.take(7)
    assert Journal(world.journal).state.fence == 7


async def test_an_order_under_way_goes_on_under_a_newer_controller(world: World) -> None:
    world.take(6, order("kept", 6))
    world.take(7, order("kept", 6))
    assert world.begun() == ["kept"]
    assert world.refused() == {}


async def test_an_order_is_begun_once_while_it_runs_and_never_after_its_end(world: World) -> None:
    late = order("late", 1, within_s=-1)
    for _ in range(3):
        world.take(1, order("twice", 1), late)
    assert world.refused() == {"late": Reason.DEADLINE_EXCEEDED}
    assert world.journal.read_bytes().count(b'"begun"') == 1
    assert world.journal.read_bytes().count(b'"ended"') == 1
