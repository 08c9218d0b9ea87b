"""The real driver, through NVIDIA's ``cuda.bindings`` (imported when it is opened)."""

from __future__ import annotations

import ctypes
import uuid
from typing import Any

from dynamo_snapshot.agent.cuda.driver import (
    CheckpointDriver,
    CudaState,
    Device,
    DeviceMap,
    Inventory,
    Operation,
    checked_timeout,
    failure,
)
from dynamo_snapshot.agent.cuda.nvml import Nvml
from dynamo_snapshot.errors import SnapshotError
from dynamo_snapshot.model import Reason

_SUCCESS = "CUDA_SUCCESS"
_NO_CUDA_HERE = "CUDA_ERROR_NOT_INITIALIZED"
_UUID_PREFIX = "GPU-"


def open_driver() -> CheckpointDriver:
    """Returns the driver of this host, initialized; takes up to some seconds the first time.

    Raises:
        SnapshotError: ``cuda_missing``.
    """
    try:
        from cuda.bindings import driver
    except ImportError as error:
        raise _missing(f"cuda.bindings cannot be imported: {error}", "Install `cuda-bindings`.") from error
    if not hasattr(driver, "cuCheckpointProcessLock"):
        raise _missing("this cuda.bindings has no checkpoint API", "Install `cuda-bindings` 12.8 or newer.")
    try:
        (result,) = driver.cuInit(0)
    except RuntimeError as error:  # how cuda.bindings says that libcuda.so.1 is not there
        raise _missing(str(error), "Install the NVIDIA driver, 570 or newer.") from error
    if result.name != _SUCCESS:
        raise _missing(f"cuInit answered {result.name}", "`nvidia-smi` shows whether the driver sees a GPU.")
    return BindingsDriver(driver, Nvml())


class BindingsDriver:
    """See :class:`CheckpointDriver`; the bindings let other threads run during each call."""

    def __init__(self, driver: Any, nvml: Nvml) -> None:
        self._driver = driver
        self._nvml = nvml

    def inventory(self) -> Inventory:
        devices = []
        for index in range(self._value(self._driver.cuDeviceGetCount())):
            device = self._value(self._driver.cuDeviceGet(index))
            name = format_uuid(self._value(self._driver.cuDeviceGetUuid(device)).bytes)
            seen = self._nvml.device(name)
            devices.append(
                Device(
                    uuid=name,
                    name=self._value(self._driver.cuDeviceGetName(128, device)).split(b"\0")[0].decode(),
                    total_bytes=self._value(self._driver.cuDeviceTotalMem(device)),
                    free_bytes=seen.free_bytes,
                    mig=seen.mig,
                )
            )
        return Inventory(driver_version=self._nvml.driver_version(), devices=tuple(devices))

    def state(self, pid: int) -> CudaState | None:
        result, state = self._driver.cuCheckpointProcessGetState(pid)
        if result.name == _NO_CUDA_HERE:
            return None
        if result.name != _SUCCESS:
            raise failure(Operation.STATE, pid, result.name)
        return CudaState(state.name.removeprefix("CU_PROCESS_STATE_").lower())

    def lock(self, pid: int, timeout_ms: int) -> None:
        arguments = self._driver.CUcheckpointLockArgs()
        arguments.timeoutMs = checked_timeout(timeout_ms)
        self._check(Operation.LOCK, pid, self._driver.cuCheckpointProcessLock(pid, arguments))

    def checkpoint(self, pid: int) -> None:
        self._check(Operation.CHECKPOINT, pid, self._driver.cuCheckpointProcessCheckpoint(pid, None))

    def restore(self, pid: int, devices: DeviceMap) -> None:
        arguments = self._restore_arguments(devices) if devices else None
        self._check(Operation.RESTORE, pid, self._driver.cuCheckpointProcessRestore(pid, arguments))

    def unlock(self, pid: int) -> None:
        self._check(Operation.UNLOCK, pid, self._driver.cuCheckpointProcessUnlock(pid, None))

    def _restore_arguments(self, devices: DeviceMap) -> Any:
        pairs = []
        for old, new in devices.items():
            pair = self._driver.CUcheckpointGpuPair()
            pair.oldUuid, pair.newUuid = self._uuid(old), self._uuid(new)
            pairs.append(pair)
        arguments = self._driver.CUcheckpointRestoreArgs()
        arguments.gpuPairs, arguments.gpuPairsCount = pairs, len(pairs)
        return arguments

    def _uuid(self, name: str) -> Any:
        value = self._driver.CUuuid()
        # The bindings give no way to set one; a UUID of another host can be had from no call.
        ctypes.memmove(value.getPtr(), parse_uuid(name), 16)
        return value

    @staticmethod
    def _check(operation: Operation, pid: int, answer: tuple[Any]) -> None:
        if answer[0].name != _SUCCESS:
            raise failure(operation, pid, answer[0].name)

    @staticmethod
    def _value(answer: tuple[Any, Any]) -> Any:
        if answer[0].name != _SUCCESS:
            raise SnapshotError(Reason.CUDA_PROBE_FAILED, f"the GPUs cannot be listed: {answer[0].name}")
        return answer[1]


def format_uuid(raw: bytes) -> str:
    """Returns a GPU's 16 bytes as nvidia-smi prints them."""
    return _UUID_PREFIX + str(uuid.UUID(bytes=raw))


def parse_uuid(name: str) -> bytes:
    """The reverse of :func:`format_uuid`; raises ``gpu_uuid_unmapped`` for what is no GPU's UUID."""
    try:
        if not name.startswith(_UUID_PREFIX):
            raise ValueError("it does not begin with GPU-")
        return uuid.UUID(name.removeprefix(_UUID_PREFIX)).bytes
    except ValueError as error:
        raise SnapshotError(
            Reason.GPU_UUID_UNMAPPED,
            f"{name!r} is no GPU's UUID: {error}",
            "Name GPUs as `nvidia-smi -L` does; MIG and time-sliced devices cannot be restored onto.",
        ) from error


def _missing(message: str, remedy: str) -> SnapshotError:
    return SnapshotError(Reason.CUDA_MISSING, message, remedy)
