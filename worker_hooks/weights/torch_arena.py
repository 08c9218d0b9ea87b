"""A torch module's parameters and buffers in one arena: moved by one call, then given up and taken back in place.

torch and CUDA are imported when an arena is made; CUDA graphs must be captured after that.
"""

from __future__ import annotations

import ctypes
import gc
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from worker_hooks.weights.arena import HANDOVER_TIMEOUT_S, Arena, Attached, attach, detach, keep
from worker_hooks.weights.memory import DeviceMemory
from worker_hooks.weights.pump import Pump
from worker_hooks.weights.segment import Segment, SegmentStore

TAG = "weights"
ALIGNMENT = 512
"""Of each storage in the arena: what torch's own allocator gives."""


def lay_out(sizes: Sequence[int], alignment: int = ALIGNMENT) -> tuple[list[int], int]:
    """Returns the offset of each block, in order and aligned, and the size of all."""
    offsets = []
    end = 0
    for size in sizes:
        offsets.append(end)
        end += -(-size // alignment) * alignment
    return offsets, end


class TorchArena:
    """The weights of ``module``, on one device, at addresses that outlive their memory.

    Storages are moved whole, so tied parameters stay tied and views keep their strides.

    Args:
        module: a ``torch.nn.Module`` whose parameters and buffers are on ``memory``'s device.
        memory: by default that of torch's current device.
    """

    def __init__(self, module: Any, memory: DeviceMemory | None = None) -> None:
        import torch

        if memory is None:
            from worker_hooks.weights.cuda_memory import CudaMemory

            memory = CudaMemory(torch.cuda.current_device())
        self._torch, self._memory = torch, memory
        self._segments: list[Segment] = []
        self._adopt(list(_tensors(module)))

    @property
    def attached(self) -> bool:
        return not self._segments

    @property
    def size(self) -> int:
        """Bytes, with padding."""
        return self._arena.size

    def quiesce(self, store: SegmentStore) -> list[Segment]:
        """Makes sure ``store`` holds the weights and gives their memory up; the module is unusable until resumed."""
        self._torch.cuda.synchronize()
        pump = Pump(self._memory)
        try:
            segments = [keep(self._memory, pump, store, self._arena.address, self._arena.size, TAG)]
        finally:
            pump.close()
        detach(self._memory, segments)
        self._segments = segments
        empty_caches(self._torch)
        return segments

    def resume(
        self, store: SegmentStore, loader: Path | None = None, timeout_s: float = HANDOVER_TIMEOUT_S
    ) -> Attached:
        """Takes the weights back: from a loader's socket, or from ``store``. See :func:`attach`."""
        attached = attach(self._memory, self._segments, store, loader, lambda: Pump(self._memory), timeout_s)
        self._segments = []
        return attached

    def _adopt(self, tensors: Sequence[Any]) -> None:
        torch = self._torch
        storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage() for tensor in tensors}
        offsets, size = lay_out([storage.nbytes() for storage in storages.values()])
        self._arena = Arena(self._memory, size)
        whole = torch.as_tensor(_Bytes(self._arena.address, self._arena.size), device=f"cuda:{self._memory.device}")
        start = dict(zip(storages, offsets, strict=True))
        for address, storage in storages.items():
            moved = torch.empty(0, dtype=torch.uint8, device=whole.device).set_(storage)
            whole[start[address] : start[address] + storage.nbytes()].copy_(moved)
        for tensor in tensors:
            offset = start[tensor.untyped_storage().data_ptr()] // tensor.element_size() + tensor.storage_offset()
            tensor.data = whole.view(tensor.dtype).as_strided(tensor.size(), tensor.stride(), offset)
        del storages
        torch.cuda.synchronize()
        torch.cuda.empty_cache()


def empty_caches(torch: Any) -> None:
    """Gives back what torch and the C library keep for later: GPU blocks, pinned blocks, free heap."""
    gc.collect()
    torch.cuda.empty_cache()
    torch._C._host_emptyCache()
    ctypes.CDLL(None).malloc_trim(0)


def _tensors(module: Any) -> Iterator[Any]:
    """Every parameter and buffer of ``module`` that has bytes, each once."""
    seen: set[int] = set()
    everything: Iterable[Any] = (*module.parameters(), *module.buffers())
    for tensor in everything:
        if id(tensor) not in seen and tensor.numel():
            seen.add(id(tensor))
            yield tensor


class _Bytes:
    """Device memory as torch takes it from others (the CUDA array interface)."""

    def __init__(self, address: int, size: int) -> None:
        self.__cuda_array_interface__ = {"shape": (size,), "typestr": "|u1", "data": (address, False), "version": 3}
