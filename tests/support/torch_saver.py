"""``torch_memory_saver`` on host memory, with what torch tells of its segments (``csrc/core.cpp`` has the rules)."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from support.memory_conformance import get, put

from worker_hooks.weights.host_memory import HostMemory
from worker_hooks.weights.memory import Handle


@dataclass
class Allocation:
    address: int
    size: int
    tag: str
    handle: Handle
    active: bool = True
    pool: tuple[int, int] = (0, 1)


@dataclass
class FakeSaver:
    """Its ``region``, ``pause`` and ``resume``; beside them torch's ``cudaMalloc`` and list of segments."""

    memory: HostMemory
    allocations: list[Allocation] = field(default_factory=list)
    backed_up: set[str] = field(default_factory=set)
    _tag: str | None = None

    @contextmanager
    def region(self, tag: str, enable_cpu_backup: bool = False) -> Iterator[None]:
        assert self._tag is None
        self._tag = tag
        if enable_cpu_backup:
            self.backed_up.add(tag)
        yield
        self._tag = None

    def malloc(self, size: int) -> int:
        """What torch gets for a segment of a private pool within a region; its bytes are random."""
        assert self._tag is not None
        return self._allocate(size, self._tag, (0, 1))

    def malloc_by_another_thread(self, size: int) -> int:
        """A segment of torch's default pool, which is not the saver's, whatever region this thread is in."""
        return self._allocate(size, "", (0, 0))

    def pause(self, tag: str) -> None:
        for allocation in self._of(tag):
            assert allocation.active, "the saver ends the process where it pauses what is paused"
            self.memory.unmap(allocation.address, allocation.size)
            self.memory.release(allocation.handle)
            allocation.active = False

    def resume(self, tag: str) -> None:
        for allocation in self._of(tag):
            assert not allocation.active, "the saver ends the process where it resumes what is not paused"
            allocation.handle = self.memory.create(allocation.size)
            self.memory.map(allocation.address, allocation.size, allocation.handle)
            allocation.active = True

    def memory_snapshot(self) -> list[dict[str, Any]]:
        """As torch's."""
        return [
            {"device": 0, "address": one.address, "total_size": one.size, "segment_pool_id": one.pool}
            for one in self.allocations
        ]

    def tagged(self, tag: str) -> list[int]:
        return [allocation.address for allocation in self._of(tag)]

    def fill(self, address: int) -> None:
        put(self.memory, address, os.urandom(4096))

    def content(self, address: int) -> bytes:
        return get(self.memory, address, 4096)

    def _allocate(self, size: int, tag: str, pool: tuple[int, int]) -> int:
        address = self.memory.reserve(size)
        handle = self.memory.create(size)
        self.memory.map(address, size, handle)
        self.allocations.append(Allocation(address, size, tag, handle, pool=pool))
        self.fill(address)
        return address

    def _of(self, tag: str) -> list[Allocation]:
        return [allocation for allocation in self.allocations if allocation.tag == tag]
