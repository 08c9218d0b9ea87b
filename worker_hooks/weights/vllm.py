"""vLLM's weights as segments: what its sleep-mode allocator holds under ``weights``, kept and given up in place.

``CuMemAllocator`` (``vllm.device_allocator.cumem``, with ``enable_sleep_mode``) maps each of its blocks
at an address of its own and keeps, by that address, a tag and the four numbers its C extension works
on: device, size, address, and where the memory's handle is stored. Its own ``sleep`` copies weights to
host memory, which then is in the image, or drops them, to be read again tensor by tensor. Here blocks
with other tags (the KV cache) are given up by the allocator's own calls and come back empty; weights
go to the segment store and come back from a loader. To be called in each process that holds a model.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Protocol

from worker_hooks.weights.arena import HANDOVER_TIMEOUT_S, Attached, attach, keep
from worker_hooks.weights.memory import DeviceMemory, Handle
from worker_hooks.weights.pump import Pump
from worker_hooks.weights.segment import Segment, SegmentStore

WEIGHTS = "weights"

BlockHandle = tuple[int, int, int, int]
"""As vLLM's C extension has it: device, size, address, address of the ``CUmemGenericAllocationHandle``."""


class Block(Protocol):
    """``vllm.device_allocator.AllocationData``."""

    handle: BlockHandle
    tag: str


class BlockAllocator(Protocol):
    """The part of vLLM's allocator that is used."""

    pointer_to_data: Mapping[int, Block]


class VllmWeights:
    """The blocks of one process's allocator.

    Args:
        allocator: ``CuMemAllocator.get_instance()``.
        memory: the device of those blocks.
        give_up: ``vllm.device_allocator.cumem.unmap_and_release``: takes a block's memory away and frees it.
        take_back: ``vllm.device_allocator.cumem.create_and_map``: puts new memory at a block's address.
    """

    def __init__(
        self,
        allocator: BlockAllocator,
        memory: DeviceMemory,
        give_up: Callable[[BlockHandle], None],
        take_back: Callable[[BlockHandle], None],
    ) -> None:
        self._allocator, self._memory = allocator, memory
        self._give_up, self._take_back = give_up, take_back
        self._segments: list[Segment] = []
        self._empty: list[BlockHandle] = []

    @classmethod
    def of_this_process(cls) -> VllmWeights:
        """The blocks of the model that this process holds."""
        import torch
        from vllm.device_allocator import cumem

        from worker_hooks.weights.cuda_memory import CudaMemory

        device = torch.cuda.current_device()
        torch.cuda.synchronize(device)
        return cls(
            cumem.CuMemAllocator.get_instance(), CudaMemory(device), cumem.unmap_and_release, cumem.create_and_map
        )

    def quiesce(self, store: SegmentStore) -> list[Segment]:
        """Keeps the weights and gives all blocks up; the engine must be idle, and is unusable until resumed."""
        blocks = list(self._allocator.pointer_to_data.values())
        pump = Pump(self._memory)
        try:
            self._segments = [
                keep(self._memory, pump, store, address=block.handle[2], size=block.handle[1], tag=block.tag)
                for block in blocks
                if block.tag == WEIGHTS
            ]
        finally:
            pump.close()
        self._empty = [block.handle for block in blocks if block.tag != WEIGHTS]
        for block in blocks:
            self._give_up(block.handle)
        return self._segments

    def resume(
        self, store: SegmentStore, loader: Path | None = None, timeout_s: float = HANDOVER_TIMEOUT_S
    ) -> Attached:
        """Takes all blocks back at their addresses: weights with their bytes, the others empty. See :func:`attach`."""
        attached = attach(
            self._memory, self._segments, store, loader, lambda: Pump(self._memory), timeout_s, owner=self._own
        )
        for handle in self._empty:
            self._take_back(handle)
        self._segments, self._empty = [], []
        return attached

    def _own(self, segment: Segment, handle: Handle) -> None:
        """Tells the allocator the new memory's handle: its own free releases that."""
        _, _, _, stored_at = self._allocator.pointer_to_data[segment.address].handle
        ctypes.c_uint64.from_address(stored_at).value = int(handle)
