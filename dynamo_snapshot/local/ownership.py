"""Which process runs the fleet of a runtime folder: a lock that ends with it, and its number beside the lock."""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO

from dynamo_snapshot.agent.entry import LOCK as AGENT_LOCK
from dynamo_snapshot.errors import SnapshotError
from dynamo_snapshot.local.leftovers import KEPT
from dynamo_snapshot.local.processes import FLEET_STATUS
from dynamo_snapshot.model import Reason
from dynamo_snapshot.snapshots.locks import is_held

_LOOK_S = 0.2
"""Who only looks holds the lock for an instant: it is tried for this long."""


class Ownership:
    """A runtime folder that is this process's; ends with the process or :meth:`give_up`.

    Args:
        file: the lock.
        made: folders that were made for it, the innermost first.
    """

    def __init__(self, file: IO[str], made: Sequence[Path]) -> None:
        self._file, self._made = file, made

    def give_up(self) -> None:
        """The fleet has been taken down: nobody ran it who is missed. What was made here and is empty goes."""
        self._file.truncate(0)
        with suppress(OSError):
            for folder in self._made:
                folder.rmdir()
                if folder == self._made[0]:
                    # Who has it open and waits for it sees that it is not the one that is there.
                    _lock_file(folder).unlink()
        self._file.close()


def take(runtime_dir: Path) -> Ownership:
    """Takes ``runtime_dir``, which is made where it is missing, for this process.

    Raises:
        SnapshotError: ``runtime_dir_in_use`` naming the process that has it; ``configuration_invalid`` where it
            cannot be made or has files that are no fleet's, ``not_privileged`` where this user may not.
    """
    _refuse_foreign(runtime_dir)
    made = [folder for folder in (runtime_dir, *runtime_dir.parents) if _is_missing(folder)]
    file = _opened(runtime_dir)
    deadline = time.monotonic() + _LOOK_S
    while True:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if _is_there(file, _lock_file(runtime_dir)):
                break
            file.close()
            file = _opened(runtime_dir)
        except BlockingIOError as error:
            if time.monotonic() < deadline:
                time.sleep(0.01)
                continue
            file.seek(0)
            holder = file.read().strip() or "unknown"
            file.close()
            raise SnapshotError(
                Reason.RUNTIME_DIR_IN_USE,
                f"a fleet already runs in {runtime_dir}, under process {holder}",
                "Stop it with Ctrl-C, or give this fleet another agent.runtime_dir.",
            ) from error
    file.truncate(0)
    file.write(f"{os.getpid()}\n")
    file.flush()
    return Ownership(file, made)


def _refuse_foreign(runtime_dir: Path) -> None:
    """Raises ``configuration_invalid`` where files are that are no fleet's: what runs here empties the folder."""
    try:
        names = {entry.name for entry in runtime_dir.iterdir()}
    except OSError:
        return  # not there, or said when it is taken
    marks = (_lock_file(runtime_dir), runtime_dir / AGENT_LOCK, runtime_dir / FLEET_STATUS)
    if names - set(KEPT) and not any(mark.exists() for mark in marks):
        raise SnapshotError(
            Reason.CONFIGURATION_INVALID,
            f"agent.runtime_dir: {runtime_dir} has other files in it, and a fleet would remove them",
            "Name a new or empty folder.",
        )


def deserter(runtime_dir: Path) -> int | None:
    """The process that ran the fleet of ``runtime_dir`` and ended without taking it down.

    None: one runs it, it was taken down, or its parts run without `up`, each by itself.
    """
    try:
        pid = int(_lock_file(runtime_dir).read_text())
    except (OSError, ValueError):
        return None
    # An agent that somebody started by itself, in the folder of a fleet that was killed before.
    return None if is_held(_lock_file(runtime_dir)) or is_held(runtime_dir / AGENT_LOCK) else pid


def _opened(runtime_dir: Path) -> IO[str]:
    try:
        runtime_dir.mkdir(parents=True, exist_ok=True)
        return _lock_file(runtime_dir).open("a+")
    except OSError as error:
        raise SnapshotError(
            Reason.NOT_PRIVILEGED if isinstance(error, PermissionError) else Reason.CONFIGURATION_INVALID,
            f"agent.runtime_dir: {runtime_dir} cannot be used: {error.strerror}",
            "Run as root, or name another folder.",
        ) from error


def _is_there(file: IO[str], path: Path) -> bool:
    """Whether ``path`` leads to ``file``: an owner that gave up may have removed it since it was opened."""
    try:
        return os.path.samestat(os.fstat(file.fileno()), path.stat())
    except OSError:
        return False


def _is_missing(folder: Path) -> bool:
    try:
        folder.stat()
    except FileNotFoundError:
        return True
    except OSError:
        return False  # whatever it is, it is not made here
    return False


def _lock_file(runtime_dir: Path) -> Path:
    # Beside the folder, which is emptied under the lock.
    return runtime_dir.parent / f".{runtime_dir.name}.lock"
