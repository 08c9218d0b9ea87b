"""Which process runs the fleet of a runtime folder: a lock that ends with it, and its number beside the lock."""

from __future__ import annotations

import fcntl
import os
import time
from pathlib import Path
from typing import IO

from dynamo_snapshot.agent.entry import LOCK as AGENT_LOCK
from dynamo_snapshot.errors import SnapshotError
from dynamo_snapshot.model import Reason
from dynamo_snapshot.snapshots.locks import is_held

_LOOK_S = 0.2
"""Who only looks holds the lock for an instant: it is tried for this long."""


class Ownership:
    """A runtime folder that is this process's; ends with the process or :meth:`give_up`."""

    def __init__(self, file: IO[str]) -> None:
        self._file = file

    def give_up(self) -> None:
        """The fleet has been taken down: nobody ran it who is missed."""
        self._file.truncate(0)
        self._file.close()


def take(runtime_dir: Path) -> Ownership:
    """Takes ``runtime_dir``, which is made where it is missing, for this process.

    Raises:
        SnapshotError: ``runtime_dir_in_use`` naming the process that has it; ``configuration_invalid`` where it
            cannot be made, ``not_privileged`` where this user may not.
    """
    try:
        runtime_dir.mkdir(parents=True, exist_ok=True)
        file = _lock_file(runtime_dir).open("a+")
    except OSError as error:
        raise SnapshotError(
            Reason.NOT_PRIVILEGED if isinstance(error, PermissionError) else Reason.CONFIGURATION_INVALID,
            f"agent.runtime_dir: {runtime_dir} cannot be used: {error.strerror}",
            "Run as root, or name another folder.",
        ) from error
    deadline = time.monotonic() + _LOOK_S
    while True:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            break
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
    return Ownership(file)


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


def _lock_file(runtime_dir: Path) -> Path:
    # Beside the folder, which is emptied under the lock.
    return runtime_dir.parent / f".{runtime_dir.name}.lock"
