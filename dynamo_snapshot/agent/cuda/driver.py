"""The CUDA driver's checkpoint API as this project uses it: states, devices, and what its errors mean.

A CUDA process goes RUNNING → lock → LOCKED → checkpoint → CHECKPOINTED → restore → LOCKED → unlock →
RUNNING (CUDA driver API, "Checkpointing"). :data:`TRANSITIONS` is that table; the fake driver is made
of it, and the GPU suite replays it against the real one.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import Protocol

import msgspec

from dynamo_snapshot.errors import SnapshotError
from dynamo_snapshot.model import Reason


class CudaState(StrEnum):
    """What the driver says of a process that uses CUDA."""

    RUNNING = "running"
    LOCKED = "locked"
    CHECKPOINTED = "checkpointed"
    FAILED = "failed"


class Operation(StrEnum):
    STATE = "state"
    LOCK = "lock"
    CHECKPOINT = "checkpoint"
    RESTORE = "restore"
    UNLOCK = "unlock"


TRANSITIONS: dict[tuple[CudaState, Operation], CudaState] = {
    (CudaState.RUNNING, Operation.LOCK): CudaState.LOCKED,
    (CudaState.LOCKED, Operation.CHECKPOINT): CudaState.CHECKPOINTED,
    (CudaState.CHECKPOINTED, Operation.RESTORE): CudaState.LOCKED,
    (CudaState.LOCKED, Operation.UNLOCK): CudaState.RUNNING,
}
"""Every call that is allowed; any other is answered ``CUDA_ERROR_ILLEGAL_STATE`` and changes nothing."""


class Device(msgspec.Struct, frozen=True, kw_only=True):
    """One GPU of this host."""

    uuid: str
    """As the driver and nvidia-smi print it: ``GPU-`` and 32 hexadecimal digits in groups."""
    name: str
    total_bytes: int
    free_bytes: int | None = None
    """Free now; None where it cannot be read."""
    mig: bool = False
    """Partitioned: the checkpoint API does not support it."""


class Inventory(msgspec.Struct, frozen=True, kw_only=True):
    """The GPUs of this host and their driver."""

    driver_version: str
    devices: tuple[Device, ...]


DeviceMap = Mapping[str, str]
"""From the UUID of each GPU at capture to the UUID it is restored onto; empty: onto the same ones."""


class CheckpointDriver(Protocol):
    """The checkpoint API. Calls block; each raises :class:`SnapshotError` as :func:`failure` says."""

    def inventory(self) -> Inventory: ...

    def state(self, pid: int) -> CudaState | None:
        """The state of process ``pid`` (host numbering); None: it does not use CUDA."""

    def lock(self, pid: int, timeout_ms: int) -> None:
        """Stops further CUDA calls of ``pid``; after ``timeout_ms`` (> 0) it is left running, with an error."""

    def checkpoint(self, pid: int) -> None:
        """Moves GPU memory to the host and lets go of the GPU."""

    def restore(self, pid: int, devices: DeviceMap) -> None:
        """Takes the GPU back. After an error the process is beyond help: kill it."""

    def unlock(self, pid: int) -> None: ...


class AsyncCheckpointDriver(Protocol):
    """The same API, awaited: what the agent talks to."""

    async def inventory(self) -> Inventory: ...

    async def state(self, pid: int) -> CudaState | None: ...

    async def lock(self, pid: int, timeout_ms: int) -> None: ...

    async def checkpoint(self, pid: int) -> None: ...

    async def restore(self, pid: int, devices: DeviceMap) -> None: ...

    async def unlock(self, pid: int) -> None: ...


_REASONS: dict[Operation, Reason] = {
    Operation.STATE: Reason.CUDA_PROBE_FAILED,
    Operation.LOCK: Reason.CUDA_CHECKPOINT_FAILED,
    Operation.CHECKPOINT: Reason.CUDA_CHECKPOINT_FAILED,
    Operation.RESTORE: Reason.CUDA_RESTORE_FAILED,
    Operation.UNLOCK: Reason.CUDA_RESTORE_FAILED,
}

_PARTICULAR: dict[tuple[Operation, str], tuple[Reason, str]] = {
    (Operation.LOCK, "CUDA_ERROR_NOT_READY"): (
        Reason.CUDA_LOCK_TIMEOUT,
        "Its GPU work did not end in time: quiesce the engine first, or raise the lock time-out.",
    ),
    (Operation.CHECKPOINT, "CUDA_ERROR_OUT_OF_MEMORY"): (
        Reason.CUDA_CHECKPOINT_FAILED,
        "The host has no room for what is left on the GPU: detach weights and give up the KV cache first.",
    ),
    (Operation.RESTORE, "CUDA_ERROR_OUT_OF_MEMORY"): (
        Reason.GPU_OUT_OF_MEMORY,
        "Something else took the GPU's memory since it was checked; the replica must be ended.",
    ),
    (Operation.RESTORE, "CUDA_ERROR_NOT_SUPPORTED"): (
        Reason.CUDA_RESTORE_FAILED,
        "Seen when a communicator was alive at capture: the snapshot cannot be restored by any driver.",
    ),
}


def failure(operation: Operation, pid: int, result: str) -> SnapshotError:
    """Returns the error for a driver's ``result`` (as ``CUDA_ERROR_NOT_READY``): mapped here and nowhere else."""
    reason, remedy = _PARTICULAR.get((operation, result), (_REASONS[operation], ""))
    return SnapshotError(reason, f"the CUDA driver answered {result} to {operation} of process {pid}", remedy)


def checked_timeout(timeout_ms: int) -> int:
    """Returns ``timeout_ms``; 0 would let the driver wait for ever (``CUcheckpointLockArgs``)."""
    if timeout_ms <= 0:
        raise ValueError(f"a lock needs a time-out above 0 ms, not {timeout_ms}")
    return timeout_ms
