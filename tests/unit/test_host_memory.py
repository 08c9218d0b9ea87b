"""Host memory keeps the promises of device memory."""

from __future__ import annotations

import pytest
from support.memory_conformance import MemoryConformance

from worker_hooks.reasons import HookError, HookReason
from worker_hooks.weights.host_memory import GRANULARITY, HostMemory
from worker_hooks.weights.memory import DeviceMemory


class TestHostMemory(MemoryConformance):
    @pytest.fixture
    def memory(self) -> DeviceMemory:
        return HostMemory(capacity=64 * GRANULARITY)


def test_memory_must_fit_its_addresses() -> None:
    memory = HostMemory()
    address = memory.reserve(2 * GRANULARITY)
    with pytest.raises(HookError) as refused:
        memory.map(address, 2 * GRANULARITY, memory.create(GRANULARITY))
    assert refused.value.reason is HookReason.WEIGHTS_LOAD_FAILED
