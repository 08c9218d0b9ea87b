"""Runs services in order, keeps them running, and ends them in the reverse order.

Each service is its own session and is tethered to this process: however the supervisor ends, its
services end too. A service that dies is started again, with a delay that grows and is capped.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from dynamo_snapshot.errors import SnapshotError
from dynamo_snapshot.local import tether
from dynamo_snapshot.local.service import Service, ServiceState, ServiceStatus, restart_delay
from dynamo_snapshot.model import Reason

READY_POLL_S = 0.05

OnChange = Callable[[ServiceStatus], None]


class Supervisor:
    """Owns the services of one fleet.

    Args:
        logs: the folder for ``<service>.log``; each start appends.
        on_change: called with every change of a service's state.
    """

    def __init__(self, logs: Path, on_change: OnChange = lambda status: None) -> None:
        self._logs = logs
        self._on_change = on_change
        self._keepers: dict[str, _Keeper] = {}

    async def start(self, service: Service) -> None:
        """Starts ``service`` and returns once it is ready; from then on it is kept running.

        Raises:
            SnapshotError: ``process_died`` or ``deadline_exceeded``, with the end of its log.
        """
        self._logs.mkdir(parents=True, exist_ok=True)
        keeper = _Keeper(service, self._logs / f"{service.name}.log", self._on_change)
        self._keepers[service.name] = keeper
        await keeper.start()

    async def stop(self, name: str) -> None:
        """Ends one service, gently and then not; returns when its process group is gone."""
        keeper = self._keepers.pop(name, None)
        if keeper is not None:
            await keeper.stop()

    def kill(self, name: str) -> None:
        """Ends the process that runs ``name`` now, whose keeper then starts it again."""
        pid = self.pid(name)
        if pid is not None:
            os.kill(pid, signal.SIGKILL)

    async def stop_all(self) -> None:
        """Ends every service in the reverse order of their start."""
        for name in reversed(list(self._keepers)):
            await self.stop(name)

    def status(self) -> tuple[ServiceStatus, ...]:
        return tuple(keeper.status for keeper in self._keepers.values())

    def pid(self, name: str) -> int | None:
        """The process that runs ``name`` now; None while it is down."""
        keeper = self._keepers.get(name)
        return keeper.status.pid if keeper else None

    def __repr__(self) -> str:
        return f"Supervisor({', '.join(f'{status.name}={status.state}' for status in self.status())})"


class _Keeper:
    """One service and the task that keeps it running."""

    def __init__(self, service: Service, log: Path, on_change: OnChange) -> None:
        self.service = service
        self.status = ServiceStatus(name=service.name, state=ServiceState.STARTING, since=time.time())
        self._log = log
        self._on_change = on_change
        self._process: asyncio.subprocess.Process | None = None
        self._spawned_at = 0.0
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        started = time.monotonic()
        process = await self._spawn()
        try:
            await self._until_ready(process)
        except BaseException:
            await self._end(process)
            self._change(ServiceState.STOPPED)
            raise
        self._task = asyncio.create_task(self._keep(process, started), name=f"keep {self.service.name}")

    async def stop(self) -> None:
        if self._task is not None:
            self._task.cancel()
            with suppress(asyncio.CancelledError):
                await self._task
        if self._process is not None:
            await self._end(self._process)
        self._change(ServiceState.STOPPED)

    async def _keep(self, process: asyncio.subprocess.Process, started: float) -> None:
        failures, what = 0, ""
        running: asyncio.subprocess.Process | None = process
        while True:
            if running is not None:
                code = await running.wait()
                await self._end(running)
                self._process = None  # its pid may be somebody else's from now on
                what = f"{_ended(code)} after {time.monotonic() - started:.1f} s"
            lived = time.monotonic() - started
            failures = 1 if restart_delay(1, lived) == 0.0 else failures + 1
            delay = restart_delay(failures, lived)
            self._change(ServiceState.RESTARTING, f"{what}, again in {delay:.2g} s; its log is {self._log}")
            await asyncio.sleep(delay)
            started = time.monotonic()
            running = None
            try:
                running = await self._spawn()
                await self._until_ready(running)
            except SnapshotError as error:
                # It is kept trying; who waits for it sees the state and the log.
                what = error.message
                self._change(ServiceState.RESTARTING, f"{what}; its log is {self._log}")
                if running is not None:
                    await self._end(running)

    async def _spawn(self) -> asyncio.subprocess.Process:
        service = self.service
        self._spawned_at = time.time()
        try:
            with self._log.open("ab") as log:
                # Forked by the main thread: the parent-death signal follows the thread that forks.
                process = await asyncio.create_subprocess_exec(
                    sys.executable, "-I", "-S", str(Path(tether.__file__)), str(os.getpid()), *service.command,
                    env={**os.environ, **service.environment},
                    stdin=asyncio.subprocess.DEVNULL,
                    stdout=log,
                    stderr=asyncio.subprocess.STDOUT,
                    start_new_session=True,
                )  # fmt: skip
        except OSError as error:
            raise SnapshotError(Reason.PROCESS_DIED, f"{service.name} cannot be started: {error}") from error
        self._process = process
        self._change(ServiceState.STARTING, restarts=self.status.restarts + (self._task is not None))
        return process

    async def _until_ready(self, process: asyncio.subprocess.Process) -> None:
        service = self.service
        deadline = time.monotonic() + service.ready_timeout_s
        while service.ready is not None and not await service.ready(self._spawned_at):
            if process.returncode is not None:
                raise SnapshotError(
                    Reason.PROCESS_DIED,
                    f"{service.name} {_ended(process.returncode)} before it was ready: {last_line(self._log)}",
                    f"Its log is {self._log}.",
                )
            if time.monotonic() > deadline:
                raise SnapshotError(
                    Reason.DEADLINE_EXCEEDED,
                    f"{service.name} is not ready after {service.ready_timeout_s:.0f} s: {last_line(self._log)}",
                    f"Its log is {self._log}.",
                )
            await asyncio.sleep(READY_POLL_S)
        self._change(ServiceState.READY)

    async def _end(self, process: asyncio.subprocess.Process) -> None:
        """Ends the service's process, then whatever is left of its process group."""
        if process.returncode is None:
            with suppress(ProcessLookupError):
                process.send_signal(self.service.stop_signal)
            try:
                async with asyncio.timeout(self.service.stop_timeout_s):
                    await process.wait()
            except TimeoutError:
                with suppress(ProcessLookupError):
                    process.kill()
                await process.wait()
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)

    def _change(self, state: ServiceState, detail: str = "", restarts: int | None = None) -> None:
        running = self._process is not None and self._process.returncode is None
        self.status = ServiceStatus(
            name=self.service.name,
            state=state,
            since=time.time(),
            pid=self._process.pid if self._process is not None and running else None,
            restarts=self.status.restarts if restarts is None else restarts,
            detail=detail,
        )
        self._on_change(self.status)


def last_line(log: Path) -> str:
    """The last line of ``log`` that says something; a stand-in text where there is none."""
    try:
        lines = log.read_bytes()[-8192:].decode("utf-8", "replace").splitlines()
    except OSError:
        lines = []
    return next((line.strip()[-400:] for line in reversed(lines) if line.strip()), "it wrote nothing")


def _ended(code: int | None) -> str:
    if code is None:
        return "is running"
    if code < 0:
        return f"was ended by {signal.Signals(-code).name}"
    return f"exited with status {code}"
