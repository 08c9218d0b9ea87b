"""The agent is killed in every phase around a worker's GPU: its source runs on, and nobody's GPU memory is kept."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.agent_host import AgentHost, MakeHost, replica_of
from test_agent_gpu import gpu_host, gpu_spec, held_by_loaders, script, state_of
from test_agent_kill_points import check_nothing_orphaned, killed_and_restarted

from dynamo_snapshot.agent.cuda.driver import CudaState
from dynamo_snapshot.agent.cuda.fake import SCRIPT_ENV
from dynamo_snapshot.agent.pipelines.phases import CAPTURE, CRASH_ENV, PARK, PIPELINES, RESTORE, WAKE
from dynamo_snapshot.model import OrderKind, OrderStatus, Reason, ReplicaPhase
from dynamo_snapshot.snapshots.store import SnapshotStore

IN_THE_MIDDLE = [
    "capture.freeze+0.05",
    "capture.freeze+0.4",
    "capture.thaw+0.2",
    "restore.load+0.01",
    "restore.load+0.05",
    "restore.thaw+0.1",
    "park.thaw+0.1",
    "wake.load+0.01",
    "wake.load+0.05",
]
CHECKPOINT_S = 0.3
"""What the driver's checkpoint and restore of a toy take, so that the agent can die during them."""


def points(pipeline: str, first: str) -> list[str]:
    """From the first phase that is about GPUs on."""
    names = [spec.name for spec in PIPELINES[pipeline]]
    entered = [f"{pipeline}.{name}" for name in names[names.index(first) :]]
    return entered + [point for point in IN_THE_MIDDLE if point.startswith(f"{pipeline}.")]


@pytest.fixture(scope="module")
def shared_store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("gpu-kill-points") / "store"


@pytest.fixture
def host(make_host: MakeHost, monkeypatch: pytest.MonkeyPatch, shared_store: Path) -> AgentHost:
    made = gpu_host(make_host, shared_store)
    made.spec = gpu_spec(takes_s=CHECKPOINT_S)
    monkeypatch.setenv(SCRIPT_ENV, script(made))  # of every agent that it starts
    return made


@pytest.fixture
async def snapshot(make_host: MakeHost, host: AgentHost, shared_store: Path) -> str:
    """One snapshot for all restores of this module."""
    if not SnapshotStore(shared_store).list():
        first = gpu_host(make_host, shared_store)
        first.spec = host.spec
        first.start()
        await first.captured()
    return SnapshotStore(shared_store).list()[0].id


@pytest.mark.parametrize("point", points(CAPTURE, "freeze"))
async def test_killed_in_a_capture(host: AgentHost, point: str) -> None:
    host.start(**{CRASH_ENV: point})
    start = await host.order(OrderKind.COLD_START, "source", capture=True)
    ready = await host.replica("source", ReplicaPhase.READY_FOR_SNAPSHOT)
    capture = await host.order(OrderKind.CAPTURE, "source")
    await killed_and_restarted(host, point)
    assert (await host.outcome(capture)).reason == Reason.AGENT_RESTARTED
    source = next(r for r in (await host.until(lambda r: r.replicas)).replicas)
    orders = [start, capture]
    if source.phase is ReplicaPhase.READY_FOR_SNAPSHOT:
        orders.append(await host.order(OrderKind.CAPTURE, "source"))
        again = await host.outcome(orders[-1])
        assert again.status is OrderStatus.DONE, again
    reported = await check_nothing_orphaned(host, orders)
    assert (await host.outcome(start)).status is OrderStatus.DONE
    assert [(one.phase, one.pid) for one in reported.replicas] == [(ReplicaPhase.REGISTERED, ready.pid)]
    assert state_of(reported.replicas[0]) == CudaState.RUNNING


@pytest.mark.parametrize("point", points(RESTORE, "load"))
async def test_killed_in_a_restore(host: AgentHost, snapshot: str, point: str) -> None:
    host.start(**{CRASH_ENV: point})
    order = await host.order(OrderKind.RESTORE, "clone", snapshot_id=snapshot)
    await killed_and_restarted(host, point)
    outcome = await host.outcome(order)
    if outcome.status is OrderStatus.DONE:  # it had served by the time it was found
        assert point == "restore.resume"
    else:
        assert outcome.reason == Reason.AGENT_RESTARTED
        assert "clone" not in host.houses()
    again = await host.outcome(await host.order(OrderKind.RESTORE, "again", snapshot_id=snapshot))
    assert again.status is OrderStatus.DONE, again.message
    assert held_by_loaders(host) == []


@pytest.mark.parametrize("point", [*points(PARK, "thaw"), *points(WAKE, "load")])
async def test_killed_while_it_parks_or_wakes(host: AgentHost, snapshot: str, point: str) -> None:
    host.start(**{CRASH_ENV: point})
    order = await host.order(OrderKind.PARK, "spare", snapshot_id=snapshot)
    if point.startswith(WAKE):
        await host.outcome(order)
        order = await host.order(OrderKind.WAKE, "spare")
    await killed_and_restarted(host, point)
    outcome = await host.outcome(order)
    assert outcome.status is OrderStatus.DONE or outcome.reason == Reason.AGENT_RESTARTED
    left = replica_of(await host.until(lambda r: outcome in r.outcomes), "spare")
    name = "spare"
    if left is None or left.phase is not ReplicaPhase.PARKED:
        name = "again"
        assert (await host.outcome(await host.order(OrderKind.PARK, name, snapshot_id=snapshot))).reason is None
    woken = await host.outcome(await host.order(OrderKind.WAKE, name))
    assert woken.status is OrderStatus.DONE, woken.message
    assert held_by_loaders(host) == []
