"""What arenas and loaders rely on in device memory: the same suite for host memory and for a GPU."""

from __future__ import annotations

import pytest

from worker_hooks.reasons import HookError, HookReason
from worker_hooks.weights.memory import DeviceMemory, rounded


def put(memory: DeviceMemory, address: int, data: bytes) -> None:
    lane = memory.lane(1, 1 << 20)
    lane.enter()
    lane.buffers[0][: len(data)] = data
    lane.to_device(address, 0, len(data))
    lane.wait(0)
    lane.close()


def get(memory: DeviceMemory, address: int, count: int) -> bytes:
    lane = memory.lane(1, 1 << 20)
    lane.enter()
    lane.to_host(0, address, count)
    lane.wait(0)
    data = bytes(lane.buffers[0][:count])
    lane.close()
    return data


class MemoryConformance:
    """Subclass it and give a ``memory`` fixture."""

    def test_a_reservation_is_aligned_and_its_own(self, memory: DeviceMemory) -> None:
        size = memory.granularity
        first, second = memory.reserve(size), memory.reserve(size)
        assert first % memory.granularity == second % memory.granularity == 0
        assert abs(first - second) >= size
        memory.give_back(first, size)
        memory.give_back(second, size)

    def test_new_memory_at_the_old_address_takes_the_place_of_the_old(self, memory: DeviceMemory) -> None:
        size = memory.granularity
        address = memory.reserve(size)
        before = memory.free_bytes()
        first = memory.create(size)
        memory.map(address, size, first)
        put(memory, address, b"first")
        memory.unmap(address, size)
        memory.map(address, size, first)
        assert get(memory, address, 5) == b"first"
        memory.unmap(address, size)
        memory.release(first)
        second = memory.create(size)
        memory.map(address, size, second)
        put(memory, address, b"other")
        assert get(memory, address, 5) == b"other"
        memory.unmap(address, size)
        memory.release(second)
        assert memory.free_bytes() == before
        memory.give_back(address, size)

    def test_mapped_memory_outlives_its_handle(self, memory: DeviceMemory) -> None:
        size = 2 * memory.granularity
        address = memory.reserve(size)
        handle = memory.create(size)
        memory.map(address, size, handle)
        memory.release(handle)
        put(memory, address + memory.granularity, b"alive")
        assert get(memory, address + memory.granularity, 5) == b"alive"
        memory.unmap(address, size)
        memory.give_back(address, size)

    def test_exported_memory_is_the_same_memory(self, memory: DeviceMemory) -> None:
        import os

        size = memory.granularity
        ours, theirs = memory.reserve(size), memory.reserve(size)
        handle = memory.create(size)
        memory.map(ours, size, handle)
        descriptor = memory.export(handle)
        taken = memory.take(descriptor)
        os.close(descriptor)
        memory.map(theirs, size, taken)
        put(memory, ours, b"shared")
        assert get(memory, theirs, 6) == b"shared"
        for address in (ours, theirs):
            memory.unmap(address, size)
            memory.give_back(address, size)
        memory.release(handle)
        memory.release(taken)

    def test_more_than_there_is_is_refused_and_costs_nothing(self, memory: DeviceMemory) -> None:
        before = memory.free_bytes()
        with pytest.raises(HookError) as refused:
            memory.create(rounded(before, memory.granularity) + 64 * memory.granularity)
        assert refused.value.reason is HookReason.GPU_OUT_OF_MEMORY
        assert memory.free_bytes() == before

    def test_pinned_memory_is_copied_from(self, memory: DeviceMemory) -> None:
        size = memory.granularity
        address = memory.reserve(size)
        handle = memory.create(size)
        memory.map(address, size, handle)
        pinned = memory.pin(size)
        pinned.view[:6] = b"pinned"
        lane = memory.lane(1, 4096)
        lane.enter()
        lane.from_pinned(address, pinned.address, size)
        lane.drain()
        lane.close()
        assert get(memory, address, 6) == b"pinned"
        pinned.free()
        memory.unmap(address, size)
        memory.release(handle)
        memory.give_back(address, size)
