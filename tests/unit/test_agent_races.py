"""Things that happen at the same moment to one replica, and what a host or discovery refuses meanwhile."""

from __future__ import annotations

import asyncio
import errno
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import cast

import pytest

from dynamo_snapshot.agent import watch
from dynamo_snapshot.agent.control import ControlDirectory
from dynamo_snapshot.agent.criu import shm
from dynamo_snapshot.agent.criu.command import Criu
from dynamo_snapshot.agent.holder_client import HolderClient
from dynamo_snapshot.agent.house import House, Houses
from dynamo_snapshot.agent.journal import Journal
from dynamo_snapshot.agent.node import Node
from dynamo_snapshot.agent.orders import Orders
from dynamo_snapshot.agent.pipelines.capture import Capture, settle
from dynamo_snapshot.agent.pipelines.cold_start import ColdStart
from dynamo_snapshot.agent.pipelines.phases import Result
from dynamo_snapshot.agent.pipelines.restore import Restore
from dynamo_snapshot.agent.replica import Replica
from dynamo_snapshot.config import Agent as Settings
from dynamo_snapshot.errors import SnapshotError
from dynamo_snapshot.model import Exit, Order, OrderKind, Reason, Way, WorkerSpec
from dynamo_snapshot.snapshots.compatibility import CompatibilityParts
from dynamo_snapshot.snapshots.store import SnapshotStore
from worker_hooks import control

SPEC = WorkerSpec(command=("true",))


class EndedHolder:
    """The agent's end of a holder that has ended, or will; a request to it is refused."""

    def __init__(self) -> None:
        loop = asyncio.get_running_loop()
        self.pid = os.getpid()
        self.exited: asyncio.Future[Exit] = loop.create_future()
        self.lost: asyncio.Future[None] = loop.create_future()

    async def signal(self, number: int) -> bool:
        raise SnapshotError(Reason.HOLDER_FAILED, "the holder has ended")

    def end(self) -> None: ...

    async def close(self) -> None: ...


class NoHouses:
    """None is made; to remove one is to do nothing."""

    async def remove(self, replica_id: str) -> None: ...


def order(kind: OrderKind, *, capture: bool = False, snapshot_id: str | None = None) -> Order:
    now = time.time()
    return Order(
        id=f"{kind}-1", kind=kind, replica_id="r", pool="p", fence=1, issued_at=now, deadline=now + 60,
        capture=capture, snapshot_id=snapshot_id,
    )  # fmt: skip


@pytest.fixture
def node(tmp_path: Path, free_port: Callable[[], int]) -> Node:
    async def unknown(pool: str, spec: WorkerSpec) -> CompatibilityParts:
        raise SnapshotError(Reason.CONFIGURATION_INVALID, "the model is not there")

    port = free_port()
    return Node(
        settings=Settings(runtime_dir=tmp_path, rpc_ports=(port, port), release_after_s=0.05),
        houses=cast(Houses, NoHouses()),
        store=SnapshotStore(tmp_path / "store"),
        criu=Criu(Path("criu"), "0"),
        journal=Journal(tmp_path / "journal"),
        parts=unknown,
    )


def ready_worker(node: Node, tmp_path: Path) -> tuple[Replica, EndedHolder]:
    """A cold worker that waits at ready-for-snapshot."""
    folder = tmp_path / "house"
    (folder / "control").mkdir(parents=True)
    (folder / "control" / control.READY_FOR_SNAPSHOT).write_text("ready")
    replica = node.admit(order(OrderKind.COLD_START, capture=True), SPEC, Way.COLD_START)
    holder = EndedHolder()
    replica.move_in(House(folder, cast(HolderClient, holder)))
    replica.pid = os.getpid()
    replica.update()
    return replica, holder


async def test_a_capture_that_begins_as_the_wait_for_it_ends_keeps_its_source(node: Node, tmp_path: Path) -> None:
    replica, _ = ready_worker(node, tmp_path)
    start = ColdStart(node, order(OrderKind.COLD_START, capture=True), SPEC, replica)
    capture = Capture(node, order(OrderKind.CAPTURE))
    holding = asyncio.create_task(start.hold())
    await asyncio.sleep(0)
    loop = asyncio.get_running_loop()
    admitted: list[asyncio.Task[None]] = []

    def begin() -> None:
        time.sleep(0.002)  # past the end of the wait: the capture is admitted right before the wait hears of it
        admitted.append(loop.create_task(capture.admit()))

    loop.call_later(node.settings.release_after_s - 0.001, begin)
    await asyncio.sleep(0.1)
    assert admitted[0].exception() is None
    assert not replica.released, "a worker must not be let go while it is captured"
    await capture.release_source()
    capture.finish(Result((), 0.0))
    async with asyncio.timeout(1):
        await holding
    await replica.close()


async def test_a_source_that_its_capture_could_not_let_go_is_let_go_later(
    node: Node, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    replica, _ = ready_worker(node, tmp_path)
    start = ColdStart(node, order(OrderKind.COLD_START, capture=True), SPEC, replica)
    capture = Capture(node, order(OrderKind.CAPTURE))
    await capture.admit()
    holding = asyncio.create_task(start.hold())

    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patched:
        patched.setattr(ControlDirectory, "release", full)
        with pytest.raises(OSError, match="No space"):
            await capture.release_source()
    capture.finish(Result((), 0.0))
    assert not replica.released
    async with asyncio.timeout(1):
        await holding
    assert (tmp_path / "house/control" / control.RESTORE_COMPLETE).exists()
    await replica.close()


async def test_a_source_that_is_being_ended_is_not_let_go_however_long_that_takes(node: Node, tmp_path: Path) -> None:
    replica, _ = ready_worker(node, tmp_path)
    replica.ending = (Reason.CANCELLED, "by a cancel")
    start = ColdStart(node, order(OrderKind.COLD_START, capture=True), SPEC, replica)
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(3 * node.settings.release_after_s):
            await start.hold()
    assert not replica.released
    await replica.close()


async def test_a_cancel_that_comes_too_late_does_not_hide_why_a_replica_is_killed(
    node: Node, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    killing, refused = asyncio.Event(), asyncio.Event()
    replica, holder = ready_worker(node, tmp_path)
    monkeypatch.setattr(holder, "end", killing.set)
    node.note(replica, served=True)
    orders = Orders(node, lambda: None, on_end=lambda order, outcome: refused.set())
    orders.begin(order(OrderKind.KILL), SPEC)
    async with asyncio.timeout(1):
        await killing.wait()
        orders.begin(order(OrderKind.CANCEL), SPEC)
        await refused.wait()
        holder.exited.set_result(Exit(code=-signal.SIGKILL, at=1.0))
        ended = await replica.gone()
    assert ended.reason == Reason.CANCELLED, ended
    assert replica.kept_log is None
    await orders.stop()


@pytest.mark.parametrize("answer", [Reason.DISCOVERABLE_AT_CAPTURE, Reason.SERVER_UNREACHABLE])
async def test_a_worker_that_may_be_registered_is_not_frozen(node: Node, tmp_path: Path, answer: Reason) -> None:
    async def registered(port: int) -> bool:
        if answer is Reason.SERVER_UNREACHABLE:
            raise SnapshotError(answer, "nobody knows")
        return port == node.settings.rpc_ports[0]

    def not_reached(pid: int) -> list[object]:
        raise AssertionError("discovery is asked first")

    node.discoverable, node.guard = registered, not_reached
    replica, _ = ready_worker(node, tmp_path)
    capture = Capture(node, order(OrderKind.CAPTURE))
    await capture.admit()
    with pytest.raises(SnapshotError) as refused:
        await capture.inspect()
    assert refused.value.reason is answer
    await replica.close()


async def test_a_worker_that_a_killed_criu_left_stopped_runs_again(
    node: Node, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shm, "remove_links", lambda folder: None)  # this worker's /dev/shm is the host's
    replica, _ = ready_worker(node, tmp_path)
    worker = subprocess.Popen(["sleep", "60"])  # noqa: ASYNC220
    try:
        replica.pid = worker.pid
        worker.send_signal(signal.SIGSTOP)
        await asyncio.to_thread(os.waitid, os.P_PID, worker.pid, os.WSTOPPED)
        await settle(replica)
        flags = os.WCONTINUED | os.WNOHANG
        assert await asyncio.to_thread(os.waitid, os.P_PID, worker.pid, flags) is not None
    finally:
        worker.kill()
        worker.wait()
        await replica.close()


async def test_a_drain_that_meets_the_workers_end_is_done(node: Node, tmp_path: Path) -> None:
    replica, holder = ready_worker(node, tmp_path)
    draining = asyncio.create_task(node.drain(replica, 5))
    await asyncio.sleep(0)
    holder.exited.set_result(Exit(code=0, at=1.0))
    ended = await draining
    assert ended is not None
    assert ended.code == 0


async def test_without_inotify_a_replica_is_followed_all_the_same(
    node: Node, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(folder: Path) -> None:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    monkeypatch.setattr(watch, "DirectoryWatch", refused)
    monkeypatch.setattr(watch, "LOOK_S", 0.01)
    replica, holder = ready_worker(node, tmp_path)
    state = control.WorkerState(state="REGISTERED", since=1.0)
    (tmp_path / "house/control" / control.WORKER_STATE).write_text(state.to_json())
    async with asyncio.timeout(1):
        await replica.until(lambda: replica.state)
    holder.lost.set_result(None)
    async with asyncio.timeout(1):
        assert (await replica.gone()).reason == Reason.HOLDER_FAILED


async def test_a_restore_that_fails_while_it_takes_its_snapshot_leaves_nothing(
    node: Node, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    entered, go_on = threading.Event(), threading.Event()

    class Use:
        left = False

        def __enter__(self) -> Path:
            entered.set()
            go_on.wait(5)
            return tmp_path

        def __exit__(self, *_: object) -> None:
            assert go_on.is_set(), "it is still being taken"
            Use.left = True

    monkeypatch.setattr(node.store, "use", lambda snapshot_id: Use())
    monkeypatch.setattr(node.store, "check_unchanged", lambda snapshot_id: None)
    restore = Restore(node, order(OrderKind.RESTORE, snapshot_id="s"), SPEC)
    admitting = asyncio.create_task(restore.admit())
    await asyncio.to_thread(entered.wait, 5)
    asyncio.get_running_loop().call_later(0.02, go_on.set)
    with pytest.raises(SnapshotError, match="the model is not there"):
        await admitting
    await restore.give_back()
    assert Use.left
    assert node.replicas == {}
    assert node.ports.take() == node.settings.rpc_ports[0]


async def test_a_replica_that_cannot_be_noted_takes_no_port(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(entry: object) -> None:
        raise SnapshotError(Reason.DISK_FULL, "no space")

    with monkeypatch.context() as patched:
        patched.setattr(node.journal, "append", full)
        with pytest.raises(SnapshotError):
            node.admit(order(OrderKind.COLD_START), SPEC, Way.COLD_START)
    assert node.admit(order(OrderKind.COLD_START), SPEC, Way.COLD_START).record.rpc_port
