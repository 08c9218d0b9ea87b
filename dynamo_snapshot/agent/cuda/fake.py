"""A driver without a GPU, behind the real one's interface: CI, tests, and machines to develop on.

What its processes' states allow is :data:`TRANSITIONS`, as on the real one. A process is made up, or a living
one that keeps what a real one keeps in the driver, its state, in a page of its own memory at :data:`STATE_ADDRESS`:
so the state goes into an image and comes back with it, and outlives the helper.
"""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path

import msgspec

from dynamo_snapshot.agent.cuda.driver import (
    TRANSITIONS,
    CheckpointDriver,
    CudaState,
    Device,
    DeviceMap,
    Inventory,
    Operation,
    checked_timeout,
    failure,
)

SCRIPT_ENV = "DYNAMO_SNAPSHOT_FAKE_CUDA"
"""Names the JSON file that :func:`open_driver` makes its driver from."""

STATE_ADDRESS = 0x10_0000_0000
"""Where a living process has its :class:`FakeProcess`, as JSON that ends with a zero byte."""
STATE_BYTES = 4096

H200 = Device(
    uuid="GPU-00000000-0000-0000-0000-000000000001",
    name="NVIDIA H200",
    total_bytes=150_000_000_000,
    free_bytes=149_000_000_000,
)


class FakeProcess(msgspec.Struct):
    """A process that uses CUDA, and how it misbehaves."""

    state: CudaState = CudaState.RUNNING
    busy_ms: int = 0
    """How long its GPU work goes on: a lock waits for that."""
    takes_s: float = 0.0
    """How long a checkpoint or restore takes."""
    answers: dict[Operation, str] = {}
    """Operations that fail, with the driver's result."""
    kills_helper: Operation | None = None
    """An operation in which the calling process dies, as a driver's crash would have it."""
    restored_onto: dict[str, str] = {}


class Script(msgspec.Struct):
    """All that a fake driver knows at first."""

    inventory: Inventory = Inventory(driver_version="580.159.04", devices=(H200,))
    processes: dict[int, FakeProcess] = {}
    answers: dict[Operation, str] = {}
    """Operations that fail for every process, with the driver's result."""


def open_driver() -> CheckpointDriver:
    """Returns a fake made of the :class:`Script` in the file that ``DYNAMO_SNAPSHOT_FAKE_CUDA`` names, if any."""
    path = os.environ.get(SCRIPT_ENV)
    return FakeDriver(msgspec.json.decode(Path(path).read_bytes(), type=Script) if path else Script())


class FakeDriver:
    """See :class:`CheckpointDriver`. Processes without a state, in the script or in memory, do not use CUDA."""

    def __init__(self, script: Script) -> None:
        self.script = script
        self.calls: list[tuple[Operation, int]] = []
        """Every call but state queries, in order."""
        self._lock = threading.Lock()

    def inventory(self) -> Inventory:
        return self.script.inventory

    def state(self, pid: int) -> CudaState | None:
        process = self._find(pid)
        if process is None:
            return None
        self._misbehave(Operation.STATE, pid, process)
        return process.state

    def lock(self, pid: int, timeout_ms: int) -> None:
        checked_timeout(timeout_ms)
        process = self._known(Operation.LOCK, pid)
        if process.state is CudaState.RUNNING and process.busy_ms > timeout_ms:
            time.sleep(timeout_ms / 1000)
            raise failure(Operation.LOCK, pid, "CUDA_ERROR_NOT_READY")
        self._step(Operation.LOCK, pid, process)

    def checkpoint(self, pid: int) -> None:
        self._step(Operation.CHECKPOINT, pid, self._known(Operation.CHECKPOINT, pid))

    def restore(self, pid: int, devices: DeviceMap) -> None:
        process = self._known(Operation.RESTORE, pid)
        process.restored_onto = dict(devices)
        self._step(Operation.RESTORE, pid, process)

    def unlock(self, pid: int) -> None:
        self._step(Operation.UNLOCK, pid, self._known(Operation.UNLOCK, pid))

    def _known(self, operation: Operation, pid: int) -> FakeProcess:
        process = self._find(pid)
        if process is None:
            raise failure(operation, pid, "CUDA_ERROR_NOT_INITIALIZED")
        return process

    def _step(self, operation: Operation, pid: int, process: FakeProcess) -> None:
        with self._lock:
            self.calls.append((operation, pid))
        following = TRANSITIONS.get((process.state, operation))
        if following is None:
            raise failure(operation, pid, "CUDA_ERROR_ILLEGAL_STATE")
        if process.takes_s:
            time.sleep(process.takes_s)
        self._misbehave(operation, pid, process)
        process.state = following
        if pid not in self.script.processes:
            _write_state(pid, process)

    def _find(self, pid: int) -> FakeProcess | None:
        return self.script.processes.get(pid) or _read_state(pid)

    def _misbehave(self, operation: Operation, pid: int, process: FakeProcess) -> None:
        if process.kills_helper is operation:
            os._exit(139)
        answers = self.script.answers | process.answers
        if operation in answers:
            raise failure(operation, pid, answers[operation])


def _read_state(pid: int) -> FakeProcess | None:
    try:
        with open(f"/proc/{pid}/mem", "rb", buffering=0) as memory:
            memory.seek(STATE_ADDRESS)
            page = memory.read(STATE_BYTES)
    except OSError:  # gone, or nothing is mapped there
        return None
    try:
        return msgspec.json.decode(page.partition(b"\0")[0], type=FakeProcess)
    except msgspec.MsgspecError:
        return None


def _write_state(pid: int, process: FakeProcess) -> None:
    with open(f"/proc/{pid}/mem", "r+b", buffering=0) as memory:
        memory.seek(STATE_ADDRESS)
        memory.write(msgspec.json.encode(process) + b"\0")
