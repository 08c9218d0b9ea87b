"""Communicators that live across a worker's processes, recognised from outside by NCCL's own threads.

Each NCCL communicator has a service thread for as long as it lives; NCCL names it, cut to 15 bytes, where
``NCCL_SET_THREAD_NAME`` says so (its ``proxy.cc`` and ``debug.cc``). The agent sets that for workers that may
be captured. A captured communicator can never be restored, although lock, checkpoint and dump succeed.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from dynamo_snapshot.errors import SnapshotError
from dynamo_snapshot.model import Reason

NAMES_ENV = "NCCL_SET_THREAD_NAME"
_SERVICE = "NCCL Service"


def refuse_collectives(pids: Iterable[int], proc: Path = Path("/proc")) -> None:
    """Raises ``collective_alive`` when two or more of ``pids`` have a communicator.

    One process alone may have one of its own, with nobody at the other end: that is no obstacle.
    """
    found = [pid for pid in pids if _has_communicator(proc / str(pid))]
    if len(found) > 1:
        raise SnapshotError(
            Reason.COLLECTIVE_ALIVE,
            f"processes {', '.join(map(str, found))} have an NCCL communicator, which can be captured but not restored",
            "Destroy it in the engine's quiesce, and make a new one in its resume.",
        )


def _has_communicator(process: Path) -> bool:
    try:
        names = [(thread / "comm").read_text() for thread in (process / "task").iterdir()]
    except (FileNotFoundError, ProcessLookupError):  # it has ended, or a thread of it has: it is looked at again
        return (process / "task").exists() and _has_communicator(process)
    return any(name.startswith(_SERVICE) for name in names)
