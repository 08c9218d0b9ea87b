"""The agent's end of the CUDA helper: the checkpoint API, awaited, and the helper started when needed."""

from __future__ import annotations

import asyncio
import itertools
import os
import socket
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from dynamo_snapshot.agent.cuda_driver import CudaState, DeviceMap, Inventory, Operation
from dynamo_snapshot.agent.cuda_wire import Answer, Call
from dynamo_snapshot.agent.process import Process, spawn
from dynamo_snapshot.errors import SnapshotError
from dynamo_snapshot.model import Reason

REAL_DRIVER = "dynamo_snapshot.agent.cuda_bindings:open_driver"
FAKE_DRIVER = "dynamo_snapshot.agent.cuda_fake:open_driver"

_LOG_TAIL = 500
_MAX_LINE = 1 << 20


class CudaHelper:
    """An :class:`AsyncCheckpointDriver`. Any number of calls may be under way; each runs in a thread of the helper.

    A helper that dies fails the calls under way with ``cuda_helper_died``; the next call starts another.
    A call that is cancelled goes on in the helper: ask for the state before the next.

    Args:
        log: where the helper's standard error goes.
        driver: which driver it opens, as ``module:function``.
        environment: of the helper; by default the agent's own.
    """

    def __init__(self, log: Path, driver: str = REAL_DRIVER, environment: Mapping[str, str] | None = None) -> None:
        self._log = log
        self._driver = driver
        self._environment = dict(os.environ if environment is None else environment)
        self._ids = itertools.count(1)
        self._pending: dict[int, asyncio.Future[bytes]] = {}
        self._starting = asyncio.Lock()
        self._process: Process | None = None
        self._writer: asyncio.StreamWriter | None = None
        self._reading: asyncio.Task[None] | None = None

    def __repr__(self) -> str:
        return f"<CudaHelper pid={self.pid} calls={len(self._pending)}>"

    @property
    def pid(self) -> int | None:
        """Of the helper; None while none runs."""
        return None if self._process is None else self._process.pid

    async def inventory(self) -> Inventory:
        return msgspec.json.decode(await self._call(None), type=Inventory)

    async def state(self, pid: int) -> CudaState | None:
        return msgspec.json.decode(await self._call(Operation.STATE, pid=pid), type=CudaState | None)

    async def lock(self, pid: int, timeout_ms: int) -> None:
        await self._call(Operation.LOCK, pid=pid, timeout_ms=timeout_ms)

    async def checkpoint(self, pid: int) -> None:
        await self._call(Operation.CHECKPOINT, pid=pid)

    async def restore(self, pid: int, devices: DeviceMap) -> None:
        await self._call(Operation.RESTORE, pid=pid, devices=dict(devices))

    async def unlock(self, pid: int) -> None:
        await self._call(Operation.UNLOCK, pid=pid)

    async def close(self) -> None:
        """Lets the helper finish its calls and waits for its end; it is killed if the caller is cancelled."""
        process, writer = self._process, self._writer
        if process is None or writer is None:
            return
        writer.close()
        try:
            await process.wait()
        finally:
            await asyncio.shield(process.kill())
            if self._reading is not None:
                await self._reading

    async def _call(self, operation: Operation | None, **arguments: Any) -> bytes:
        writer = await self._connected()
        call = Call(id=next(self._ids), operation=operation, **arguments)
        answer: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        self._pending[call.id] = answer
        try:
            writer.write(msgspec.json.encode(call) + b"\n")
            return await answer
        finally:
            self._pending.pop(call.id, None)

    async def _connected(self) -> asyncio.StreamWriter:
        async with self._starting:
            if self._writer is None:
                ours, theirs = socket.socketpair()
                with theirs, self._log.open("ab") as log:
                    self._process = spawn(
                        [sys.executable, "-m", "dynamo_snapshot.agent.cuda_helper", str(theirs.fileno()), self._driver],
                        environment=self._environment,
                        stdout=subprocess.DEVNULL,
                        stderr=log.fileno(),
                        keep=[theirs.fileno()],
                    )
                ours.setblocking(False)
                reader, self._writer = await asyncio.open_connection(sock=ours, limit=_MAX_LINE)
                self._reading = asyncio.create_task(self._read(reader, self._process), name="cuda-helper")
            return self._writer

    async def _read(self, reader: asyncio.StreamReader, process: Process) -> None:
        decoder = msgspec.json.Decoder(Answer)
        try:
            while line := await reader.readline():
                answer = decoder.decode(line)
                waiting = self._pending.get(answer.id)
                if waiting is None or waiting.done():
                    continue
                if answer.failure is None:
                    waiting.set_result(bytes(answer.value))
                else:
                    waiting.set_exception(answer.failure.error())
        except (OSError, ValueError):
            await process.kill()  # what cannot be understood cannot be relied on
        finally:
            # A call that comes now finds no writer and starts another helper, with answers of its own.
            lost, self._pending = self._pending, {}
            self._process = self._writer = None
            code = await process.wait()
            error = SnapshotError(
                Reason.CUDA_HELPER_DIED,
                f"the CUDA helper (pid {process.pid}) ended with {code}{self._last_words()}",
                f"The next call starts another; its log is {self._log}.",
            )
            for waiting in lost.values():
                if not waiting.done():
                    waiting.set_exception(error)

    def _last_words(self) -> str:
        words = self._log.read_bytes()[-_LOG_TAIL:].decode(errors="replace").strip()
        return f": {words}" if words else ""
