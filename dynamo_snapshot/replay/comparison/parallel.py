"""Independent pieces of work on several processes, which all end when this one does, however it ends."""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from functools import partial
from queue import SimpleQueue
from typing import TypeVar

from dynamo_snapshot.errors import SnapshotError
from dynamo_snapshot.model import Reason

Piece = TypeVar("Piece")
Result = TypeVar("Result")

PR_SET_PDEATHSIG = 1
_THREADS = ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS")


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

    ended: SimpleQueue[tuple[Piece, Future[Result | _Refused]]] = SimpleQueue()
    over: SimpleQueue[None] = SimpleQueue()
    abandoned = done = False

    def own() -> None:
        others = set(multiprocessing.active_children())
        # Not forked: a terminal's progress bar has a thread, and its lock would be copied locked.
        executor = ProcessPoolExecutor(
            processes, mp_context=multiprocessing.get_context("spawn"), initializer=_begin, initargs=(os.getpid(),)
        )
        # Inherited by the processes: a Ctrl-C, or a SIGTERM to the whole group, reaches the first process alone,
        # which ends them. After the executor is made: Python unblocks both when it starts its resource tracker.
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM})
        for piece in pieces:
            if abandoned:
                break
            try:
                future = executor.submit(_guarded, do, piece)
            except BrokenProcessPool as error:
                future = Future()
                future.set_exception(error)
            future.add_done_callback(partial(_tell, ended, piece))
        # The processes are tied to this thread: it stays as long as they do.
        over.get()
        if abandoned:
            for child in set(multiprocessing.active_children()) - others:
                child.kill()
        executor.shutdown(cancel_futures=True)

    # A signal's exception comes up in the main thread, wherever that is: with a lock of the executor held, the
    # executor could not be shut down any more. So another thread has it.
    owner = threading.Thread(target=own, name="processes", daemon=True)
    owner.start()
    try:
        for _ in pieces:
            piece, future = ended.get()
            result = future.result()
            if isinstance(result, _Refused):
                raise SnapshotError(result.reason, result.message, result.remedy)
            yield piece, result
        done = True
    except BrokenProcessPool as error:
        raise SnapshotError(
            Reason.PROCESS_DIED,
            "a process of the simulation was ended from outside",
            "If memory ran out, use fewer processes: --jobs 1.",
        ) from error
    finally:
        abandoned = not done
        over.put(None)
        owner.join()


def _tell(ended: SimpleQueue[tuple[Piece, Future[Result]]], piece: Piece, future: Future[Result]) -> None:
    ended.put((piece, future))


class _Refused:
    """A SnapshotError on its way between processes: the exception itself cannot be pickled."""

    def __init__(self, error: SnapshotError) -> None:
        self.reason, self.message, self.remedy = error.reason, error.message, error.remedy


def _guarded(do: Callable[[Piece], Result], piece: Piece) -> Result | _Refused:
    try:
        return do(piece)
    except SnapshotError as error:
        return _Refused(error)


def _begin(parent: int) -> None:
    # Before numpy is loaded. The pieces have the processors; threads for matrices of ten numbers only wait on them.
    os.environ.update(dict.fromkeys(_THREADS, "1"))
    _tie(parent)


def _tie(parent: int) -> None:
    """Ends this process with ``parent``, a killed one too."""
    if ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")
    if os.getppid() != parent:
        raise SystemExit("the process that wanted this work has ended")
