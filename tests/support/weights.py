"""Weights made up for tests: random bytes in an arena, in whatever memory."""

from __future__ import annotations

import os
from pathlib import Path

from worker_hooks.weights.arena import Arena, detach, keep
from worker_hooks.weights.memory import DeviceMemory
from worker_hooks.weights.pump import Pump, SegmentFile, Transfer
from worker_hooks.weights.segment import Segment, SegmentStore


def fill(memory: DeviceMemory, pump: Pump, arena: Arena, scratch: Path) -> None:
    """Puts random bytes into an arena."""
    scratch.write_bytes(os.urandom(arena.size))
    file = SegmentFile(scratch, arena.size)
    pump.load([Transfer(file, arena.address)])
    file.close()
    scratch.unlink()


def detached(memory: DeviceMemory, store: SegmentStore, sizes: list[int], scratch: Path) -> list[Segment]:
    """Makes arenas of random bytes, keeps them in ``store`` and gives their memory up."""
    pump = Pump(memory, lanes=2, buffers=2)
    kept = []
    for size in sizes:
        arena = Arena(memory, size)
        fill(memory, pump, arena, scratch)
        kept.append(keep(memory, pump, store, arena.address, arena.size, "weights"))
    pump.close()
    detach(memory, kept)
    return kept


def digests(memory: DeviceMemory, segments: list[Segment]) -> list[str]:
    """What the memory at the segments' addresses holds now."""
    pump = Pump(memory, lanes=2, buffers=2)
    found = [pump.digest(segment.address, segment.size) for segment in segments]
    pump.close()
    return found
