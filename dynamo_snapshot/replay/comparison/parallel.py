"""Independent pieces of work on several processes, which all end when this one does, however it ends."""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import signal
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from typing import TypeVar

from dynamo_snapshot.errors import SnapshotError
from dynamo_snapshot.model import Reason

Piece = TypeVar("Piece")
Result = TypeVar("Result")

PR_SET_PDEATHSIG = 1


def work(do: Callable[[Piece], Result], pieces: Sequence[Piece], processes: int) -> Iterator[tuple[Piece, Result]]:
    """Yields each piece with what ``do`` made of it, as they get done.

    ``do`` is a module's function. The first failure, an interrupt and a closed generator end all processes;
    with one process everything runs in this one.

    Raises:
        SnapshotError: that of ``do``; ``process_died`` when a process was killed.
    """
    if processes <= 1 or len(pieces) <= 1:
        for piece in pieces:
            yield piece, do(piece)
        return
    yield from _on_processes(do, pieces, min(processes, len(pieces)))


def _on_processes(
    do: Callable[[Piece], Result], pieces: Sequence[Piece], processes: int
) -> Iterator[tuple[Piece, Result]]:
    from concurrent.futures.process import BrokenProcessPool

    # Not forked: a terminal's progress bar has a thread, and its lock would be copied locked.
    executor = ProcessPoolExecutor(
        processes, mp_context=multiprocessing.get_context("spawn"), initializer=_tie, initargs=(os.getpid(),)
    )
    others = set(multiprocessing.active_children())
    done = False
    try:
        # Blocked while the processes are started, so they inherit that: a Ctrl-C, or a SIGTERM to the whole group,
        # reaches this process alone, which ends them.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM})
        try:
            futures = {executor.submit(_guarded, do, piece): piece for piece in pieces}
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        for future in as_completed(futures):
            result = future.result()
            if isinstance(result, _Refused):
                raise SnapshotError(result.reason, result.message, result.remedy)
            yield futures[future], result
        done = True
    except BrokenProcessPool as error:
        raise SnapshotError(
            Reason.PROCESS_DIED,
            "a process of the simulation was ended from outside",
            "If memory ran out, use fewer processes: --jobs 1.",
        ) from error
    finally:
        if not done:
            for child in set(multiprocessing.active_children()) - others:
                child.kill()
        executor.shutdown(cancel_futures=True)


class _Refused:
    """A SnapshotError on its way between processes: the exception itself cannot be pickled."""

    def __init__(self, error: SnapshotError) -> None:
        self.reason, self.message, self.remedy = error.reason, error.message, error.remedy


def _guarded(do: Callable[[Piece], Result], piece: Piece) -> Result | _Refused:
    try:
        return do(piece)
    except SnapshotError as error:
        return _Refused(error)


def _tie(parent: int) -> None:
    """Ends this process with ``parent``, a killed one too."""
    if ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")
    if os.getppid() != parent:
        raise SystemExit("the process that wanted this work has ended")
