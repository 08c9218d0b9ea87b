"""vLLM's blocks, by an allocator that behaves like its own: weights come back, the KV cache empty, nothing leaks."""

from __future__ import annotations

import ctypes
import os
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from support.weights import digests

from worker_hooks.weights.host_memory import GRANULARITY, HostMemory
from worker_hooks.weights.memory import Handle
from worker_hooks.weights.pump import Pump, SegmentFile, Transfer
from worker_hooks.weights.segment import SegmentStore
from worker_hooks.weights.vllm import BlockHandle, VllmWeights


@dataclass
class FakeBlock:
    handle: BlockHandle
    tag: str
    stored: ctypes.c_uint64


@dataclass
class FakeAllocator:
    """What the C extension does (``csrc/cumem_allocator.cpp``), on host memory."""

    memory: HostMemory
    pointer_to_data: dict[int, FakeBlock] = field(default_factory=dict)

    def malloc(self, size: int, tag: str) -> int:
        address = self.memory.reserve(size)
        stored = ctypes.c_uint64()
        handle = (0, size, address, ctypes.addressof(stored))
        self.pointer_to_data[address] = FakeBlock(handle, tag, stored)
        self.create_and_map(handle)
        return address

    def free(self, address: int) -> None:
        block = self.pointer_to_data.pop(address)
        self.unmap_and_release(block.handle)

    def create_and_map(self, handle: BlockHandle) -> None:
        _, size, address, stored_at = handle
        made = self.memory.create(size)
        self.memory.map(address, size, made)
        ctypes.c_uint64.from_address(stored_at).value = made

    def unmap_and_release(self, handle: BlockHandle) -> None:
        _, size, address, stored_at = handle
        self.memory.unmap(address, size)
        self.memory.release(Handle(ctypes.c_uint64.from_address(stored_at).value))


@pytest.fixture
def allocator() -> FakeAllocator:
    return FakeAllocator(HostMemory())


def test_weights_come_back_and_the_cache_comes_back_empty(allocator: FakeAllocator, tmp_path: Path) -> None:
    memory = allocator.memory
    full = memory.free_bytes()
    weights = [allocator.malloc(GRANULARITY, "weights"), allocator.malloc(3 * GRANULARITY, "weights")]
    cache = allocator.malloc(2 * GRANULARITY, "kv_cache")
    pump = Pump(memory, lanes=1, buffers=1)
    for address in (*weights, cache):
        size = allocator.pointer_to_data[address].handle[1]
        (tmp_path / "bytes").write_bytes(os.urandom(size))
        pump.load([Transfer(SegmentFile(tmp_path / "bytes", size), address)])
    before = pump.digest(cache, 2 * GRANULARITY)
    store = SegmentStore(tmp_path / "segments")
    engine = VllmWeights(allocator, memory, allocator.unmap_and_release, allocator.create_and_map)

    segments = engine.quiesce(store)
    assert memory.free_bytes() == full
    assert [(segment.address, segment.tag) for segment in segments] == [(at, "weights") for at in weights]
    engine.resume(store)

    assert digests(memory, segments) == [segment.digest for segment in segments]
    assert pump.digest(cache, 2 * GRANULARITY) != before
    # The allocator frees what came back as if it had made it itself.
    for address in (*weights, cache):
        allocator.free(address)
    assert memory.free_bytes() == full
    pump.close()
