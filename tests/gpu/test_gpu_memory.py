"""A GPU's memory keeps the promises that arenas and loaders rely on."""

from __future__ import annotations

import pytest
from support.memory_conformance import MemoryConformance

from worker_hooks.weights.cuda_memory import CudaMemory
from worker_hooks.weights.memory import DeviceMemory


class TestCudaMemory(MemoryConformance):
    @pytest.fixture
    def memory(self) -> DeviceMemory:
        return CudaMemory(0)
