"""The agent's end of the CUDA helper: the checkpoint API, awaited."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import msgspec

from dynamo_snapshot.agent.cuda.driver import CudaState, DeviceMap, Inventory, Operation
from dynamo_snapshot.agent.cuda.helper import Call
from dynamo_snapshot.agent.resident import Resident
from dynamo_snapshot.model import Reason

REAL_DRIVER = "dynamo_snapshot.agent.cuda.bindings:open_driver"
FAKE_DRIVER = "dynamo_snapshot.agent.cuda.fake:open_driver"


class CudaHelper:
    """An :class:`AsyncCheckpointDriver` over one resident helper process; each call runs in a thread of it.

    A helper that dies fails the calls under way with ``cuda_helper_died``; the next call starts another.
    A call that is cancelled goes on in the helper: ask for the state before the next.

    Args:
        log: where the helper's standard error goes.
        driver: which driver it opens, as ``module:function``.
        environment: of the helper; by default the agent's own.
    """

    def __init__(self, log: Path, driver: str = REAL_DRIVER, environment: Mapping[str, str] | None = None) -> None:
        self._resident = Resident(
            "CUDA helper",
            "dynamo_snapshot.agent.cuda.helper",
            [driver],
            log=log,
            died=Reason.CUDA_HELPER_DIED,
            environment=environment,
        )

    def __repr__(self) -> str:
        return repr(self._resident)

    @property
    def pid(self) -> int | None:
        """Of the helper; None while none runs."""
        return self._resident.pid

    async def inventory(self) -> Inventory:
        return msgspec.json.decode(await self._resident.ask(Call()), type=Inventory)

    async def state(self, pid: int) -> CudaState | None:
        answer = await self._resident.ask(Call(operation=Operation.STATE, pid=pid))
        return msgspec.json.decode(answer, type=CudaState | None)

    async def lock(self, pid: int, timeout_ms: int) -> None:
        await self._resident.ask(Call(operation=Operation.LOCK, pid=pid, timeout_ms=timeout_ms))

    async def checkpoint(self, pid: int) -> None:
        await self._resident.ask(Call(operation=Operation.CHECKPOINT, pid=pid))

    async def restore(self, pid: int, devices: DeviceMap) -> None:
        await self._resident.ask(Call(operation=Operation.RESTORE, pid=pid, devices=dict(devices)))

    async def unlock(self, pid: int) -> None:
        await self._resident.ask(Call(operation=Operation.UNLOCK, pid=pid))

    async def close(self) -> None:
        """Lets the helper finish its calls and waits for its end."""
        await self._resident.close()
