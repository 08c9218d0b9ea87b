"""What goes wrong during a capture or a restore: the source serves on, nothing is selectable, nothing runs on."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from support.agent_host import AgentHost, MakeHost, criu_that, toy_spec
from support.watching import wait_until

from dynamo_snapshot.agent.process import children
from dynamo_snapshot.agent.teardown import left_behind
from dynamo_snapshot.model import OrderKind, OrderStatus, Outcome, Reason, ReplicaPhase
from dynamo_snapshot.snapshots.store import SnapshotStore


async def capture_fails(host: AgentHost) -> Outcome:
    """Orders a capture; asserts that it failed and that all is as if it had never been ordered."""
    start = await host.order(OrderKind.COLD_START, "source", capture=True)
    ready = await host.replica("source", ReplicaPhase.READY_FOR_SNAPSHOT)
    outcome = await host.outcome(await host.order(OrderKind.CAPTURE, "source"))
    assert outcome.status is OrderStatus.FAILED
    assert outcome.snapshot_id is None
    assert (await host.outcome(start)).status is OrderStatus.DONE
    source = await host.replica("source", ReplicaPhase.REGISTERED)
    assert source.pid == ready.pid
    assert source.incarnation == ready.incarnation, "the same life goes on"
    store = SnapshotStore(host.store_dir)
    assert store.list() == []
    assert not list(host.store_dir.glob(".staging/*"))
    assert criu_processes(host) == []
    assert not list((host.runtime_dir / "replicas/source").glob("**/link_remap*"))
    return outcome


async def restore_fails(host: AgentHost, snapshot: str) -> Outcome:
    """Orders a restore; asserts that it failed and left nothing of itself."""
    outcome = await host.outcome(await host.order(OrderKind.RESTORE, "clone", snapshot_id=snapshot))
    assert outcome.status is OrderStatus.FAILED
    assert not (host.runtime_dir / "replicas/clone").exists()
    assert criu_processes(host) == []
    reported = await host.until(lambda r: True)
    assert [replica.replica_id for replica in reported.replicas] == ["source"]
    assert not SnapshotStore(host.store_dir).in_use(snapshot)
    return outcome


def criu_processes(host: AgentHost) -> list[int]:
    """What still runs of any CRIU call: the agent's children that are no house."""
    return [
        pid for pid in children(host.pid) if b"unshare" not in Path(f"/proc/{pid}/cmdline").read_bytes()
    ]  # fmt: skip


@pytest.fixture
def small_store(tmp_path: Path) -> Iterator[Path]:
    store = tmp_path / "small"
    store.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64m", "tmpfs", str(store)], check=True)
    yield store
    subprocess.run(["umount", str(store)], check=True)


async def test_capture_without_space_is_refused_before_the_dump(make_host: MakeHost, small_store: Path) -> None:
    host = make_host(store_dir=small_store)
    host.spec = toy_spec(memory_mib=80)
    host.start()
    outcome = await capture_fails(host)
    assert outcome.reason == Reason.DISK_FULL
    assert "stage" in [phase.name for phase in outcome.phases]
    assert "dump" not in [phase.name for phase in outcome.phases]


async def test_disk_that_fills_up_during_the_dump(make_host: MakeHost, small_store: Path, criu: Path) -> None:
    fill = f"head -c 70000000 /dev/zero >{small_store}/ballast 2>/dev/null"
    host = make_host(store_dir=small_store, criu=criu_that(small_store.parent, criu, "dump", fill))
    host.start()
    outcome = await capture_fails(host)
    assert outcome.reason == Reason.DISK_FULL
    assert outcome.phases[-1].name == "dump"


async def test_what_the_guard_finds_is_named_before_the_dump(make_host: MakeHost) -> None:
    host = make_host()
    host.spec = toy_spec(flaw="io_uring")
    host.start()
    outcome = await capture_fails(host)
    assert outcome.reason == Reason.WORKER_NOT_READY
    assert outcome.phases[-1].name == "inspect"
    assert "io_uring" in outcome.message


async def test_what_only_criu_refuses_is_named_in_its_words(make_host: MakeHost) -> None:
    host = make_host()
    host.spec = toy_spec(flaw="tcp")  # a pair with both ends in the tree passes the guard
    host.start()
    outcome = await capture_fails(host)
    assert outcome.reason == Reason.CRIU_DUMP_FAILED
    assert "Connected TCP socket" in outcome.message


async def test_criu_that_hangs_in_a_dump_is_killed(make_host: MakeHost, tmp_path: Path, criu: Path) -> None:
    host = make_host(criu=criu_that(tmp_path, criu, "dump", "sleep 600"), deadlines={"dump_s": 0.4})
    host.start()
    outcome = await capture_fails(host)
    assert outcome.reason == Reason.PHASE_TIMED_OUT
    assert "dump" in outcome.message


async def test_criu_that_is_killed_in_the_middle_of_a_dump(make_host: MakeHost, tmp_path: Path, criu: Path) -> None:
    host = make_host(criu=criu_that(tmp_path, criu, "dump", "kill -9 $$"))
    host.start()
    outcome = await capture_fails(host)
    assert outcome.reason == Reason.CRIU_DUMP_FAILED
    assert "signal 9" in outcome.message or "137" in outcome.message


@pytest.mark.parametrize(
    ("does", "reason"), [("sleep 600", Reason.PHASE_TIMED_OUT), ("exit 3", Reason.CRIU_RESTORE_FAILED)]
)
async def test_criu_that_cannot_restore(
    make_host: MakeHost, tmp_path: Path, criu: Path, does: str, reason: Reason
) -> None:
    host = make_host(criu=criu_that(tmp_path, criu, "restore", does), deadlines={"restore_s": 2})
    host.start()
    outcome = await restore_fails(host, await host.captured())
    assert outcome.reason == reason
    assert outcome.phases[-1].name == "restore"


async def test_worker_that_refuses_its_new_identity(make_host: MakeHost) -> None:
    host = make_host()
    host.start()
    snapshot = await host.captured()
    host.spec = msgspec.structs.replace(host.spec, incarnation_environment={"TOY_REFUSE": "1"})
    outcome = await restore_fails(host, snapshot)
    assert outcome.reason == "restore_context_invalid", "the worker's own, as in its replica's exit"
    assert "told to refuse" in outcome.message


async def test_damaged_and_unfit_snapshots_are_refused_before_criu(make_host: MakeHost) -> None:
    host = make_host()
    host.start()
    snapshot = await host.captured()
    fit = host.spec
    host.spec = toy_spec(memory_mib=5)
    unfit = await restore_fails(host, snapshot)
    assert unfit.reason == Reason.SNAPSHOT_INCOMPATIBLE
    assert "TOY_MEMORY_MIB" in unfit.message
    host.spec = fit
    pages = next((host.store_dir / snapshot / "images").glob("pages-*.img"))
    os.truncate(pages, 4096)
    damaged = await restore_fails(host, snapshot)
    assert damaged.reason == Reason.SNAPSHOT_CORRUPT
    assert pages.name in damaged.message
    assert damaged.finished_at - damaged.started_at < 1
    missing = await restore_fails(host, snapshot[:-1] + "0" if not snapshot.endswith("0") else snapshot[:-1] + "1")
    assert missing.reason == Reason.SNAPSHOT_MISSING
    for outcome in (unfit, damaged, missing):
        assert "house" not in [phase.name for phase in outcome.phases]


async def test_a_worker_that_was_not_started_for_a_capture_is_not_captured(make_host: MakeHost) -> None:
    host = make_host()
    host.start()
    await host.outcome(await host.order(OrderKind.COLD_START, "source"))
    outcome = await host.outcome(await host.order(OrderKind.CAPTURE, "source"))
    assert outcome.reason == Reason.WORKER_NOT_READY
    assert (await host.replica("source", ReplicaPhase.REGISTERED)).pid is not None
    unknown = await host.outcome(await host.order(OrderKind.CAPTURE, "nobody"))
    assert unknown.reason == Reason.UNKNOWN_REPLICA


async def test_a_full_node_refuses(make_host: MakeHost) -> None:
    host = make_host(max_replicas=1)
    host.start()
    await host.outcome(await host.order(OrderKind.COLD_START, "first"))
    outcome = await host.outcome(await host.order(OrderKind.COLD_START, "second"))
    assert outcome.reason == Reason.NODE_AT_CAPACITY


@pytest.mark.parametrize("kind", [OrderKind.CANCEL, OrderKind.KILL, OrderKind.DRAIN])
async def test_a_replica_that_is_being_captured_can_be_ended(
    make_host: MakeHost, tmp_path: Path, criu: Path, kind: OrderKind
) -> None:
    begun = tmp_path / "begun"
    host = make_host(criu=criu_that(tmp_path, criu, "dump", f"touch {begun}; sleep 20"))
    host.start()
    start = await host.order(OrderKind.COLD_START, "source", capture=True)
    await host.replica("source", ReplicaPhase.READY_FOR_SNAPSHOT)
    capture = await host.order(OrderKind.CAPTURE, "source")
    await wait_until(tmp_path, lambda: begun.exists() or None)
    assert (await host.outcome(await host.order(kind, "source"))).status is OrderStatus.DONE
    assert (await host.outcome(capture)).status is OrderStatus.CANCELLED
    assert (await host.outcome(start)).status is OrderStatus.CANCELLED
    assert left_behind(host.runtime_dir) == []
    assert not list(host.store_dir.glob(".staging/*"))


async def test_a_source_that_dies_while_it_is_captured_is_the_reason(
    make_host: MakeHost, tmp_path: Path, criu: Path
) -> None:
    begun = tmp_path / "begun"
    host = make_host(criu=criu_that(tmp_path, criu, "dump", f"touch {begun}; sleep 0.5"))
    host.start()
    start = await host.order(OrderKind.COLD_START, "source", capture=True)
    worker = (await host.replica("source", ReplicaPhase.READY_FOR_SNAPSHOT)).pid
    assert worker is not None
    capture = await host.order(OrderKind.CAPTURE, "source")
    await wait_until(tmp_path, lambda: begun.exists() or None)
    os.kill(worker, signal.SIGKILL)
    for order in (capture, start):
        outcome = await host.outcome(order)
        assert outcome.status is OrderStatus.FAILED
        assert outcome.reason == Reason.WORKER_EXITED, outcome.message
    assert SnapshotStore(host.store_dir).list() == []
    assert left_behind(host.runtime_dir) == []
