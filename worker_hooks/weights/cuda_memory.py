"""A GPU's memory through the driver's virtual memory management, by ``cuda.bindings`` (imported when used).

CUDA graphs and tensors hold addresses; ``cuMemUnmap`` leaves the reservation, so after ``cuMemMap`` at
the same address they are valid again. The memory is made exportable as a POSIX file descriptor, so
that another process can fill it.
"""

from __future__ import annotations

import ctypes
from typing import Any

from worker_hooks.reasons import HookError, HookReason
from worker_hooks.weights.memory import Handle, Lane, Pinned

_NON_BLOCKING = 1
_NO_TIMING = 2


class CudaMemory:
    """See :class:`worker_hooks.weights.memory.DeviceMemory`; uses the device's primary context, as torch does.

    Args:
        device: as CUDA numbers them in this process.
    """

    def __init__(self, device: int = 0) -> None:
        try:
            from cuda.bindings import driver
        except ImportError as error:
            raise HookError(HookReason.CUDA_MISSING, f"cuda.bindings cannot be imported: {error}") from error
        self._driver: Any = driver
        self.device = device
        self._call(driver.cuInit, 0)
        self._context = self._call(driver.cuDevicePrimaryCtxRetain, self._call(driver.cuDeviceGet, device))
        self.enter()
        self._by_descriptor = driver.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
        self._properties = driver.CUmemAllocationProp()
        self._properties.type = driver.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
        self._properties.location.type = driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        self._properties.location.id = device
        self._properties.requestedHandleTypes = self._by_descriptor
        recommended = driver.CUmemAllocationGranularity_flags.CU_MEM_ALLOC_GRANULARITY_RECOMMENDED
        self.granularity: int = self._call(driver.cuMemGetAllocationGranularity, self._properties, recommended)

    def enter(self) -> None:
        """Makes the device's context current in the calling thread."""
        self._call(self._driver.cuCtxSetCurrent, self._context)

    def free_bytes(self) -> int:
        free, _ = self._call(self._driver.cuMemGetInfo)
        return int(free)

    def reserve(self, size: int) -> int:
        return int(self._call(self._driver.cuMemAddressReserve, size, 0, 0, 0))

    def give_back(self, address: int, size: int) -> None:
        self._call(self._driver.cuMemAddressFree, address, size)

    def create(self, size: int) -> Handle:
        return Handle(int(self._call(self._driver.cuMemCreate, size, self._properties, 0)))

    def release(self, handle: Handle) -> None:
        self._call(self._driver.cuMemRelease, int(handle))

    def map(self, address: int, size: int, handle: Handle) -> None:
        self._call(self._driver.cuMemMap, address, size, 0, int(handle), 0)
        access = self._driver.CUmemAccessDesc()
        access.location = self._properties.location
        access.flags = self._driver.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
        self._call(self._driver.cuMemSetAccess, address, size, [access], 1)

    def unmap(self, address: int, size: int) -> None:
        self._call(self._driver.cuMemUnmap, address, size)

    def export(self, handle: Handle) -> int:
        return int(self._call(self._driver.cuMemExportToShareableHandle, int(handle), self._by_descriptor, 0))

    def take(self, descriptor: int) -> Handle:
        return Handle(int(self._call(self._driver.cuMemImportFromShareableHandle, descriptor, self._by_descriptor)))

    def pin(self, size: int) -> Pinned:
        return _CudaPinned(self, size)

    def lane(self, buffers: int, buffer_bytes: int) -> Lane:
        return _CudaLane(self, buffers, buffer_bytes)

    def _call(self, function: Any, *arguments: Any) -> Any:
        result, *values = function(*arguments)
        if result.name != "CUDA_SUCCESS":
            reason = (
                HookReason.GPU_OUT_OF_MEMORY
                if result.name == "CUDA_ERROR_OUT_OF_MEMORY"
                else HookReason.WEIGHTS_LOAD_FAILED
            )
            raise HookError(reason, f"{function.__name__} on device {self.device} answered {result.name}")
        return values[0] if len(values) == 1 else values


class _CudaPinned:
    def __init__(self, memory: CudaMemory, size: int) -> None:
        self._memory = memory
        memory.enter()
        self.address = int(memory._call(memory._driver.cuMemHostAlloc, size, 0))
        self.view = memoryview((ctypes.c_char * size).from_address(self.address)).cast("B")

    def free(self) -> None:
        self._memory.enter()
        self.view.release()
        self._memory._call(self._memory._driver.cuMemFreeHost, self.address)


class _CudaLane:
    """Pinned buffers, a stream of its own, and for each buffer the event of its last copy."""

    def __init__(self, memory: CudaMemory, buffers: int, buffer_bytes: int) -> None:
        self._memory, self._driver, self._call = memory, memory._driver, memory._call
        memory.enter()
        self._stream = self._call(self._driver.cuStreamCreate, _NON_BLOCKING)
        self._pinned = [_CudaPinned(memory, buffer_bytes) for _ in range(buffers)]
        self._events = [self._call(self._driver.cuEventCreate, _NO_TIMING) for _ in range(buffers)]
        self.buffers = [pinned.view for pinned in self._pinned]

    def enter(self) -> None:
        self._memory.enter()

    def to_device(self, address: int, buffer: int, count: int) -> None:
        self.from_pinned(address, self._pinned[buffer].address, count)
        self._call(self._driver.cuEventRecord, self._events[buffer], self._stream)

    def from_pinned(self, address: int, pinned: int, count: int) -> None:
        self._call(self._driver.cuMemcpyHtoDAsync, address, pinned, count, self._stream)

    def to_host(self, buffer: int, address: int, count: int) -> None:
        self._call(self._driver.cuMemcpyDtoHAsync, self._pinned[buffer].address, address, count, self._stream)
        self._call(self._driver.cuEventRecord, self._events[buffer], self._stream)

    def wait(self, buffer: int) -> None:
        self._call(self._driver.cuEventSynchronize, self._events[buffer])

    def drain(self) -> None:
        self._call(self._driver.cuStreamSynchronize, self._stream)

    def close(self) -> None:
        self._memory.enter()
        self.drain()
        for pinned in self._pinned:
            pinned.free()
        for event in self._events:
            self._call(self._driver.cuEventDestroy, event)
        self._call(self._driver.cuStreamDestroy, self._stream)
