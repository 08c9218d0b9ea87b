"""The fake driver as the agent's code wants it: awaited, in this process."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TypeVar

from dynamo_snapshot.agent.cuda.driver import CudaState, DeviceMap, Inventory
from dynamo_snapshot.agent.cuda.fake import FakeDriver, FakeProcess, Script

T = TypeVar("T")


class InProcess:
    """An ``AsyncCheckpointDriver`` over a fake; each call yields to the loop before and after it."""

    def __init__(self, **processes: FakeProcess) -> None:
        self.fake = FakeDriver(Script(processes={int(name[1:]): process for name, process in processes.items()}))

    async def inventory(self) -> Inventory:
        return await self._call(self.fake.inventory)

    async def state(self, pid: int) -> CudaState | None:
        return await self._call(lambda: self.fake.state(pid))

    async def lock(self, pid: int, timeout_ms: int) -> None:
        await self._call(lambda: self.fake.lock(pid, timeout_ms))

    async def checkpoint(self, pid: int) -> None:
        await self._call(lambda: self.fake.checkpoint(pid))

    async def restore(self, pid: int, devices: DeviceMap) -> None:
        await self._call(lambda: self.fake.restore(pid, devices))

    async def unlock(self, pid: int) -> None:
        await self._call(lambda: self.fake.unlock(pid))

    @staticmethod
    async def _call(make: Callable[[], T]) -> T:
        await asyncio.sleep(0)
        try:
            return make()
        finally:
            await asyncio.sleep(0)
