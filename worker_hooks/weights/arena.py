"""Device memory given up at quiesce and taken back at the same addresses after a restore.

What holds addresses into it (tensors, CUDA graphs, an engine's allocator) notices nothing.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from worker_hooks.reasons import HookError, HookReason
from worker_hooks.weights import handover
from worker_hooks.weights.memory import DeviceMemory, Handle, rounded
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


Owner = Callable[[Segment, Handle], None]
"""What is done with the handle of a segment's memory once that is mapped."""


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
    owner: Owner | None = None,
) -> Attached:
    """Brings detached segments back to their addresses: from a loader, or, failing that, from the store.

    Args:
        loader: the socket of :mod:`worker_hooks.weights.handover`; None: there is no loader.
        make_pump: called only when the worker has to load something itself.
        owner: keeps the handles; by default they are released, and the memory lives as long as it is mapped.

    Raises:
        HookError: ``weights_corrupt``, ``weights_load_failed`` or ``gpu_out_of_memory``; the worker cannot serve.
    """
    keep_handle = owner or (lambda segment, handle: memory.release(handle))
    taken = 0
    why = ""
    if loader is not None:
        try:
            for segment, descriptor in handover.receive(loader, segments, timeout_s):
                try:
                    handle = memory.take(descriptor)
                finally:
                    os.close(descriptor)
                _map(memory, segment, handle, keep_handle)
                taken += 1
        except HookError as failure:
            if failure.reason is HookReason.WEIGHTS_CORRUPT:
                raise
            why = f"{failure.reason}: {failure.message}"
            logger.warning("the loader handed over %d of %d segments: %s", taken, len(segments), failure.message)
    if taken < len(segments):
        _load(memory, segments[taken:], store, make_pump, keep_handle)
    return Attached(by_loader=taken, why=why)


def _map(memory: DeviceMemory, segment: Segment, handle: Handle, owner: Owner) -> None:
    try:
        memory.map(segment.address, segment.size, handle)
    except HookError:
        memory.release(handle)
        raise
    owner(segment, handle)


def _load(
    memory: DeviceMemory,
    segments: Sequence[Segment],
    store: SegmentStore,
    make_pump: Callable[[], Pump],
    owner: Owner,
) -> None:
    for segment in segments:
        store.check(segment)
    for segment in segments:
        _map(memory, segment, memory.create(segment.size), owner)
    with ExitStack() as opened:
        files = [SegmentFile(store.path(segment.digest), segment.size) for segment in segments]
        for file in files:
            opened.callback(file.close)
        pump = make_pump()
        opened.callback(pump.close)
        pump.load([Transfer(file, segment.address) for file, segment in zip(files, segments, strict=True)])
