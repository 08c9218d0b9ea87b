"""A child process that stays and answers requests: started by the first, restarted after its death.

What talks to a driver lives in such a child, so that a driver's crash or hang is never the agent's.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec

from dynamo_snapshot.agent.process import Process, spawn
from dynamo_snapshot.agent.resident_wire import Answer, Request
from dynamo_snapshot.errors import SnapshotError
from dynamo_snapshot.model import Reason

_LOG_TAIL = 500
_MAX_LINE = 1 << 20


class Resident:
    """A child that runs :func:`dynamo_snapshot.agent.resident_wire.serve`; any number of requests may be under way.

    A child that dies fails the requests under way with ``died``; the next request starts another. A request
    that is cancelled goes on in the child.

    Args:
        name: for messages, as "CUDA helper".
        module: run as ``python -m module FD arguments…``, where FD is its end of the connection.
        arguments: of the child.
        log: where its standard error goes.
        died: the reason of requests lost with it.
        environment: of the child; by default the agent's own.
    """

    def __init__(
        self,
        name: str,
        module: str,
        arguments: Sequence[str],
        *,
        log: Path,
        died: Reason,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self._name, self._module, self._arguments = name, module, tuple(arguments)
        self._log, self._died = log, died
        self._environment = dict(os.environ if environment is None else environment)
        self._ids = itertools.count(1)
        self._pending: dict[int, asyncio.Future[bytes]] = {}
        self._starting = asyncio.Lock()
        self._process: Process | None = None
        self._writer: asyncio.StreamWriter | None = None
        self._reading: asyncio.Task[None] | None = None
        self._closing = False

    def __repr__(self) -> str:
        return f"<{self._name} pid={self.pid} requests={len(self._pending)}>"

    @property
    def pid(self) -> int | None:
        """Of the child; None while none runs."""
        return None if self._process is None else self._process.pid

    async def ask(self, body: object, pid: int | None = None) -> bytes:
        """Sends ``body`` (encoded as JSON) and returns the answer's value, still encoded.

        Args:
            pid: of the child that alone can answer, as it holds what this is about; None: any.

        Raises:
            SnapshotError: the child's failure, or ``died``.
        """
        if pid not in (None, self.pid):
            raise SnapshotError(self._died, f"the {self._name} (pid {pid}) has ended, and what it held with it")
        writer = await self._connected()
        request = Request(id=next(self._ids), body=msgspec.Raw(msgspec.json.encode(body)))
        answer: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        self._pending[request.id] = answer
        try:
            writer.write(msgspec.json.encode(request) + b"\n")
            return await answer
        finally:
            self._pending.pop(request.id, None)

    async def close(self) -> None:
        """Lets the child finish what is under way and waits for its end; kills it if the caller is cancelled.

        Requests that come meanwhile fail with ``died``.
        """
        process, writer, reading = self._process, self._writer, self._reading
        if process is None or writer is None or reading is None:
            return
        self._closing = True
        try:
            writer.write_eof()
            await process.wait()
        finally:
            await asyncio.shield(process.kill())
            await reading
            self._closing = False

    async def _connected(self) -> asyncio.StreamWriter:
        async with self._starting:
            if self._closing:
                raise SnapshotError(self._died, f"the {self._name} is being ended, and what it holds with it")
            if self._writer is None:
                ours, theirs = socket.socketpair()
                with theirs, self._log.open("ab") as log:
                    process = spawn(
                        [sys.executable, "-m", self._module, str(theirs.fileno()), *self._arguments],
                        environment=self._environment,
                        stdout=subprocess.DEVNULL,
                        stderr=log.fileno(),
                        keep=[theirs.fileno()],
                    )
                ours.setblocking(False)
                try:
                    reader, writer = await asyncio.open_connection(sock=ours, limit=_MAX_LINE)
                except BaseException:
                    ours.close()
                    await process.kill()
                    raise
                self._process, self._writer = process, writer
                self._reading = asyncio.create_task(self._read(reader, process), name=self._name)
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
            # A request that comes now finds no writer and starts another child, with answers of its own.
            lost, self._pending = self._pending, {}
            if self._writer is not None:
                self._writer.close()
            self._process = self._writer = None
            code = await process.wait()
            words = self._last_words() if lost else ""
            for waiting in lost.values():
                if not waiting.done():
                    waiting.set_exception(self._death(process.pid, code, words))

    def _last_words(self) -> str:
        try:
            with self._log.open("rb") as file:
                file.seek(max(0, file.seek(0, os.SEEK_END) - _LOG_TAIL))
                return file.read().decode(errors="replace").strip()
        except OSError:  # somebody has taken the log away
            return ""

    def _death(self, pid: int, code: int, words: str) -> SnapshotError:
        return SnapshotError(
            self._died,
            f"the {self._name} (pid {pid}) ended with {code}{f': {words}' if words else ''}",
            f"The next request starts another; its log is {self._log}.",
        )
