"""The CUDA helper as a process of its own: it answers, survives errors, and its death has a reason."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import msgspec
import pytest

from dynamo_snapshot.agent.cuda.client import FAKE_DRIVER, CudaHelper
from dynamo_snapshot.agent.cuda.driver import CudaState, Operation
from dynamo_snapshot.agent.cuda.fake import H200, SCRIPT_ENV, FakeProcess, Script
from dynamo_snapshot.agent.cuda.tree import cuda_processes, freeze, thaw
from dynamo_snapshot.errors import SnapshotError
from dynamo_snapshot.model import Reason

Start = Callable[..., CudaHelper]


@pytest.fixture
async def start(tmp_path: Path) -> AsyncIterator[Start]:
    """Returns a function that makes a helper whose driver knows the given processes."""
    made: list[CudaHelper] = []

    def make(processes: dict[int, FakeProcess] | None = None, driver: str = FAKE_DRIVER) -> CudaHelper:
        script = tmp_path / "script.json"
        script.write_bytes(msgspec.json.encode(Script(processes=processes or {})))
        helper = CudaHelper(tmp_path / "helper.log", driver, {**os.environ, SCRIPT_ENV: str(script)})
        made.append(helper)
        return helper

    yield make
    for helper in made:
        await helper.close()


async def test_a_tree_is_frozen_and_thawed_through_it(start: Start) -> None:
    helper = start({10: FakeProcess(), 12: FakeProcess()})
    pids = list(await cuda_processes(helper, [10, 11, 12]))
    await freeze(helper, pids, 1000)
    assert await cuda_processes(helper, pids) == dict.fromkeys([10, 12], CudaState.CHECKPOINTED)
    await thaw(helper, pids, {"GPU-a": "GPU-b"})
    assert set((await cuda_processes(helper, pids)).values()) == {CudaState.RUNNING}
    assert (await helper.inventory()).devices == (H200,)


async def test_it_survives_errors(start: Start) -> None:
    helper = start({10: FakeProcess(busy_ms=50)})
    with pytest.raises(SnapshotError) as failed:
        await helper.lock(10, 1)
    assert failed.value.reason is Reason.CUDA_LOCK_TIMEOUT
    assert failed.value.remedy
    with pytest.raises(SnapshotError, match="above 0 ms"):
        await helper.lock(10, 0)
    pid = helper.pid
    assert await helper.state(10) is CudaState.RUNNING
    assert helper.pid == pid


async def test_calls_run_side_by_side(start: Start) -> None:
    helper = start({pid: FakeProcess(state=CudaState.CHECKPOINTED, takes_s=0.3) for pid in range(8)})
    await helper.inventory()
    began = asyncio.get_running_loop().time()
    await thaw(helper, range(8))
    assert asyncio.get_running_loop().time() - began < 1.2


async def test_a_killed_helper_has_a_reason_and_is_started_again(start: Start) -> None:
    helper = start({10: FakeProcess(state=CudaState.LOCKED, takes_s=30)})
    assert await helper.state(10) is CudaState.LOCKED
    first = helper.pid
    assert first is not None
    slow = asyncio.create_task(helper.checkpoint(10))
    await asyncio.sleep(0)
    assert await helper.state(10) is CudaState.LOCKED
    os.kill(first, signal.SIGKILL)
    with pytest.raises(SnapshotError, match="ended with -9") as died:
        await slow
    assert died.value.reason is Reason.CUDA_HELPER_DIED
    assert await helper.state(10) is CudaState.LOCKED
    assert helper.pid not in (None, first)


async def test_a_crashing_driver_takes_only_the_helper(start: Start) -> None:
    helper = start({10: FakeProcess(kills_helper=Operation.LOCK)})
    with pytest.raises(SnapshotError, match="ended with 139") as died:
        await helper.lock(10, 1000)
    assert died.value.reason is Reason.CUDA_HELPER_DIED
    assert await helper.state(10) is CudaState.RUNNING


async def test_without_a_driver_every_call_says_so(start: Start) -> None:
    helper = start(driver="dynamo_snapshot.agent.cuda.bindings:open_driver")
    for _ in range(2):
        with pytest.raises(SnapshotError) as missing:
            await helper.inventory()
        assert missing.value.reason is Reason.CUDA_MISSING


async def test_a_helper_that_cannot_start_says_why(start: Start) -> None:
    with pytest.raises(SnapshotError, match="No module named 'nowhere'") as died:
        await start(driver="nowhere:open_driver").inventory()
    assert died.value.reason is Reason.CUDA_HELPER_DIED


async def test_it_ends_when_its_agent_has_gone(start: Start) -> None:
    helper = start()
    await helper.inventory()
    pid = helper.pid
    assert pid is not None
    await helper.close()
    assert helper.pid is None
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)
