"""The runtime folders of `capture` and `restore`: each goes with its command, or with the next one if it was killed."""

from __future__ import annotations

import asyncio
import os
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

from dynamo_snapshot.agent.entry import LOCK, hold_runtime_dir
from dynamo_snapshot.agent.teardown import teardown
from dynamo_snapshot.errors import SnapshotError
from dynamo_snapshot.model import Reason, WorkerSpec
from dynamo_snapshot.snapshots.locks import is_held

DIRECT_DIR = Path("/run/dynamo-snapshot-direct")
"""Where such a folder is unless another is named: not in a fleet's, whose start removes what it finds there."""
MARK = "of-one-command"
"""A file in it, with the command's process."""
_DRAIN_S = WorkerSpec(command=()).drain_timeout_s


@asynccontextmanager
async def own_folder(folder: Path) -> AsyncIterator[list[str]]:
    """``folder`` is this command's within; yields what was left in it and beside it by killed ones, and removed.

    Raises:
        SnapshotError: ``configuration_invalid`` where it has other files; ``runtime_dir_in_use``; ``not_privileged``.
    """
    refuse_foreign(folder)
    lock = hold_runtime_dir(folder)
    try:
        removed = await _emptied(folder) if (folder / MARK).exists() else []
        (folder / MARK).write_text(f"{os.getpid()}\n")
        if folder.parent == DIRECT_DIR:
            for other in abandoned(DIRECT_DIR):
                removed += await _remove(other)
        try:
            yield removed
        finally:
            await teardown(folder)
            await asyncio.to_thread(shutil.rmtree, folder, ignore_errors=True)
            _remove_if_empty(DIRECT_DIR)
    finally:
        os.close(lock)


def abandoned(parent: Path) -> list[Path]:
    """Folders in ``parent`` whose command has ended and not removed them; their workers may still serve."""
    return [mark.parent for mark in sorted(parent.glob(f"*/{MARK}")) if not is_held(mark.parent / LOCK)]


def refuse_foreign(folder: Path) -> None:
    """Raises ``configuration_invalid`` if ``folder`` has files that are no command's: it is deleted afterwards."""
    try:
        names = {entry.name for entry in folder.iterdir()}
    except OSError:
        return  # not there, or said when it is taken
    if MARK not in names and names - {LOCK.parts[0]}:
        raise SnapshotError(
            Reason.CONFIGURATION_INVALID,
            f"{folder} has other files in it, and this command would remove them",
            "Name a new or empty folder with --runtime-dir.",
        )


async def _remove(folder: Path) -> list[str]:
    try:
        lock = hold_runtime_dir(folder)
    except SnapshotError:
        return []  # another command is at it
    try:
        # Another command may have removed it since we looked: then only our lock is there.
        removed = await _emptied(folder) if (folder / MARK).exists() else []
        await asyncio.to_thread(shutil.rmtree, folder, ignore_errors=True)
        return removed
    finally:
        os.close(lock)


async def _emptied(folder: Path) -> list[str]:
    """Drains and removes the replicas of a killed command; returns their names with its process and folder."""
    pid = (folder / MARK).read_text().strip()
    replicas = [path.name for path in (folder / "replicas").glob("*")]
    await teardown(folder, _DRAIN_S)
    await asyncio.to_thread(_clear, folder)
    return [f"{name} of process {pid}, in {folder}" for name in replicas]


def _clear(folder: Path) -> None:
    """Deletes all in ``folder`` but the lock that is held: also the journal, which names the replicas."""
    lock = folder / LOCK
    for entry in (*folder.iterdir(), *lock.parent.iterdir()):
        if entry not in (lock, lock.parent):
            if entry.is_dir():
                shutil.rmtree(entry, ignore_errors=True)
            else:
                entry.unlink()


def _remove_if_empty(folder: Path) -> None:
    with suppress(OSError):
        folder.rmdir()
