"""Parked replicas in their agent: what a wake may rely on, what it leaves, and what the next agent makes of them."""

from __future__ import annotations

import asyncio
import errno
import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import cast

import msgspec
import pytest
from support.snapshots import CAPTURE

from dynamo_snapshot.agent.criu.command import Criu
from dynamo_snapshot.agent.gpus import Gpus
from dynamo_snapshot.agent.holder_client import HolderClient
from dynamo_snapshot.agent.house import House, Houses
from dynamo_snapshot.agent.journal import Journal
from dynamo_snapshot.agent.loader.client import ReplicaLoad, WeightLoader
from dynamo_snapshot.agent.node import Node
from dynamo_snapshot.agent.orders import Orders
from dynamo_snapshot.agent.pipelines.cold_start import ColdStart
from dynamo_snapshot.agent.pipelines.held_snapshot import HeldSnapshot
from dynamo_snapshot.agent.pipelines.restored_gpus import RestoredGpus
from dynamo_snapshot.agent.recovery import recover
from dynamo_snapshot.agent.replica import Replica
from dynamo_snapshot.config import Agent as Settings
from dynamo_snapshot.errors import SnapshotError
from dynamo_snapshot.model import Exit, Order, OrderKind, OrderStatus, Outcome, Reason, ReplicaPhase, Way, WorkerSpec
from dynamo_snapshot.snapshots.compatibility import CompatibilityParts
from dynamo_snapshot.snapshots.manifest import CudaRecord, WeightSegment
from dynamo_snapshot.snapshots.store import SnapshotStore
from worker_hooks import control
from worker_hooks.weights.segment import SegmentStore

SPEC = WorkerSpec(command=("true",))
POOL = "decode"


class Holder:
    """The agent's end of a holder whose worker lives."""

    def __init__(self) -> None:
        loop = asyncio.get_running_loop()
        self.pid = os.getpid()
        self.exited: asyncio.Future[Exit] = loop.create_future()
        self.lost: asyncio.Future[None] = loop.create_future()
        self.signals: list[int] = []

    async def signal(self, number: int) -> None:
        self.signals.append(number)
        self.exited.set_result(Exit(code=0, at=time.time()))

    async def worker(self) -> int:
        return 2

    async def close(self) -> None: ...


class OneHouse:
    """The house of one parked worker, as files."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.there = True
        (folder / "control").mkdir(parents=True)
        (folder / "logs").mkdir()
        (folder / "logs" / "worker.log").write_text("what it said\n")
        state = control.WorkerState(state="PARKED", since=1.0)
        (folder / "control" / control.WORKER_STATE).write_text(state.to_json())

    def house(self) -> House:
        return House(self.folder, cast(HolderClient, Holder()))

    def existing(self) -> list[str]:
        return ["spare"] if self.there else []

    async def find(self, replica_id: str) -> House | None:
        return self.house()

    async def ready(self) -> None: ...

    async def quiet(self, house: House, timeout_s: float) -> None: ...

    async def remove(self, replica_id: str) -> None:
        self.there = False


class Place:
    """A node with one snapshot and one replica that is parked from it."""

    def __init__(self, folder: Path, port: int) -> None:
        async def parts(pool: str, spec: WorkerSpec) -> CompatibilityParts:
            return CAPTURE.compatibility

        self.houses = OneHouse(folder / "spare")
        store = SnapshotStore(folder / "store")
        with store.stage(POOL) as staging:
            (staging.path / "pages-1.img").write_bytes(b"pages")
            self.snapshot = staging.publish(CAPTURE).id
        self.node = Node(
            settings=Settings(runtime_dir=folder, rpc_ports=(port, port)),
            houses=cast(Houses, self.houses),
            store=store,
            criu=Criu(Path("criu"), "0"),
            journal=Journal(folder / "journal"),
            parts=parts,
        )
        self.orders = Orders(self.node, lambda: None)

    async def park(self) -> Replica:
        replica = self.node.admit(self.order(OrderKind.PARK), SPEC, Way.RESTORE)
        replica.snapshot = HeldSnapshot(self.node, self.snapshot)
        await replica.snapshot.take()
        replica.move_in(self.houses.house())
        replica.update()
        assert replica.phase is ReplicaPhase.PARKED
        return replica

    def order(self, kind: OrderKind, within_s: float = 60) -> Order:
        now = time.time()
        return Order(
            id=f"{kind}-1", kind=kind, replica_id="spare", pool=POOL, fence=1, issued_at=now,
            deadline=now + within_s, snapshot_id=self.snapshot if kind is OrderKind.PARK else None,
        )  # fmt: skip

    async def wake(self, within_s: float = 60) -> Outcome:
        order = self.order(OrderKind.WAKE, within_s)
        self.orders.begin(order, SPEC)
        return await self.outcome(order)

    async def outcome(self, order: Order) -> Outcome:
        async with asyncio.timeout(10):
            while order.id not in self.node.journal.state.outcomes:  # noqa: ASYNC110  a task brings it about
                await asyncio.sleep(0.005)
        return self.node.journal.state.outcomes[order.id]


@pytest.fixture
def place(tmp_path: Path, free_port: Callable[[], int]) -> Place:
    return Place(tmp_path, free_port())


async def test_a_snapshot_found_to_be_wrong_meanwhile_wakes_nobody(place: Place) -> None:
    replica = await place.park()
    place.node.distrusted[place.snapshot] = "its bytes are not those that were published"
    outcome = await place.wake()
    assert outcome.reason == Reason.SNAPSHOT_CORRUPT
    assert not replica.woken
    assert replica.phase is ReplicaPhase.PARKED
    assert replica.record.parked


async def test_a_snapshot_is_not_let_go_while_a_wake_looks_at_it(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    replica = await place.park()
    use = place.node.store.use
    tries: list[SnapshotError] = []

    @contextmanager
    def after_a_try_to_remove(snapshot_id: str) -> Iterator[Path]:
        with pytest.raises(SnapshotError) as refused:
            place.node.store.remove(snapshot_id)
        tries.append(refused.value)
        with use(snapshot_id) as images:
            yield images

    monkeypatch.setattr(place.node.store, "use", after_a_try_to_remove)
    assert replica.snapshot is not None
    await replica.snapshot.take()
    assert [refused.reason for refused in tries] == [Reason.SNAPSHOT_IN_USE]
    assert place.node.store.in_use(place.snapshot)
    replica.leave_snapshot()
    assert not place.node.store.in_use(place.snapshot)


async def test_the_log_of_a_worker_that_was_woken_in_vain_is_kept(place: Place) -> None:
    replica = await place.park()
    outcome = await place.wake(within_s=0.2)
    assert outcome.reason == Reason.DEADLINE_EXCEEDED
    assert replica.kept_log is not None
    assert replica.kept_log.read_text() == "what it said\n"
    assert f"its log is kept: {replica.kept_log}" in outcome.message
    assert place.node.replicas == {}


def says_that_it_is_registered(place: Place) -> None:
    state = control.WorkerState(state="REGISTERED", since=2.0)
    (place.houses.folder / "control" / control.WORKER_STATE).write_text(state.to_json())


async def woken(place: Place, replica: Replica, within_s: float) -> Order:
    order = place.order(OrderKind.WAKE, within_s)
    place.orders.begin(order, SPEC)
    await replica.until(lambda: True if replica.woken else None)
    return order


async def test_a_worker_that_has_registered_is_drained_though_nobody_has_looked_yet(place: Place) -> None:
    replica = await place.park()
    wake = await woken(place, replica, within_s=60)
    says_that_it_is_registered(place)
    drain = place.order(OrderKind.DRAIN)
    place.orders.begin(drain, SPEC)
    assert (await place.outcome(drain)).status is OrderStatus.DONE
    assert (await place.outcome(wake)).status is OrderStatus.DONE
    assert replica.record.served
    assert replica.exit is not None
    assert replica.exit.reason is None, "it is reported as what it is: drained"
    assert replica.house is not None
    assert cast(Holder, replica.house.holder).signals == [signal.SIGTERM]


async def test_it_is_too_late_to_cancel_a_worker_that_has_registered(place: Place) -> None:
    replica = await place.park()
    wake = await woken(place, replica, within_s=60)
    says_that_it_is_registered(place)
    cancel = place.order(OrderKind.CANCEL)
    place.orders.begin(cancel, SPEC)
    refused = await place.outcome(cancel)
    assert (refused.status, refused.reason) == (OrderStatus.FAILED, Reason.CANCELLED)
    assert "too late to cancel" in refused.message
    assert (await place.outcome(wake)).status is OrderStatus.DONE
    assert replica.phase is ReplicaPhase.REGISTERED
    assert place.houses.there
    await replica.close()


@pytest.mark.parametrize("boots", [True, False])
@pytest.mark.parametrize("says", [True, False])
async def test_a_deadline_ends_no_worker_that_has_registered(place: Place, says: bool, boots: bool) -> None:
    replica = await place.park()
    replica.wake()
    steps = ColdStart(place.node, place.order(OrderKind.COLD_START), SPEC, replica)
    ended = False
    try:
        async with asyncio.timeout(0.0):
            if says:
                says_that_it_is_registered(place)
            await (steps.boot() if boots else steps.resume())
    except TimeoutError:
        ended = True
    assert ended != says
    assert replica.record.served == (says and not boots)
    await replica.close()


class HangingLoader:
    """A loader whose answers wait for :attr:`answers`."""

    def __init__(self) -> None:
        self.answers = asyncio.Event()
        self.asked = asyncio.Event()
        self.cancelled: list[str] = []

    async def load(self, name: str, *what: object) -> int:
        self.asked.set()
        await self.answers.wait()
        return 17

    async def cancel(self, name: str, pid: int) -> None:
        await self.answers.wait()
        self.cancelled.append(name)


async def loading(place: Place, folder: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[RestoredGpus, HangingLoader]:
    """A wake's load that its loader has been asked for."""
    loader = HangingLoader()
    load = ReplicaLoad(cast(WeightLoader, loader), "spare", folder, [], SegmentStore(folder))
    monkeypatch.setattr(Gpus, "load_for", lambda *what: load)
    place.node.gpus = Gpus(place.node.settings.gpu, folder, folder, fake=True)
    weights = (WeightSegment(address=0, size=1, device=0, tag="weights", digest="0" * 64),)
    capture = msgspec.structs.replace(CAPTURE, weights=weights)
    gpus = RestoredGpus(place.node, await place.park(), capture, CudaRecord(driver_version="580", devices=()))
    gpus.begin_load()
    await loader.asked.wait()
    return gpus, loader


async def test_only_an_agent_that_goes_waits_for_what_a_loader_holds_of_one_that_serves(
    place: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpus, loader = await loading(place, tmp_path, monkeypatch)
    assert place.node.gpus is not None
    gpus.finish()
    closing = asyncio.create_task(place.node.gpus.close())
    assert not (await asyncio.wait({closing}, timeout=0.1))[0]
    loader.answers.set()
    await closing
    assert loader.cancelled == ["spare"]


async def test_a_load_is_given_up_though_its_loader_answers_only_after_everybody_has_gone(
    place: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpus, loader = await loading(place, tmp_path, monkeypatch)
    for step in (gpus.memory_made, gpus.give_up):
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.05):
                await step()
    loader.answers.set()
    assert place.node.gpus is not None
    await place.node.gpus.close()
    assert loader.cancelled == ["spare"]


async def test_who_is_being_ended_is_not_woken(place: Place) -> None:
    replica = await place.park()
    replica.ending = (Reason.CANCELLED, "the fleet ended it")
    outcome = await place.wake()
    assert outcome.reason == Reason.WORKER_NOT_READY
    assert "the fleet ended it" in outcome.message
    assert not (place.houses.folder / "control" / control.WAKE).exists()


@pytest.mark.parametrize(
    "lost", [OSError(errno.EIO, "input/output error"), SnapshotError(Reason.SNAPSHOT_CHANGED, "?")]
)
async def test_an_agent_ends_the_parked_whose_snapshot_it_cannot_use_and_goes_on(
    place: Place, monkeypatch: pytest.MonkeyPatch, lost: Exception
) -> None:
    await (await place.park()).close()
    place.node.replicas.clear()

    def check_unchanged(snapshot_id: str) -> None:
        raise lost

    monkeypatch.setattr(place.node.store, "check_unchanged", check_unchanged)
    await recover(place.node, place.orders)
    assert place.node.replicas == {}
    assert not place.houses.there
    assert place.node.journal.state.replicas == {}
    assert not place.node.store.in_use(place.snapshot)


async def test_an_agent_keeps_the_parked_and_their_snapshot(place: Place) -> None:
    await (await place.park()).close()
    assert not place.node.store.in_use(place.snapshot)
    place.node.replicas.clear()
    await recover(place.node, place.orders)
    assert place.node.replicas["spare"].phase is ReplicaPhase.PARKED
    assert place.node.store.in_use(place.snapshot)
    await place.node.replicas["spare"].close()
