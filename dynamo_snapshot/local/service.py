"""What the supervisor runs: a named process, when it counts as ready, and how it is ended."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path

import aiohttp

Ready = Callable[[float], Awaitable[bool]]
"""True once the process that was started at this wall-clock time does its work. Asked until it does; must not raise."""

RESTART_DELAY_S = 0.25
RESTART_DELAY_CAP_S = 10.0
STABLE_AFTER_S = 30.0
"""A process that lived this long starts again without delay from before."""


@dataclass(frozen=True, kw_only=True)
class Service:
    """One supervised process."""

    name: str
    command: tuple[str, ...]
    environment: Mapping[str, str] = field(default_factory=dict)
    """Added to the supervisor's own."""
    ready: Ready | None = None
    """None: ready as soon as it runs."""
    ready_timeout_s: float = 60.0
    stop_signal: signal.Signals = signal.SIGTERM
    stop_timeout_s: float = 10.0
    """After this the whole process group is killed."""


class ServiceState(StrEnum):
    STARTING = "starting"
    READY = "ready"
    RESTARTING = "restarting"
    STOPPED = "stopped"


@dataclass(frozen=True, kw_only=True)
class ServiceStatus:
    """A service as the live view shows it; ``since`` is wall-clock seconds."""

    name: str
    state: ServiceState
    since: float
    pid: int | None = None
    restarts: int = 0
    detail: str = ""


def restart_delay(failures_in_a_row: int, lived_s: float) -> float:
    """Seconds to wait before the next start: doubled at each early death, capped, none after a stable life."""
    if lived_s >= STABLE_AFTER_S:
        return 0.0
    return float(min(RESTART_DELAY_CAP_S, RESTART_DELAY_S * 2 ** max(0, failures_in_a_row - 1)))


def http_ok(url: str) -> Ready:
    """Ready when ``url`` answers with status 200."""

    async def check(started_at: float) -> bool:
        try:
            async with (
                aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=2)) as session,
                session.get(url) as got,
            ):
                return got.status == 200
        except (aiohttp.ClientError, OSError, TimeoutError):
            return False

    return check


def banner(host: str, port: int, beginning: bytes) -> Ready:
    """Ready when a connection to the port is greeted with ``beginning``, as NATS does with INFO."""

    async def check(started_at: float) -> bool:
        try:
            async with asyncio.timeout(2):
                reader, writer = await asyncio.open_connection(host, port)
                try:
                    return await reader.readexactly(len(beginning)) == beginning
                finally:
                    writer.close()
        except (OSError, TimeoutError, asyncio.IncompleteReadError):
            return False

    return check


def wrote(folder: Path, pattern: str) -> Ready:
    """Ready when the process has written a file in ``folder`` that matches ``pattern``."""

    def files() -> list[Path]:
        return list(folder.glob(pattern))

    async def check(started_at: float) -> bool:
        try:
            return any(path.stat().st_mtime >= started_at for path in files())
        except OSError:
            return False

    return check
