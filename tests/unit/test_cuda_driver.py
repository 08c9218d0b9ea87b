"""The fake driver keeps the table, results become reasons, and UUIDs survive the way to the driver."""

from __future__ import annotations

import builtins
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.cuda_conformance import replay, replay_without_cuda

from dynamo_snapshot.agent.cuda import bindings as cuda_bindings
from dynamo_snapshot.agent.cuda.bindings import format_uuid, parse_uuid
from dynamo_snapshot.agent.cuda.driver import CudaState, Operation, failure
from dynamo_snapshot.agent.cuda.fake import FakeDriver, FakeProcess, Script
from dynamo_snapshot.errors import SnapshotError
from dynamo_snapshot.model import Reason

LIVING = f"""
import sys
sys.path.insert(0, {str(Path(__file__).parents[1] / "support")!r})
from toy_gpu import map_state
map_state("{{}}")
print("mapped", flush=True)
sys.stdin.read()
"""


def fake(process: FakeProcess) -> FakeDriver:
    return FakeDriver(Script(processes={7: process}))


def test_the_fake_keeps_the_table() -> None:
    replay(fake(FakeProcess()), 7)


def test_the_fake_knows_processes_without_cuda() -> None:
    replay_without_cuda(fake(FakeProcess()), 8)


def test_a_busy_process_is_left_running() -> None:
    driver = fake(FakeProcess(busy_ms=1000))
    with pytest.raises(SnapshotError) as timed_out:
        driver.lock(7, 1)
    assert timed_out.value.reason is Reason.CUDA_LOCK_TIMEOUT
    assert driver.state(7) is CudaState.RUNNING


def test_a_lock_without_a_time_out_is_refused() -> None:
    with pytest.raises(ValueError, match="above 0 ms"):
        fake(FakeProcess()).lock(7, 0)


@pytest.mark.parametrize(
    ("operation", "result", "reason"),
    [
        (Operation.STATE, "CUDA_ERROR_INVALID_VALUE", Reason.CUDA_PROBE_FAILED),
        (Operation.LOCK, "CUDA_ERROR_NOT_READY", Reason.CUDA_LOCK_TIMEOUT),
        (Operation.LOCK, "CUDA_ERROR_ILLEGAL_STATE", Reason.CUDA_CHECKPOINT_FAILED),
        (Operation.CHECKPOINT, "CUDA_ERROR_OUT_OF_MEMORY", Reason.CUDA_CHECKPOINT_FAILED),
        (Operation.RESTORE, "CUDA_ERROR_OUT_OF_MEMORY", Reason.GPU_OUT_OF_MEMORY),
        (Operation.RESTORE, "CUDA_ERROR_UNKNOWN", Reason.CUDA_RESTORE_FAILED),
        (Operation.UNLOCK, "CUDA_ERROR_UNKNOWN", Reason.CUDA_RESTORE_FAILED),
    ],
)
def test_results_become_reasons(operation: Operation, result: str, reason: Reason) -> None:
    error = failure(operation, 7, result)
    assert error.reason is reason
    assert result in error.message
    assert "process 7" in error.message


@given(st.binary(min_size=16, max_size=16))
def test_uuids_survive(raw: bytes) -> None:
    assert parse_uuid(format_uuid(raw)) == raw


@pytest.mark.parametrize("name", ["", "GPU-", "GPU-12", "MIG-f2b4b5d9-7f3c-4f0f-9d2c-1c2d3e4f5a6b"])
def test_what_is_no_gpu_is_refused(name: str) -> None:
    with pytest.raises(SnapshotError) as refused:
        parse_uuid(name)
    assert refused.value.reason is Reason.GPU_UUID_UNMAPPED


def test_without_bindings_the_driver_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def no_cuda(name: str, *arguments: Any) -> Any:
        if name.startswith("cuda"):
            raise ImportError("No module named 'cuda'")
        return real(name, *arguments)

    monkeypatch.setattr(builtins, "__import__", no_cuda)
    with pytest.raises(SnapshotError) as missing:
        cuda_bindings.open_driver()
    assert missing.value.reason is Reason.CUDA_MISSING


def test_a_living_process_keeps_its_state_in_its_own_memory() -> None:
    with subprocess.Popen([sys.executable, "-c", LIVING], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        replay(FakeDriver(Script()), process.pid)
        FakeDriver(Script()).lock(process.pid, 1000)
        assert FakeDriver(Script()).state(process.pid) is CudaState.LOCKED, "another helper sees what the first did"
        failing = FakeDriver(Script(answers={Operation.UNLOCK: "CUDA_ERROR_UNKNOWN"}))
        with pytest.raises(SnapshotError, match="CUDA_ERROR_UNKNOWN"):
            failing.unlock(process.pid)
        replay_without_cuda(FakeDriver(Script()), os.getpid())
        assert process.stdin is not None
        process.stdin.close()
    replay_without_cuda(FakeDriver(Script()), process.pid)
