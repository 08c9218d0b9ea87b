"""A worker with a rank on each GPU of this machine, all of it one artifact; some of it needs two GPUs."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from gpu import ranks as subject

from dynamo_snapshot.agent.cuda.driver import CheckpointDriver
from dynamo_snapshot.agent.direct import Direct, one_replica
from dynamo_snapshot.agent.teardown import left_behind
from dynamo_snapshot.config import Agent
from dynamo_snapshot.errors import SnapshotError
from dynamo_snapshot.local.bench_gpu import RestoreSeries, Series
from dynamo_snapshot.local.bench_subjects import Subject
from dynamo_snapshot.model import OrderKind, Reason, ReplicaPhase, WorkerSpec

RESULTS_ENV = "DYNAMO_SNAPSHOT_RANKS_RESULTS"
WITHIN_S = 120.0
GIB = 1 << 30


@pytest.fixture
def gpus(driver: CheckpointDriver) -> int:
    return len(driver.inventory().devices)


@pytest.fixture
def two(gpus: int) -> int:
    if gpus < 2:
        pytest.skip("needs two GPUs")
    return 2


def worker(ranks: int, *arguments: str) -> WorkerSpec:
    command = (sys.executable, subject.__file__, "--ranks", str(ranks), *arguments)
    return WorkerSpec(command=command, gpus=ranks, boot_timeout_s=WITHIN_S)


@pytest.fixture
async def nodes(tmp_path: Path, criu_path: Path) -> AsyncIterator[Any]:
    """Returns a function that gives a node of its own to one worker."""

    def node(spec: WorkerSpec) -> Any:
        settings = Agent(
            criu=criu_path, minimum_free_bytes=0, runtime_dir=tmp_path / "run", store_dir=tmp_path / "store"
        )
        return one_replica(settings, "ranks", spec, lambda text: None)

    yield node
    assert left_behind(tmp_path / "run") == []


async def captured(direct: Direct) -> str:
    start = direct.begin(OrderKind.COLD_START, WITHIN_S, capture=True)
    assert await direct.waits_for_capture(start)
    outcome = await direct.done(direct.begin(OrderKind.CAPTURE, WITHIN_S))
    assert outcome.snapshot_id is not None
    await direct.done(start)
    return outcome.snapshot_id


def answer(direct: Direct) -> str:
    assert direct.replica is not None
    assert direct.replica.state is not None
    return direct.replica.state.evidence["answer"]


def test_every_restore_gives_the_right_all_reduce(tmp_path: Path, criu_path: Path, gpus: int) -> None:
    ranks = Subject("torch", f"{gpus}ranks", lambda detached, segments: worker(gpus), 0)
    made = RestoreSeries(tmp_path, Agent(criu=criu_path, minimum_free_bytes=0, standby_houses=1), lambda text: None)
    row = asyncio.run(made.measure(Series(ranks, "prefetched", 5)))
    if named := os.environ.get(RESULTS_ENV):
        Path(named).write_text(json.dumps(row, indent=1) + "\n")
    assert row["errors"] == []
    assert len(row["answers"]) == 1
    assert len(row["gpus"]) == gpus
    assert left_behind(tmp_path / "run") == []


async def test_ranks_come_back_on_each_other_s_gpu(nodes: Any, monkeypatch: pytest.MonkeyPatch, two: int) -> None:
    async with nodes(worker(two)) as direct:
        snapshot = await captured(direct)
        expected, before = answer(direct), await _used(direct)
        await direct.remove()
        assign = direct.node.assign_gpus
        monkeypatch.setattr(
            direct.node, "assign_gpus", lambda *given, **options: tuple(reversed(assign(*given, **options)))
        )
        await direct.done(direct.begin(OrderKind.RESTORE, WITHIN_S, snapshot_id=snapshot))
        assert answer(direct) == expected
        first, second = await _used(direct)
        assert before[1] - before[0] > GIB // 2
        assert first - second > GIB // 2


async def test_a_capture_with_a_live_communicator_is_refused(nodes: Any, two: int) -> None:
    async with nodes(worker(two, "--keep")) as direct:
        start = direct.begin(OrderKind.COLD_START, WITHIN_S, capture=True)
        assert await direct.waits_for_capture(start)
        with pytest.raises(SnapshotError, match="NCCL communicator") as refused:
            await direct.done(direct.begin(OrderKind.CAPTURE, WITHIN_S))
        assert refused.value.reason is Reason.COLLECTIVE_ALIVE
        await direct.done(start)
        assert direct.replica is not None
        assert direct.replica.phase is ReplicaPhase.REGISTERED
        assert answer(direct)


async def _used(direct: Direct) -> list[int]:
    assert direct.node.gpus is not None
    inventory = await direct.node.gpus.driver.inventory()
    return [device.total_bytes - (device.free_bytes or 0) for device in inventory.devices]
