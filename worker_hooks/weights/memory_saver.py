"""Weights in regions of ``torch_memory_saver`` as segments: what SGLang has in the place of vLLM's allocator.

The saver takes torch's ``cudaMalloc`` inside a region and maps memory of its own; ``pause(tag)`` unmaps and frees it,
``resume(tag)`` maps new memory at the same address, with the old bytes only where it kept a copy on the host. It has
no call that lists its regions (0.0.9 and 0.0.10 read), so they are seen from torch's side: a region's memory is the
segments of torch's private pools that were not there when it began.

After a resume the saver is not asked again: the memory at its addresses, which it still reserves, is a loader's or
this module's, and the saver goes on to hold it for paused. Giving it up once more is then this module's work, too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from worker_hooks.reasons import HookError, HookReason
from worker_hooks.weights.arena import HANDOVER_TIMEOUT_S, Attached, attach, detach, keep
from worker_hooks.weights.memory import DeviceMemory, rounded
from worker_hooks.weights.pump import Pump
from worker_hooks.weights.segment import Segment, SegmentStore

WEIGHTS = "weights"
"""The saver's tag, and the segments'."""

TorchSegment = Mapping[str, Any]
"""As ``torch.cuda.memory_snapshot`` has it; ``device``, ``address``, ``total_size``, ``segment_pool_id`` are used."""


class SaverWeights:
    """The regions with weights of one process, on one device.

    Args:
        open_memory: gives the device's memory; called at the first quiesce.
        list_segments: ``torch.cuda.memory_snapshot``.
        pause: has the saver give up all that it tagged as weights, without a copy.
    """

    def __init__(
        self,
        open_memory: Callable[[], DeviceMemory],
        list_segments: Callable[[], Iterable[TorchSegment]],
        pause: Callable[[], None],
    ) -> None:
        self._open_memory, self._list_segments, self._pause = open_memory, list_segments, pause
        self._memory: DeviceMemory | None = None
        self._found: dict[int, int] = {}
        """Sizes by address of all that was allocated in regions with weights."""
        self._segments: list[Segment] = []
        self._taken_over = False

    @classmethod
    def of_this_process(cls) -> SaverWeights:
        """The regions of the model that this process loads."""
        import torch
        from torch_memory_saver import torch_memory_saver

        from worker_hooks.weights.cuda_memory import CudaMemory

        return cls(
            lambda: CudaMemory(torch.cuda.current_device()),
            torch.cuda.memory_snapshot,
            lambda: torch_memory_saver.pause(WEIGHTS),
        )

    @property
    def away(self) -> bool:
        """Whether the weights are given up at present."""
        return bool(self._segments)

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Around each region that is entered for weights."""
        before = self._private()
        yield
        self._found |= {address: size for address, size in self._private().items() if before.get(address) != size}

    def quiesce(self, store: SegmentStore) -> list[Segment]:
        """Keeps the weights and gives their memory up; the engine must be idle, and is unusable until resumed.

        Raises:
            HookError: nothing was given up.
        """
        there = self._private()
        found = {address: size for address, size in self._found.items() if there.get(address) == size}
        if not found:
            raise HookError(
                HookReason.QUIESCE_FAILED, "torch_memory_saver has no region with weights: is it enabled in the engine?"
            )
        memory = self._memory = self._memory or self._open_memory()
        pump = Pump(memory)
        try:
            segments = [
                keep(memory, pump, store, address=address, size=rounded(size, memory.granularity), tag=WEIGHTS)
                for address, size in sorted(found.items())
            ]
        finally:
            pump.close()
        if self._taken_over:
            detach(memory, segments)
        else:
            self._pause()
        self._segments = segments
        return segments

    def resume(
        self, store: SegmentStore, loader: Path | None = None, timeout_s: float = HANDOVER_TIMEOUT_S
    ) -> Attached:
        """Takes the weights back at their addresses. See :func:`worker_hooks.weights.arena.attach`."""
        memory = self._memory
        if memory is None:
            raise HookError(HookReason.RESUME_FAILED, "weights that were never given up cannot be taken back")
        self._taken_over = True
        attached = attach(memory, self._segments, store, loader, lambda: Pump(memory), timeout_s)
        self._segments = []
        return attached

    def _private(self) -> dict[int, int]:
        """Sizes by address of what torch holds in private pools: its own default pool is not the saver's."""
        return {
            segment["address"]: segment["total_size"]
            for segment in self._list_segments()
            if tuple(segment["segment_pool_id"]) != (0, 0)
        }
