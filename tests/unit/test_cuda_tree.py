"""A tree is frozen whole or runs on, whatever fails and whenever it is given up."""

from __future__ import annotations

import asyncio
import os

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.cuda_fakes import InProcess

from dynamo_snapshot.agent.cuda.driver import CudaState, Operation
from dynamo_snapshot.agent.cuda.fake import FakeProcess
from dynamo_snapshot.agent.cuda.tree import cuda_processes, freeze, thaw
from dynamo_snapshot.errors import SnapshotError
from dynamo_snapshot.model import Reason

PIDS = [10, 11, 12]


def tree(**changes: FakeProcess) -> InProcess:
    return InProcess(**({"p10": FakeProcess(), "p11": FakeProcess(), "p12": FakeProcess()} | changes))


def states(driver: InProcess) -> set[CudaState]:
    return {process.state for process in driver.fake.script.processes.values()}


async def test_all_are_locked_before_any_is_checkpointed() -> None:
    driver = tree()
    await freeze(driver, PIDS, 1000)
    assert states(driver) == {CudaState.CHECKPOINTED}
    assert [operation for operation, _ in driver.fake.calls] == [Operation.LOCK] * 3 + [Operation.CHECKPOINT] * 3


async def test_a_frozen_tree_comes_back_onto_the_mapped_gpus() -> None:
    driver = tree()
    await freeze(driver, PIDS, 1000)
    await thaw(driver, PIDS, {"GPU-a": "GPU-b"})
    assert states(driver) == {CudaState.RUNNING}
    assert all(p.restored_onto == {"GPU-a": "GPU-b"} for p in driver.fake.script.processes.values())


async def test_processes_without_cuda_are_left_out() -> None:
    assert await cuda_processes(tree(), [9, *PIDS]) == dict.fromkeys(PIDS, CudaState.RUNNING)


async def test_a_probe_that_fails_is_an_error_unless_the_process_has_gone() -> None:
    unknown = FakeProcess(answers={Operation.STATE: "CUDA_ERROR_OPERATING_SYSTEM"})
    alive, gone = os.getpid(), 1 << 22  # above the highest pid that Linux gives
    with pytest.raises(SnapshotError) as failed:
        await cuda_processes(tree(**{f"p{alive}": unknown}), [10, alive])
    assert failed.value.reason is Reason.CUDA_PROBE_FAILED
    assert await cuda_processes(tree(**{f"p{gone}": unknown}), [10, gone]) == {10: CudaState.RUNNING}


async def test_a_lock_time_out_leaves_all_running_and_none_checkpointed() -> None:
    driver = tree(p12=FakeProcess(busy_ms=2))
    with pytest.raises(SnapshotError) as failed:
        await freeze(driver, PIDS, 1)
    assert failed.value.reason is Reason.CUDA_LOCK_TIMEOUT
    assert states(driver) == {CudaState.RUNNING}
    assert Operation.CHECKPOINT not in {operation for operation, _ in driver.fake.calls}


async def test_a_tree_that_cannot_be_brought_back_must_be_ended() -> None:
    driver = tree(
        p11=FakeProcess(answers={Operation.CHECKPOINT: "CUDA_ERROR_OUT_OF_MEMORY"}),
        p12=FakeProcess(answers={Operation.RESTORE: "CUDA_ERROR_UNKNOWN"}),
    )
    with pytest.raises(SnapshotError, match="could not be brought back") as failed:
        await freeze(driver, PIDS, 1000)
    assert failed.value.reason is Reason.CUDA_RESTORE_FAILED
    assert "CUDA_ERROR_OUT_OF_MEMORY" in failed.value.message
    assert driver.fake.script.processes[10].state is CudaState.RUNNING


async def test_a_failed_state_cannot_be_thawed() -> None:
    with pytest.raises(SnapshotError, match="CUDA state failed"):
        await thaw(tree(p10=FakeProcess(state=CudaState.FAILED)), PIDS)


breaking = st.sampled_from([Operation.LOCK, Operation.CHECKPOINT])


@given(st.dictionaries(st.sampled_from(PIDS), breaking, min_size=1))
def test_whatever_fails_all_run_on(broken: dict[int, Operation]) -> None:
    driver = tree(**{f"p{pid}": FakeProcess(answers={op: "CUDA_ERROR_UNKNOWN"}) for pid, op in broken.items()})
    with pytest.raises(SnapshotError):
        asyncio.run(freeze(driver, PIDS, 1000))
    assert states(driver) == {CudaState.RUNNING}


@given(st.integers(1, 12))
def test_given_up_at_any_moment_it_is_frozen_whole_or_runs_on(steps: int) -> None:
    driver = tree()

    async def give_up() -> bool:
        freezing = asyncio.create_task(freeze(driver, PIDS, 1000))
        for _ in range(steps):
            await asyncio.sleep(0)
        freezing.cancel()
        try:
            await freezing
        except asyncio.CancelledError:
            return False
        return True

    frozen = asyncio.run(give_up())
    assert states(driver) == {CudaState.CHECKPOINTED if frozen else CudaState.RUNNING}
