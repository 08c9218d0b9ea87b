"""The control directory: file names, variables, and how the worker writes, reads and waits.

The names are NVIDIA Snapshot's public contract and ``dynamo.common.snapshot``'s; a test holds them
against the installed ``dynamo.common.snapshot.constants``. ``worker-state.json`` is this project's
own addition: what the worker's lifecycle says, for the agent to read.

Every file appears by a rename, so a reader sees all of it or nothing. Nothing is fsynced: no process
that a file here speaks to outlives the machine's boot.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import signal
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TypeVar

from worker_hooks.inotify import DirectoryWatch
from worker_hooks.reasons import HookError, HookReason

logger = logging.getLogger(__name__)

T = TypeVar("T")

CONTROL_DIR_ENV = "SNAPSHOT_CONTROL_DIR"
"""Set: the worker is to become ready-for-snapshot and wait there."""
LEGACY_CONTROL_DIR_ENV = "DYN_SNAPSHOT_CONTROL_DIR"
"""The same under Dynamo's older name; both are always set together."""
STATE_DIR_ENV = "DYNAMO_SNAPSHOT_STATE_DIR"
"""Where the worker keeps ``worker-state.json``: its control directory, set whether or not a capture is wanted."""
INCARNATION_ENV = "DYNAMO_SNAPSHOT_INCARNATION"
"""The incarnation that a cold start begins; a restore context overrides it."""
DRAIN_TIMEOUT_ENV = "DYNAMO_SNAPSHOT_DRAIN_TIMEOUT_S"
"""Seconds that requests in flight get after SIGTERM."""

READY_FOR_SNAPSHOT = "ready-for-snapshot"
SNAPSHOT_COMPLETE = "snapshot-complete"
RESTORE_COMPLETE = "restore-complete"
RESTORE_CONTEXT = "restore-context.json"
WAKE = "wake"
"""This project's own too: a parked worker goes on."""
WORKER_STATE = "worker-state.json"

RECHECK_S = 1.0
"""How long a wait trusts inotify before it looks again by itself."""


@dataclass(frozen=True)
class RestoreContext:
    """What an incarnation is told of itself: variables to set (or, with None, to unset) and its name."""

    env: Mapping[str, str | None]
    incarnation: str | None = None
    park: bool = False
    """It is to wait, as this incarnation and before it resumes, until it is woken."""


@dataclass(frozen=True)
class Release:
    """What ended the wait at ready-for-snapshot.

    ``captured`` means ``snapshot-complete``: by NVIDIA Snapshot's contract the worker ends. Otherwise
    it was ``restore-complete``, for the incarnation it names; None when its writer named none.
    """

    captured: bool
    incarnation: str | None = None


@dataclass(frozen=True)
class WorkerState:
    """``worker-state.json``: the worker's lifecycle as the worker itself sees it, wall-clock seconds.

    What has a default may be missing in the account of a worker that writes the file by itself.
    """

    state: str
    since: float
    incarnation: str | None = None
    pid: int | None = None
    """In the worker's own pid namespace."""
    reason: str | None = None
    message: str = ""
    self_test_at: float | None = None
    """When this incarnation passed its self-test."""
    history: tuple[tuple[str, float], ...] = ()
    """Each state and when it began, the states before a capture included."""
    evidence: Mapping[str, str] = field(default_factory=dict)

    def to_json(self) -> str:
        return json.dumps(asdict(self), sort_keys=True) + "\n"


class ControlDirectory:
    """A worker's own control directory."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __repr__(self) -> str:
        return f"ControlDirectory({str(self.path)!r})"

    def prepare(self) -> None:
        """Makes the directory and removes what an earlier incarnation left: stale files never count."""
        self.path.mkdir(parents=True, exist_ok=True)
        for name in (READY_FOR_SNAPSHOT, SNAPSHOT_COMPLETE, RESTORE_COMPLETE, RESTORE_CONTEXT, WAKE, WORKER_STATE):
            (self.path / name).unlink(missing_ok=True)

    def write_ready(self) -> None:
        self._write(READY_FOR_SNAPSHOT, "ready")

    def remove_ready(self) -> None:
        """After a release: the worker is not ready any more. ``restore-complete`` stays, the kubelet reads it too."""
        (self.path / READY_FOR_SNAPSHOT).unlink(missing_ok=True)

    def write_state(self, state: WorkerState) -> None:
        self._write(WORKER_STATE, state.to_json())

    def read_restore_context(self) -> RestoreContext:
        """Returns the restore context.

        Raises:
            HookError: ``restore_context_missing`` or ``restore_context_corrupt``.
        """
        path = self.path / RESTORE_CONTEXT
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
        except FileNotFoundError as error:
            raise HookError(HookReason.RESTORE_CONTEXT_MISSING, f"{path} does not exist") from error
        except (OSError, ValueError) as error:
            raise HookError(HookReason.RESTORE_CONTEXT_CORRUPT, f"{path} cannot be read: {error}") from error
        problem = _context_problem(content)
        if problem:
            raise HookError(HookReason.RESTORE_CONTEXT_CORRUPT, f"{path}: {problem}")
        return RestoreContext(
            env=content["env"], incarnation=content.get("incarnation"), park=content.get("park", False)
        )

    def release(self) -> Release | None:
        """What the directory says now; None: go on waiting."""
        if (self.path / SNAPSHOT_COMPLETE).exists():
            return Release(captured=True)
        return self._released_by(RESTORE_COMPLETE)

    def woken(self) -> Release | None:
        """Likewise for a parked worker."""
        return self._released_by(WAKE)

    async def wait_release(self) -> Release:
        """Returns once the worker is released."""
        return await self._first(self.release)

    async def wait_woken(self) -> Release:
        """Returns once the parked worker is woken."""
        return await self._first(self.woken)

    async def _first(self, look: Callable[[], T | None]) -> T:
        """Returns the first answer of ``look`` at the directory that is not None.

        The process may be frozen in here, and go on in another mount namespace where another directory
        lies at the same path. CRIU carries the inotify watch over by that path; should it have bound it to
        the source's directory instead, the watch is renewed after :data:`RECHECK_S`, or at once on SIGCONT,
        which the agent may send (a process that does not know it ignores it).
        """
        try:
            watch = DirectoryWatch(self.path)
        except OSError as error:  # such as at the host's limit of watches: slower is better than not at all
            logger.warning("%s cannot be watched, looking every %g s: %s", self.path, RECHECK_S, error)
            return await _regularly(look)
        loop = asyncio.get_running_loop()
        changed = asyncio.Event()
        with watch:

            def look_again() -> None:
                watch.drain()
                changed.set()

            def continued() -> None:
                watch.renew()
                changed.set()

            loop.add_reader(watch.fileno(), look_again)
            handles_signals = _add_signal_handler(loop, signal.SIGCONT, continued)
            try:
                while True:
                    changed.clear()
                    if (found := look()) is not None:
                        return found
                    try:
                        async with asyncio.timeout(RECHECK_S):
                            await changed.wait()
                    except TimeoutError:
                        watch.renew()
            finally:
                loop.remove_reader(watch.fileno())
                if handles_signals:
                    loop.remove_signal_handler(signal.SIGCONT)

    def _released_by(self, name: str) -> Release | None:
        try:
            content = (self.path / name).read_text(encoding="utf-8", errors="replace")
        except FileNotFoundError:
            return None
        first = content.partition("\n")[0]
        return Release(
            captured=False, incarnation=first.removeprefix("incarnation=") if "incarnation=" in first else None
        )

    def _write(self, name: str, content: str) -> None:
        temporary = self.path / f".{name}.{os.getpid()}.tmp"
        temporary.write_text(content, encoding="utf-8")
        temporary.replace(self.path / name)


def control_directory(environ: Mapping[str, str]) -> ControlDirectory | None:
    """The directory that ``environ`` names, for the state or for a capture; None: nobody watches this worker."""
    path = environ.get(STATE_DIR_ENV) or capture_directory(environ)
    return ControlDirectory(Path(path)) if path else None


def capture_directory(environ: Mapping[str, str]) -> str | None:
    """Where a capture is wanted; None: it is not."""
    return environ.get(CONTROL_DIR_ENV) or environ.get(LEGACY_CONTROL_DIR_ENV) or None


async def _regularly(look: Callable[[], T | None]) -> T:
    while (found := look()) is None:  # noqa: ASYNC110  # there is nothing that could tell
        await asyncio.sleep(RECHECK_S)
    return found


def _context_problem(content: object) -> str | None:
    if not isinstance(content, dict):
        return f"expected an object, found {type(content).__name__}"
    if not isinstance(content.get("env"), dict):
        return "expected an object under 'env'"
    for name, value in content["env"].items():
        if value is not None and not isinstance(value, str):
            return f"env {name}: expected a string or null, found {type(value).__name__}"
    incarnation = content.get("incarnation")
    if incarnation is not None and not isinstance(incarnation, str):
        return f"incarnation: expected a string, found {type(incarnation).__name__}"
    park = content.get("park", False)
    if not isinstance(park, bool):
        return f"park: expected true or false, found {type(park).__name__}"
    return None


def _add_signal_handler(loop: asyncio.AbstractEventLoop, number: int, handler: object) -> bool:
    try:
        loop.add_signal_handler(number, handler)  # type: ignore[arg-type]  # any callable; typeshed wants the exact one
    except (NotImplementedError, RuntimeError, ValueError):  # not the main thread: the net of RECHECK_S remains
        return False
    return True
