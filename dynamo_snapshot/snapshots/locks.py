"""Locks between processes that vanish with their holder: ``flock`` on a file of each thing's own.

The descriptor is never inherited by a program that the holder starts, so a killed holder leaves
nothing locked.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


class Lock:
    """A held lock; :meth:`release` may be called more than once."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor: int | None = descriptor

    def release(self) -> None:
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None


def try_exclusive(path: Path) -> Lock | None:
    """Returns the exclusive lock on ``path``, which is made if it is missing; None while anyone holds it."""
    descriptor = _open(path)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        return None
    return Lock(descriptor)


def is_held(path: Path) -> bool:
    """Whether a process has ``path`` for itself; one that may not be looked at counts as held. Makes nothing.

    The look holds the lock for an instant: who takes it meanwhile must try again.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return False
    except OSError:
        return True
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(descriptor)
    return False


@contextmanager
def exclusive(path: Path) -> Iterator[None]:
    """Holds the exclusive lock on ``path``, waiting for it; only for sections of milliseconds."""
    yield from _hold(path, fcntl.LOCK_EX)


@contextmanager
def shared(path: Path) -> Iterator[None]:
    """Holds a shared lock on ``path``; waits only while an exclusive one is held."""
    yield from _hold(path, fcntl.LOCK_SH)


def _hold(path: Path, kind: int) -> Iterator[None]:
    descriptor = _open(path)
    try:
        fcntl.flock(descriptor, kind)
        yield
    finally:
        os.close(descriptor)


def _open(path: Path) -> int:
    return os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
