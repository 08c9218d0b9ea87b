"""Device memory given up at quiesce and taken back at the same addresses after a restore.

What holds addresses into it (tensors, CUDA graphs, an engine's allocator) notices nothing.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from worker_hooks.reasons import HookError, HookReason
from worker_hooks.weights import handover
from worker_hooks.weights.memory import DeviceMemory, rounded
from worker_hooks.weights.pump import Pump, SegmentFile, Transfer
from worker_hooks.weights.segment import Segment, SegmentStore

logger = logging.getLogger(__name__)

HANDOVER_TIMEOUT_S = 60.0


@dataclass(frozen=True, slots=True)
class Attached:
    """How the weights came back."""

    by_loader: int
    """Segments that a loader handed over; the worker loaded the others itself."""
    why: str = ""
    """Why the loader did not hand over all."""


class Arena:
    """One reserved range of addresses with memory behind it, while it is attached.

    Args:
        memory: the device.
        size: in bytes; rounded up to the device's granularity.
    """

    def __init__(self, memory: DeviceMemory, size: int) -> None:
        self._memory = memory
        self.size = rounded(size, memory.granularity)
        self.address = memory.reserve(self.size)
        map_new(memory, self.address, self.size)

    def close(self) -> None:
        """Gives an attached arena's memory and addresses back; nothing may use them any more."""
        self._memory.unmap(self.address, self.size)
        self._memory.give_back(self.address, self.size)


def map_new(memory: DeviceMemory, address: int, size: int) -> None:
    """Puts new memory at reserved addresses."""
    handle = memory.create(size)
    try:
        memory.map(address, size, handle)
    finally:
        memory.release(handle)  # what is mapped lives on


def keep(memory: DeviceMemory, pump: Pump, store: SegmentStore, address: int, size: int, tag: str) -> Segment:
    """Makes sure that the store holds the bytes of device memory; writes them only if it does not."""
    digest = pump.digest(address, size)
    if not store.holds(digest, size):
        with store.writing(digest, size) as descriptor:
            pump.save(address, size, descriptor)
    return Segment(address=address, size=size, device=memory.device, tag=tag, digest=digest)


def detach(memory: DeviceMemory, segments: Sequence[Segment]) -> None:
    """Gives the memory of kept segments up; their addresses stay reserved."""
    for segment in segments:
        memory.unmap(segment.address, segment.size)


def attach(
    memory: DeviceMemory,
    segments: Sequence[Segment],
    store: SegmentStore,
    loader: Path | None,
    make_pump: Callable[[], Pump],
    timeout_s: float = HANDOVER_TIMEOUT_S,
) -> Attached:
    """Brings detached segments back to their addresses: from a loader, or, failing that, from the store.

    Args:
        loader: the socket of :mod:`worker_hooks.weights.handover`; None: there is no loader.
        make_pump: called only when the worker has to load something itself.

    Raises:
        HookError: ``weights_corrupt``, ``weights_load_failed`` or ``gpu_out_of_memory``; the worker cannot serve.
    """
    taken = 0
    why = ""
    if loader is not None:
        try:
            for segment, descriptor in handover.receive(loader, segments, timeout_s):
                try:
                    _map_taken(memory, segment, descriptor)
                finally:
                    os.close(descriptor)
                taken += 1
        except HookError as failure:
            if failure.reason is HookReason.WEIGHTS_CORRUPT:
                raise
            why = f"{failure.reason}: {failure.message}"
            logger.warning("the loader handed over %d of %d segments: %s", taken, len(segments), failure.message)
    if taken < len(segments):
        _load(memory, segments[taken:], store, make_pump)
    return Attached(by_loader=taken, why=why)


def _map_taken(memory: DeviceMemory, segment: Segment, descriptor: int) -> None:
    handle = memory.take(descriptor)
    try:
        memory.map(segment.address, segment.size, handle)
    finally:
        memory.release(handle)


def _load(
    memory: DeviceMemory, segments: Sequence[Segment], store: SegmentStore, make_pump: Callable[[], Pump]
) -> None:
    for segment in segments:
        store.check(segment)
    for segment in segments:
        map_new(memory, segment.address, segment.size)
    files = [SegmentFile(store.path(segment.digest), segment.size) for segment in segments]
    pump = make_pump()
    try:
        pump.load([Transfer(file, segment.address) for file, segment in zip(files, segments, strict=True)])
    finally:
        pump.close()
        for file in files:
            file.close()
