"""The driver's state table, replayed: the same against the fake and against the real driver."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from dynamo_snapshot.agent.cuda.driver import TRANSITIONS, CheckpointDriver, CudaState, Operation
from dynamo_snapshot.errors import SnapshotError

LOCK_TIMEOUT_MS = 5000
ROUND = (Operation.LOCK, Operation.UNLOCK, Operation.LOCK, Operation.CHECKPOINT, Operation.RESTORE, Operation.UNLOCK)
"""Leads through every state that a healthy process can be in, and back."""


def calls(driver: CheckpointDriver, pid: int) -> dict[Operation, Callable[[], None]]:
    return {
        Operation.LOCK: lambda: driver.lock(pid, LOCK_TIMEOUT_MS),
        Operation.CHECKPOINT: lambda: driver.checkpoint(pid),
        Operation.RESTORE: lambda: driver.restore(pid, {}),
        Operation.UNLOCK: lambda: driver.unlock(pid),
    }


def replay(driver: CheckpointDriver, pid: int) -> None:
    """Makes every call in every state: those in the table lead on, all others are refused and change nothing."""
    call = calls(driver, pid)
    state = CudaState.RUNNING
    assert driver.state(pid) is state
    for step in ROUND:
        for operation in call.keys() - {o for s, o in TRANSITIONS if s is state}:
            with pytest.raises(SnapshotError, match="CUDA_ERROR_ILLEGAL_STATE"):
                call[operation]()
            assert driver.state(pid) is state, operation
        call[step]()
        state = TRANSITIONS[state, step]
        assert driver.state(pid) is state
    assert state is CudaState.RUNNING


def replay_without_cuda(driver: CheckpointDriver, pid: int) -> None:
    """A process that does not use CUDA has no state, and no call is possible on it."""
    assert driver.state(pid) is None
    for call in calls(driver, pid).values():
        with pytest.raises(SnapshotError, match="CUDA_ERROR_NOT_INITIALIZED"):
            call()
