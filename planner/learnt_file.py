"""Keeps what is learnt in a file, beside the decisions: a planner that is started again goes on with it.

Whatever is wrong with the file, there is a line in the log and nothing else: the planner then starts with nothing
learnt, or what it learns ends with it.
"""

from __future__ import annotations

import asyncio
import fcntl
import logging
import os
import stat
from collections.abc import Callable
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from io import BufferedWriter
from pathlib import Path
from typing import Any

from planner.joint import JointPolicy, Memories
from planner.learnt import begun, decode, encode, learnt, unusable

log = logging.getLogger(__name__)

EVERY_S = 30.0
"""What was learnt in so long may be lost: a sixtieth of the record."""
MOST_BYTES = 2 << 20
"""A role takes 0.2 MB, and what is read takes time at each tick."""
CLOSE_S = 2.0
"""How long the last writing may take: what it adds is not worth more."""


class LearntFile:
    """The file of one planner; written in a thread of its own, and by one planner at a time.

    A second one reads it, as in a rolling update, and writes when the first has ended: it is locked, by
    ``<name>.lock`` beside it, from the first writing until the process ends.

    Args:
        path: None: nothing is kept.
        of: which engines the planner scales; what was learnt of others is not used.
        thread: where it is written, one thing after the other.
    """

    def __init__(self, path: Path | None, of: str = "", *, thread: Executor | None = None) -> None:
        self._path = path
        self._of = of
        self._thread = thread or ThreadPoolExecutor(1, "learnt")
        self._writing: Future[None] | None = None
        self._kept_at: float | None = None
        self._lock: BufferedWriter | None = None
        self._failing = False

    def begin(self, policy: JointPolicy, at: float) -> Memories:
        """The memories of a start at wall-clock second ``at``: with what is in the file, if that is of use."""
        if self._path is None:
            return policy.fresh()
        try:
            data = _contents(self._path)
            record = decode(data)
            wrong = unusable(record, self._of, at)
        except FileNotFoundError:
            return policy.fresh()
        except OSError as error:
            log.warning("%s cannot be read: %s; nothing is learnt yet", self._path, error)
            return policy.fresh()
        except ValueError as error:
            wrong = str(error)
        if wrong is None:
            log.info("%s: going on with what was learnt until %.0f s ago", self._path, at - record.at)
            return begun(policy, record, at)
        self._set_aside(wrong)
        return policy.fresh()

    def keep(self, policy: JointPolicy, memories: Memories, now: float, at: float) -> None:
        """Writes what is learnt when it is time to, and returns at once.

        Args:
            memories: never changed, as all that the policy remembers.
            now: seconds of a clock that never goes back.
            at: wall-clock seconds.
        """
        if self._path is None:
            return
        if self._kept_at is None:  # what was just read is not newer for it
            self._kept_at = now
        if now - self._kept_at >= EVERY_S and (self._writing is None or self._writing.done()):
            self._kept_at = now
            self._writing = self._submitted(self._write, self._path, policy, memories, at)

    def forget(self, why: str) -> None:
        """Sets the file aside: what is in it shall not come back at the next start."""
        if self._path is not None:
            self._submitted(self._set_aside, why)  # after what is being written now

    async def close(self, policy: JointPolicy, memories: Memories | None, at: float) -> None:
        """Writes the newest; None: there is nothing worth keeping."""
        if self._path is None:
            return
        try:
            if memories is not None and (writing := self._submitted(self._write, self._path, policy, memories, at)):
                async with asyncio.timeout(CLOSE_S):
                    await asyncio.wrap_future(writing)
        except TimeoutError:
            log.warning("%s takes long to write; what was learnt last may be lost", self._path)
        finally:
            self._submitted(self._disown)  # after what is still being written: until then the file is no other's
            self._thread.shutdown(wait=False)

    def _submitted(self, work: Callable[..., None], *arguments: Any) -> Future[None] | None:
        try:
            return self._thread.submit(work, *arguments)
        except RuntimeError as error:  # no thread can be started; a decision is not to fail for that
            self._fails(error)
            return None

    def _write(self, path: Path, policy: JointPolicy, memories: Memories, at: float) -> None:
        try:
            data = encode(learnt(policy, memories, self._of, at))
            if not self._own(path):
                raise BlockingIOError("another planner keeps it: give this one a learnt_path of its own")
            _replace(path, data)
            self._failing = False
        except (OSError, TypeError, ValueError) as error:
            self._fails(error)

    def _fails(self, error: Exception) -> None:
        if not self._failing:
            log.warning("%s cannot be written: %s; what is learnt ends with this planner", self._path, error)
        self._failing = True

    def _own(self, path: Path) -> bool:
        """Whether no other planner writes the file; it stays so."""
        if self._lock is None:
            lock = path.with_name(f"{path.name}.lock").open("ab")
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                lock.close()
                return False
            self._lock = lock
        return True

    def _disown(self) -> None:
        if self._lock is not None:
            self._lock.close()
            self._lock = None

    def _set_aside(self, why: str) -> None:
        path = self._path
        assert path is not None
        aside = path.with_name(f"{path.name}.set-aside")
        try:
            if not self._own(path):
                log.warning("%s is not used: %s; another planner keeps it", path, why)
                return
            path.replace(aside)
        except FileNotFoundError:
            return
        except OSError as error:
            log.warning("%s is not used: %s; nor can it be set aside: %s", path, why, error)
            return
        log.warning("%s is not used: %s; it is now %s, and learning starts anew", path, why, aside.name)


def _contents(path: Path) -> bytes:
    """Raises OSError, or ValueError where it is too large to be read."""
    # Not to wait for the other end of a pipe.
    with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK), "rb") as file:
        status = os.fstat(file.fileno())
        if not stat.S_ISREG(status.st_mode):
            raise OSError("it is no regular file")
        if status.st_size > MOST_BYTES:
            raise ValueError(f"it has {status.st_size} bytes, of {MOST_BYTES} at the most")
        return file.read()


def _replace(path: Path, data: bytes) -> None:
    """As a whole, so that a crash or a power cut leaves the old or the new one."""
    new = path.with_name(f".{path.name}.new")
    descriptor = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    new.replace(path)
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)
