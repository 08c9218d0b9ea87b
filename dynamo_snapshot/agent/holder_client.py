"""The agent's end of a holder's socket."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import struct
from collections import deque
from pathlib import Path
from typing import Any

from dynamo_snapshot.errors import SnapshotError
from dynamo_snapshot.model import Exit, Reason
from worker_hooks import holder

ANSWER_TIMEOUT_S = 5.0


class HolderClient:
    """One connection to one house's holder; ``exited`` and ``lost`` complete without being asked for."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, pid: int) -> None:
        self.pid = pid
        """Of the holder, in the agent's pid namespace."""
        loop = asyncio.get_running_loop()
        self.exited: asyncio.Future[Exit] = loop.create_future()
        """The worker's end, as its parent saw it."""
        self.lost: asyncio.Future[None] = loop.create_future()
        """Done when the connection is closed: the holder has ended."""
        self._reader, self._writer = reader, writer
        self._answers: deque[asyncio.Future[dict[str, Any]]] = deque()
        self._task = asyncio.create_task(self._read(), name=f"holder-{pid}")

    @classmethod
    async def connect(cls, house: Path) -> HolderClient:
        """Connects to the holder of the house in ``house``; raises ``OSError`` if there is none."""
        folder = os.open(house, os.O_PATH | os.O_DIRECTORY)
        try:
            # Through the descriptor: a socket's path may have 107 bytes, a house's path may be longer.
            connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            try:
                connection.connect(f"/proc/self/fd/{folder}/{holder.SOCKET}")
            except OSError:
                connection.close()
                raise
        finally:
            os.close(folder)
        connection.setblocking(False)
        # The kernel noted who listened, and says so in the number this process knows it by.
        credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
        pid = struct.unpack("3i", credentials)[0]
        reader, writer = await asyncio.open_unix_connection(sock=connection)
        return cls(reader, writer, pid)

    async def start(self, command: list[str], environment: dict[str, str], cwd: str, log: str) -> int:
        """Starts the worker; returns its pid inside the house."""
        answer = await self._ask({"do": "start", "command": command, "env": environment, "cwd": cwd, "log": log})
        return int(answer["pid"])

    async def expect(self, pid: int) -> None:
        """Tells the holder that a restore is about to make ``pid`` (inside the house) its worker."""
        await self._ask({"do": "expect", "pid": pid})

    async def signal(self, number: int) -> bool:
        """Signals the worker; False if there is none any more."""
        return bool((await self._ask({"do": "signal", "signal": number}))["sent"])

    async def worker(self) -> int | None:
        """The worker's pid inside the house; None in stand-by."""
        pid = (await self._ask({"do": "status"}))["pid"]
        return None if pid is None else int(pid)

    def end(self) -> None:
        """Ends the house: the holder goes, and the kernel kills all that is left in its pid namespace."""
        if not self._writer.is_closing():
            self._writer.write(b'{"do": "end"}\n')

    async def close(self) -> None:
        """Leaves the holder and its worker alone."""
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
        self._writer.close()

    async def _ask(self, request: dict[str, object]) -> dict[str, Any]:
        answer: asyncio.Future[dict[str, Any]] = asyncio.get_running_loop().create_future()
        if self.lost.done():
            raise self._gone(request)
        self._answers.append(answer)
        self._writer.write(json.dumps(request).encode() + b"\n")
        try:
            async with asyncio.timeout(ANSWER_TIMEOUT_S):  # wait_for can lose a cancellation that meets the answer
                found = await answer
        except TimeoutError:
            raise SnapshotError(
                Reason.HOLDER_FAILED, f"the holder (pid {self.pid}) did not answer in {ANSWER_TIMEOUT_S:g} s"
            ) from None
        if "error" in found:
            raise SnapshotError(Reason.HOLDER_FAILED, f"the holder cannot {request['do']}: {found['error']}")
        return found

    async def _read(self) -> None:
        try:
            while line := await self._reader.readline():
                message = json.loads(line)
                if message.get("event") == "exit":
                    if not self.exited.done():
                        self.exited.set_result(Exit(code=message["code"], at=message["at"]))
                elif self._answers:
                    waiting = self._answers.popleft()
                    if not waiting.done():
                        waiting.set_result(message)
        except (OSError, ValueError):
            pass  # a broken connection is a lost holder
        finally:
            if not self.lost.done():
                self.lost.set_result(None)
            for waiting in self._answers:
                if not waiting.done():
                    waiting.set_exception(self._gone({"do": "answer"}))

    def _gone(self, request: dict[str, object]) -> SnapshotError:
        return SnapshotError(Reason.HOLDER_FAILED, f"the holder (pid {self.pid}) has ended and cannot {request['do']}")
