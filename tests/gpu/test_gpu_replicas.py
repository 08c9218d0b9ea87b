"""Several replicas on one GPU, by an agent as a process of its own: clones at once, models one after the other."""

from __future__ import annotations

import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest
from gpu.rig import ENGINE
from support.agent_host import POOL, AgentHost

from dynamo_snapshot.agent.teardown import left_behind, teardown
from dynamo_snapshot.model import OrderKind, OrderStatus, ReplicaPhase, ReplicaReport, WorkerSpec
from worker_hooks import holder

BOOT_S = 90.0
"""torch is imported, and a CUDA context is made."""


def torch_spec(gib: float, store: Path) -> WorkerSpec:
    """The torch reference engine."""
    arguments = ("--house", holder.HOUSE, "--weights-gib", f"{gib:g}", "--segments", str(store / ".segments"))
    return WorkerSpec(command=(sys.executable, str(ENGINE), *arguments), gpus=1)


@pytest.fixture
async def host(tmp_path: Path, criu_path: Path, free_port: Callable[[], int]) -> AsyncIterator[AgentHost]:
    gpu = {"replicas_per_gpu": 4}
    made = AgentHost(tmp_path, free_port(), criu=str(criu_path), gpu=gpu)
    made.spec = torch_spec(1, made.store_dir)
    made.start()
    yield made
    if made.is_running():
        await made.stop()
    await teardown(made.runtime_dir)
    assert left_behind(made.runtime_dir) == []


async def restored(host: AgentHost, snapshot: str, *names: str, pool: str = POOL) -> list[ReplicaReport]:
    """Restores ``names`` at the same time; returns them once all serve."""
    orders = [await host.order(OrderKind.RESTORE, name, pool=pool, snapshot_id=snapshot) for name in names]
    for order in orders:
        outcome = await host.outcome(order, 60)
        assert outcome.status is OrderStatus.DONE, outcome
    return [await host.replica(name, ReplicaPhase.REGISTERED) for name in names]


async def end(host: AgentHost, *names: str) -> None:
    for name in names:
        await host.outcome(await host.order(OrderKind.KILL, name))
        await host.replica(name, ReplicaPhase.EXITED)


def answers(replicas: list[ReplicaReport]) -> set[str]:
    return {replica.evidence["answer"] for replica in replicas}


async def test_two_clones_and_their_source_serve_at_once(host: AgentHost) -> None:
    snapshot = await host.captured(within_s=BOOT_S)
    source = await host.replica("source", ReplicaPhase.REGISTERED)
    replicas = [source, *await restored(host, snapshot, "one", "two")]
    for distinct in ("incarnation", "rpc_port", "pid"):
        assert len({getattr(replica, distinct) for replica in replicas}) == 3
    assert len(answers(replicas)) == 1
    assert [replica.evidence["weights"] for replica in replicas[1:]] == ["by_loader=1"] * 2


async def test_two_models_are_restored_one_after_the_other_and_side_by_side(host: AgentHost) -> None:
    host.others["other"] = torch_spec(2, host.store_dir)
    first = await host.captured("first-source", within_s=BOOT_S)
    expected_first = answers([await host.replica("first-source", ReplicaPhase.REGISTERED)])
    await end(host, "first-source")
    second = await host.captured("second-source", pool="other", within_s=BOOT_S)
    expected_second = answers([await host.replica("second-source", ReplicaPhase.REGISTERED)])
    await end(host, "second-source")
    assert expected_first != expected_second

    assert answers(await restored(host, first, "a")) == expected_first
    await end(host, "a")
    assert answers(await restored(host, second, "b", pool="other")) == expected_second
    assert answers(await restored(host, first, "c")) == expected_first
    await end(host, "b", "c")
