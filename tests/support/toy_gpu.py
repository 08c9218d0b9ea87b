"""The toy worker's GPU: a state for the fake driver in its own memory, and weights in an arena of host memory."""

from __future__ import annotations

import ctypes
import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))
sys.path.insert(0, str(Path(__file__).parents[1]))
from support.weights import detached, digests

from worker_hooks.weights.arena import attach
from worker_hooks.weights.handover import SOCKET
from worker_hooks.weights.host_memory import GRANULARITY, HostMemory
from worker_hooks.weights.pump import Pump
from worker_hooks.weights.segment import SEGMENTS_ENV, SEGMENTS_FILE, SegmentStore, encode_segments

# As dynamo_snapshot.agent.cuda.fake has it: a worker imports nothing of the agent.
STATE_ADDRESS, STATE_BYTES = 0x10_0000_0000, 4096
_MAP_FIXED_NOREPLACE, _MAP_PRIVATE_ANONYMOUS, _READ_WRITE = 0x100000, 0x22, 3


def map_state(process: str) -> None:
    """Makes this process one that uses CUDA, as the fake driver sees it: ``process`` is a ``FakeProcess`` as JSON."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    flags = _MAP_FIXED_NOREPLACE | _MAP_PRIVATE_ANONYMOUS
    address = libc.mmap(ctypes.c_void_p(STATE_ADDRESS), STATE_BYTES, _READ_WRITE, flags, -1, ctypes.c_long(0))
    assert address == STATE_ADDRESS, os.strerror(ctypes.get_errno())
    ctypes.memmove(STATE_ADDRESS, process.encode(), len(process))


class ToyGpu:
    """One GPU, with two segments of weights; ``TOY_ZEROS_MIB`` as much zeroed host memory as a driver leaves."""

    def __init__(self, process: str, control: Path) -> None:
        map_state(process)
        self.memory = HostMemory()
        self.store = SegmentStore(Path(os.environ[SEGMENTS_ENV]))
        self.control = control
        self.by_loader = -1
        self.zeros = bytearray(b"\1" * (int(os.environ.get("TOY_ZEROS_MIB", "0")) << 20))
        self.zeros[:] = bytes(len(self.zeros))  # written to, so that they are in the image

    def quiesce(self) -> None:
        scratch = self.control / "scratch"
        self.segments = detached(self.memory, self.store, [GRANULARITY, 2 * GRANULARITY], scratch)
        (self.control / SEGMENTS_FILE).write_bytes(encode_segments(self.segments))

    def resume(self) -> None:
        loader = self.control.parent / SOCKET
        attached = attach(self.memory, self.segments, self.store, loader if loader.exists() else None, self._pump, 10)
        self.by_loader = attached.by_loader
        assert not any(self.zeros)
        assert digests(self.memory, self.segments) == [segment.digest for segment in self.segments]

    def _pump(self) -> Pump:
        return Pump(self.memory, lanes=2, buffers=2)

    def evidence(self) -> dict[str, str]:
        return {
            "by_loader": str(self.by_loader),
            "cuda": ctypes.string_at(STATE_ADDRESS).decode(),
            "visible": os.environ.get("CUDA_VISIBLE_DEVICES", ""),
        }
