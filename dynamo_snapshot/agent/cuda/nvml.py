"""What only NVML tells: the driver's version, free memory without a CUDA context, MIG.

The library comes with the driver, so six of its functions through ctypes are all that is needed.
"""

from __future__ import annotations

import ctypes
from typing import NamedTuple

from dynamo_snapshot.errors import SnapshotError
from dynamo_snapshot.model import Reason

_LIBRARY = "libnvidia-ml.so.1"
_NOT_SUPPORTED = 3


class _Memory(ctypes.Structure):
    _fields_ = (("total", ctypes.c_ulonglong), ("free", ctypes.c_ulonglong), ("used", ctypes.c_ulonglong))


class GpuReading(NamedTuple):
    free_bytes: int
    mig: bool


class Nvml:
    """NVML, initialized; raises ``cuda_missing`` where there is none."""

    def __init__(self) -> None:
        try:
            self._library = ctypes.CDLL(_LIBRARY)
        except OSError as error:
            raise SnapshotError(
                Reason.CUDA_MISSING, f"{_LIBRARY} cannot be loaded: {error}", "Install the NVIDIA driver."
            ) from error
        self._call("nvmlInit_v2")

    def driver_version(self) -> str:
        """The driver's version, as ``580.159.04``."""
        text = ctypes.create_string_buffer(80)
        self._call("nvmlSystemGetDriverVersion", text, len(text))
        return text.value.decode()

    def device(self, uuid: str) -> GpuReading:
        """Reads the GPU named ``uuid``, as ``GPU-…``."""
        handle, memory = ctypes.c_void_p(), _Memory()
        self._call("nvmlDeviceGetHandleByUUID", uuid.encode(), ctypes.byref(handle))
        self._call("nvmlDeviceGetMemoryInfo", handle, ctypes.byref(memory))
        current, pending = ctypes.c_uint(), ctypes.c_uint()
        # GPUs that know no MIG answer "not supported": that is "off".
        self._call("nvmlDeviceGetMigMode", handle, ctypes.byref(current), ctypes.byref(pending), allow=_NOT_SUPPORTED)
        return GpuReading(memory.free, bool(current.value))

    def _call(self, name: str, *arguments: object, allow: int = 0) -> None:
        result = getattr(self._library, name)(*arguments)
        if result not in (0, allow):
            raise SnapshotError(Reason.CUDA_PROBE_FAILED, f"NVML's {name} answered {result}")
