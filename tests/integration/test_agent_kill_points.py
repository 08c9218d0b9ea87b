"""The agent is killed with SIGKILL in every phase of every pipeline, and started again.

The points come from the phase table: a phase that is added is killed in, too, or the last test fails.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
from support.agent_host import AgentHost, MakeHost, criu_that, replica_of, toy_spec

from dynamo_snapshot.agent.cgroups import Cgroups
from dynamo_snapshot.agent.house import MARK
from dynamo_snapshot.agent.pipelines.phases import (
    CAPTURE,
    COLD_START,
    CRASH_ENV,
    PARK,
    PIPELINES,
    PREFETCH,
    RESTORE,
    WAKE,
)
from dynamo_snapshot.agent.process import marked_processes
from dynamo_snapshot.model import OrderKind, OrderStatus, Reason, ReplicaPhase, Reported
from dynamo_snapshot.snapshots.store import SnapshotStore

AT_ENTRY = [(pipeline, spec.name) for pipeline, specs in PIPELINES.items() for spec in specs]
IN_THE_MIDDLE = [
    (CAPTURE, "dump", 0.03), (CAPTURE, "publish", 0.005), (RESTORE, "restore", 0.04), (PARK, "restore", 0.04),
    (WAKE, "resume", 0.003),
]  # fmt: skip
SETTLED = (ReplicaPhase.REGISTERED, ReplicaPhase.PARKED, ReplicaPhase.EXITED)


def where(pipeline: str) -> list[str]:
    """The kill points of one pipeline, as the agent's drill names them."""
    points = [f"{name}.{phase}" for name, phase in AT_ENTRY if name == pipeline]
    return points + [f"{name}.{phase}+{delay}" for name, phase, delay in IN_THE_MIDDLE if name == pipeline]


@pytest.fixture(scope="module")
def shared_store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("kill-points") / "store"


@pytest.fixture
async def snapshot(make_host: MakeHost, shared_store: Path) -> str:
    """One snapshot for all restores of this module."""
    if not SnapshotStore(shared_store).list():
        host = make_host(store_dir=shared_store)
        host.start()
        await host.captured()
    return SnapshotStore(shared_store).list()[0].id


def command_name(pid: int) -> str:
    return Path(f"/proc/{pid}/comm").read_text().strip()


async def killed_and_restarted(host: AgentHost, point: str) -> None:
    assert await host.ended() == -signal.SIGKILL, f"the agent was not killed at {point}"
    host.start()


async def check_nothing_orphaned(host: AgentHost, orders: list[str]) -> Reported:
    """One outcome an order; every process, cgroup and house belongs to a living replica that is reported."""
    for order in orders:
        await host.outcome(order)
    living: set[str] = set()

    def settled(reported: Reported) -> bool:
        living.clear()
        living.update(one.replica_id for one in reported.replicas if one.phase is not ReplicaPhase.EXITED)
        return all(one.phase in SETTLED for one in reported.replicas)

    reported = await host.until(settled)
    assert len(reported.outcomes) == len({outcome.order_id for outcome in reported.outcomes}) == len(orders)
    replicas = host.runtime_dir / "replicas"
    assert set(host.houses()) == living
    served = {pid for name in living for pid in marked_processes(MARK, str(replicas / name))}
    assert set(marked_processes(MARK, f"{replicas}/", prefix=True)) == served
    assert {group.name for group in Cgroups(host.runtime_dir).existing()} <= living
    assert not {command_name(pid) for pid in served} & {"nsenter", "criu"}
    store = SnapshotStore(host.store_dir)
    assert [summary for summary in store.list() if not summary.admitted or summary.reason] == []
    assert not list(host.store_dir.glob(".staging/*"))
    return reported


@pytest.mark.parametrize("point", where(COLD_START))
async def test_killed_in_a_cold_start(make_host: MakeHost, point: str) -> None:
    host = make_host(release_after_s=0.1)
    host.start(**{CRASH_ENV: point})
    order = await host.order(OrderKind.COLD_START, "replica", capture=True)
    await killed_and_restarted(host, point)
    await check_nothing_orphaned(host, [order])
    outcome = await host.outcome(order)
    if point.endswith((".hold", ".resume")):
        assert outcome.status is OrderStatus.DONE, "a worker that has booted goes on"
    else:
        # Killed at the very end of its boot the worker may be ready by the time it is found.
        assert outcome.reason == Reason.AGENT_RESTARTED or point.endswith(".boot")
    assert (await host.outcome(await host.order(OrderKind.COLD_START, "next"))).status is OrderStatus.DONE


@pytest.mark.parametrize("point", where(CAPTURE))
async def test_killed_in_a_capture(make_host: MakeHost, point: str) -> None:
    host = make_host()
    host.start(**{CRASH_ENV: point})
    start = await host.order(OrderKind.COLD_START, "source", capture=True)
    ready = await host.replica("source", ReplicaPhase.READY_FOR_SNAPSHOT)
    capture = await host.order(OrderKind.CAPTURE, "source")
    await killed_and_restarted(host, point)
    outcome = await host.outcome(capture)
    if outcome.status is OrderStatus.DONE:  # a small snapshot may be published before the delay is over
        assert "+" in point
        assert [summary.id for summary in SnapshotStore(host.store_dir).list()] == [outcome.snapshot_id]
    else:
        assert outcome.reason == Reason.AGENT_RESTARTED
    # The capture is given up; a new one may be ordered while the source waits, or it goes on when none comes.
    source = next(r for r in (await host.until(lambda r: r.replicas)).replicas)
    orders = [start, capture]
    if source.phase is ReplicaPhase.READY_FOR_SNAPSHOT:
        orders.append(await host.order(OrderKind.CAPTURE, "source"))
        again = await host.outcome(orders[-1])
        assert again.status is OrderStatus.DONE, again
    reported = await check_nothing_orphaned(host, orders)
    assert (await host.outcome(start)).status is OrderStatus.DONE
    assert [(one.phase, one.pid) for one in reported.replicas] == [(ReplicaPhase.REGISTERED, ready.pid)]


@pytest.mark.parametrize("point", where(RESTORE))
async def test_killed_in_a_restore(make_host: MakeHost, snapshot: str, shared_store: Path, point: str) -> None:
    host = make_host(store_dir=shared_store)
    host.start(**{CRASH_ENV: point})
    order = await host.order(OrderKind.RESTORE, "clone", snapshot_id=snapshot)
    await killed_and_restarted(host, point)
    reported = await check_nothing_orphaned(host, [order])
    outcome = await host.outcome(order)
    if outcome.status is OrderStatus.DONE:  # it had served by the time it was found
        assert point == "restore.resume"
        assert [one.phase for one in reported.replicas] == [ReplicaPhase.REGISTERED]
    else:
        assert outcome.reason == Reason.AGENT_RESTARTED
        assert reported.replicas == ()
    again = await host.outcome(await host.order(OrderKind.RESTORE, "again", snapshot_id=snapshot))
    assert again.status is OrderStatus.DONE, again.message


@pytest.mark.parametrize("point", where(PARK))
async def test_killed_while_it_parks(make_host: MakeHost, snapshot: str, shared_store: Path, point: str) -> None:
    host = make_host(store_dir=shared_store)
    host.start(**{CRASH_ENV: point})
    order = await host.order(OrderKind.PARK, "spare", snapshot_id=snapshot)
    await killed_and_restarted(host, point)
    reported = await check_nothing_orphaned(host, [order])
    outcome = await host.outcome(order)
    if outcome.status is OrderStatus.DONE:  # it was parked by the time it was found
        assert point == "park.settle"
        assert [one.phase for one in reported.replicas] == [ReplicaPhase.PARKED]
        name = "spare"
    else:
        assert outcome.reason == Reason.AGENT_RESTARTED
        assert reported.replicas == ()
        name = "again"
        again = await host.outcome(await host.order(OrderKind.PARK, name, snapshot_id=snapshot))
        assert again.status is OrderStatus.DONE, again.message
    woken = await host.outcome(await host.order(OrderKind.WAKE, name))
    assert woken.status is OrderStatus.DONE, woken.message


@pytest.mark.parametrize("point", where(WAKE))
async def test_killed_in_a_wake(make_host: MakeHost, snapshot: str, shared_store: Path, point: str) -> None:
    host = make_host(store_dir=shared_store)
    host.start(**{CRASH_ENV: point})
    park = await host.order(OrderKind.PARK, "spare", snapshot_id=snapshot)
    parked = await host.replica("spare", ReplicaPhase.PARKED)
    await host.outcome(park)
    wake = await host.order(OrderKind.WAKE, "spare")
    await killed_and_restarted(host, point)
    reported = await check_nothing_orphaned(host, [park, wake])
    outcome = await host.outcome(wake)
    left = [(one.phase, one.pid) for one in reported.replicas]
    if outcome.status is OrderStatus.DONE:  # it had served by the time it was found
        assert "resume" in point
        assert left == [(ReplicaPhase.REGISTERED, parked.pid)]
        return
    assert outcome.reason == Reason.AGENT_RESTARTED
    if "resume" in point:  # it was let go, and did not serve
        assert left == []
        return
    assert left == [(ReplicaPhase.PARKED, parked.pid)], "it was never let go, so it is as good as before"
    again = await host.outcome(await host.order(OrderKind.WAKE, "spare"))
    assert again.status is OrderStatus.DONE, again.message
    assert (await host.replica("spare", ReplicaPhase.REGISTERED)).pid == parked.pid


@pytest.mark.parametrize("point", where(PREFETCH))
async def test_killed_in_a_prefetch(make_host: MakeHost, snapshot: str, shared_store: Path, point: str) -> None:
    host = make_host(store_dir=shared_store)
    host.start(**{CRASH_ENV: point})
    order = await host.order(OrderKind.PREFETCH, "prefetch-1", snapshot_id=snapshot)
    await killed_and_restarted(host, point)
    await check_nothing_orphaned(host, [order])
    assert (await host.outcome(order)).reason == Reason.AGENT_RESTARTED
    again = await host.outcome(await host.order(OrderKind.PREFETCH, "prefetch-2", snapshot_id=snapshot))
    assert again.status is OrderStatus.DONE, again.message


async def test_serving_replicas_are_adopted_and_followed(make_host: MakeHost) -> None:
    host = make_host()
    host.start()
    orders = [await host.order(OrderKind.COLD_START, name) for name in ("stays", "goes", "dies")]
    for order in orders:
        await host.outcome(order)
    before = {r.replica_id: r for r in (await host.until(lambda r: len(r.replicas) == 3)).replicas}
    await host.stop(signal.SIGKILL)
    dead = before["dies"].pid
    assert dead is not None
    os.kill(dead, signal.SIGTERM)
    host.start()
    reported = await host.until(
        lambda r: {o.phase for o in r.replicas} >= {ReplicaPhase.EXITED, ReplicaPhase.REGISTERED}
    )
    after = {replica.replica_id: replica for replica in reported.replicas}
    assert {name: (r.pid, r.incarnation, r.rpc_port) for name, r in after.items() if name != "dies"} == {
        name: (r.pid, r.incarnation, r.rpc_port) for name, r in before.items() if name != "dies"
    }
    missed = await host.replica("dies", ReplicaPhase.EXITED)
    assert missed.exit is not None
    assert missed.exit.code == 0, "its holder kept how it ended"
    drained = await host.outcome(await host.order(OrderKind.DRAIN, "goes"))
    assert drained.status is OrderStatus.DONE
    left = await host.replica("goes", ReplicaPhase.EXITED)
    assert left.exit is not None
    assert left.exit.code == 0
    assert len([o for o in (await host.until(lambda r: True)).outcomes if o.order_id in orders]) == 3


def parent_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2].split()[1])


async def test_a_serving_replica_whose_holder_is_silent_is_not_called_dead(make_host: MakeHost) -> None:
    host = make_host()
    host.start()
    await host.outcome(await host.order(OrderKind.COLD_START, "serves"))
    worker = (await host.replica("serves", ReplicaPhase.REGISTERED)).pid
    assert worker is not None
    holder = parent_of(worker)
    await host.stop(signal.SIGKILL)
    os.kill(holder, signal.SIGSTOP)
    try:
        host.start()
        later = await host.outcome(await host.order(OrderKind.COLD_START, "later"))
        assert later.status is OrderStatus.DONE
        found = replica_of(await host.until(lambda r: replica_of(r, "serves")), "serves")
        assert found is not None
        assert found.phase is ReplicaPhase.REGISTERED
    finally:
        os.kill(holder, signal.SIGCONT)
    drained = await host.outcome(await host.order(OrderKind.DRAIN, "serves"))
    assert drained.status is OrderStatus.DONE


async def test_an_agent_that_is_stopped_leaves_serving_replicas_and_ends_others(make_host: MakeHost) -> None:
    host = make_host()
    host.start()
    await host.outcome(await host.order(OrderKind.COLD_START, "serves"))
    host.spec = toy_spec(flaw="never_register")
    pending = await host.order(OrderKind.COLD_START, "pending")
    await host.replica("pending", ReplicaPhase.RESUMING)
    assert await host.stop() == 0
    assert host.houses() == ["serves"]
    host.start()
    assert (await host.outcome(pending)).reason == Reason.AGENT_RESTARTED
    assert (await host.replica("serves", ReplicaPhase.REGISTERED)).exit is None


async def test_an_agent_that_is_stopped_lets_a_capture_end(make_host: MakeHost, tmp_path: Path, criu: Path) -> None:
    host = make_host(criu=criu_that(tmp_path, criu, "dump", "sleep 0.4"))
    host.start()
    start = await host.order(OrderKind.COLD_START, "source", capture=True)
    await host.replica("source", ReplicaPhase.READY_FOR_SNAPSHOT)
    capture = await host.order(OrderKind.CAPTURE, "source")
    await host.replica("source", ReplicaPhase.CAPTURING)
    assert await host.stop() == 0
    host.start()
    outcome = await host.outcome(capture)
    assert outcome.status is OrderStatus.DONE
    assert [summary.id for summary in SnapshotStore(host.store_dir).list()] == [outcome.snapshot_id]
    await host.outcome(start)


def test_every_phase_has_a_kill_point() -> None:
    drills: dict[str, Callable[..., object]] = {
        COLD_START: test_killed_in_a_cold_start,
        CAPTURE: test_killed_in_a_capture,
        RESTORE: test_killed_in_a_restore,
        PARK: test_killed_while_it_parks,
        WAKE: test_killed_in_a_wake,
        PREFETCH: test_killed_in_a_prefetch,
    }
    assert set(drills) == set(PIPELINES)
    for pipeline, drill in drills.items():
        marks = drill.pytestmark  # type: ignore[attr-defined]  # pytest puts it on what it parametrizes
        points = {point for mark in marks for point in mark.args[1]}
        assert points >= {f"{pipeline}.{spec.name}" for spec in PIPELINES[pipeline]}
