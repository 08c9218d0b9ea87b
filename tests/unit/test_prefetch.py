"""A prefetch is bounded, can be taken back at once, and keeps nothing when it is over."""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import cast

import pytest
from support.snapshots import CAPTURE

from dynamo_snapshot.agent.criu.command import Criu
from dynamo_snapshot.agent.house import Houses
from dynamo_snapshot.agent.journal import Journal
from dynamo_snapshot.agent.node import Node
from dynamo_snapshot.agent.orders import Orders
from dynamo_snapshot.agent.page_cache import read_into_cache
from dynamo_snapshot.agent.pipelines import prefetch
from dynamo_snapshot.config import Agent as Settings
from dynamo_snapshot.model import Order, OrderKind, OrderStatus, Outcome, WorkerSpec
from dynamo_snapshot.snapshots.compatibility import CompatibilityParts
from dynamo_snapshot.snapshots.store import SnapshotStore

SPEC = WorkerSpec(command=("true",))
FILES = 3
MIB = 1 << 20


class Desk:
    """One node with one snapshot, and a person who orders."""

    def __init__(self, folder: Path) -> None:
        async def unknown(pool: str, spec: WorkerSpec) -> CompatibilityParts:
            raise AssertionError("a prefetch needs to know nothing of the pool")

        self.store = SnapshotStore(folder / "store")
        with self.store.stage("decode") as staging:
            for number in range(FILES):
                (staging.path / f"pages-{number}.img").write_bytes(os.urandom(MIB))
            self.snapshot = staging.publish(CAPTURE).id
        self.node = Node(
            settings=Settings(runtime_dir=folder),
            houses=cast(Houses, None),
            store=self.store,
            criu=Criu(Path("criu"), "0"),
            journal=Journal(folder / "journal"),
            parts=unknown,
        )
        self.orders = Orders(self.node, lambda: None)

    def order(self, kind: OrderKind, name: str, within_s: float = 60) -> str:
        now = time.time()
        order = Order(
            id=f"{kind}-{name}", kind=kind, replica_id=name, pool="decode", fence=1, issued_at=now,
            deadline=now + within_s, snapshot_id=self.snapshot,
        )  # fmt: skip
        self.orders.begin(order, SPEC)
        return order.id

    async def outcome(self, order_id: str) -> Outcome:
        async with asyncio.timeout(10):
            while order_id not in self.node.journal.state.outcomes:  # noqa: ASYNC110  a task brings it about
                await asyncio.sleep(0.005)
        return self.node.journal.state.outcomes[order_id]


@pytest.fixture
def desk(tmp_path: Path) -> Desk:
    return Desk(tmp_path)


class Slow:
    """Stands in for reading: each file takes until it is told to stop."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.begun: list[Path] = []
        self.ended = threading.Event()
        monkeypatch.setattr(prefetch, "read_into_cache", self.read)
        monkeypatch.setattr(prefetch, "cached_bytes", lambda path: 0)

    def read(self, path: Path, stopped: Callable[[], bool]) -> int:
        self.begun.append(path)
        while not stopped():
            time.sleep(0.002)
        self.ended.set()
        return 0


async def began(slow: Slow) -> None:
    async with asyncio.timeout(5):
        while not slow.begun:  # noqa: ASYNC110  a thread brings it about
            await asyncio.sleep(0.005)


async def test_a_cancel_by_its_name_ends_it_at_once_and_the_next_may_begin(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patched:
        slow = Slow(patched)
        first = desk.order(OrderKind.PREFETCH, "prefetch-1")
        await began(slow)
        assert desk.store.in_use(desk.snapshot)
        cancel = desk.order(OrderKind.CANCEL, "prefetch-1")
        assert (await desk.outcome(cancel)).status is OrderStatus.DONE
        assert (await desk.outcome(first)).status is OrderStatus.CANCELLED
        assert slow.ended.is_set()
    assert not desk.store.in_use(desk.snapshot)
    second = desk.order(OrderKind.PREFETCH, "prefetch-2")
    assert (await desk.outcome(second)).status is OrderStatus.DONE


async def test_its_deadline_ends_it(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    slow = Slow(monkeypatch)
    outcome = await desk.outcome(desk.order(OrderKind.PREFETCH, "prefetch-1", within_s=0.3))
    assert outcome.reason == "deadline_exceeded"
    assert slow.ended.is_set()
    assert not desk.store.in_use(desk.snapshot)


async def test_one_at_a_time(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    slow = Slow(monkeypatch)
    desk.order(OrderKind.PREFETCH, "prefetch-1")
    second = desk.order(OrderKind.PREFETCH, "prefetch-2")
    await began(slow)
    await asyncio.sleep(0.05)
    assert len(slow.begun) == FILES, "those of the first"
    desk.order(OrderKind.CANCEL, "prefetch-2")
    assert (await desk.outcome(second)).status is OrderStatus.CANCELLED
    await desk.orders.stop()


async def test_memory_bounds_what_is_read(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[Path] = []
    monkeypatch.setattr(prefetch, "read_into_cache", lambda path, stopped: read.append(path) or MIB)
    monkeypatch.setattr(prefetch, "cached_bytes", lambda path: 0)
    monkeypatch.setattr(prefetch, "available_bytes", lambda: round(2.5 * MIB / prefetch.SHARE_OF_AVAILABLE))
    assert (await desk.outcome(desk.order(OrderKind.PREFETCH, "prefetch-1"))).status is OrderStatus.DONE
    assert len(read) == 2


def test_reading_is_stopped_between_two_pieces(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(bytes(10 * MIB))
    asked: list[None] = []

    def stopped() -> bool:
        asked.append(None)
        return len(asked) > 2

    assert read_into_cache(path, stopped) == 8 * MIB
    assert read_into_cache(path, lambda: False) == 10 * MIB
