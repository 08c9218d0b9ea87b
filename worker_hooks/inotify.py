"""A watch on one directory through inotify(7), with ctypes: the standard library has none."""

from __future__ import annotations

import ctypes
import errno
import os
from pathlib import Path
from types import TracebackType

_IN_CLOSE_WRITE = 0x00000008
_IN_MOVED_TO = 0x00000080
_IN_CREATE = 0x00000100
_EVENTS = _IN_CLOSE_WRITE | _IN_MOVED_TO | _IN_CREATE


class DirectoryWatch:
    """Readable whenever a file appeared in ``path`` since the last :meth:`drain`.

    Raises:
        OSError: the directory does not exist, or the user's inotify limits are reached.
    """

    def __init__(self, path: Path) -> None:
        self._path = os.fsencode(path)
        self._libc = ctypes.CDLL(None, use_errno=True)
        self._fd = self._checked(self._libc.inotify_init1(os.O_CLOEXEC | os.O_NONBLOCK))
        try:
            self._watch = self._add()
        except OSError:
            os.close(self._fd)
            raise

    def __enter__(self) -> DirectoryWatch:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        os.close(self._fd)

    def fileno(self) -> int:
        return self._fd

    def drain(self) -> None:
        """Forgets the events so far: what counts is what the directory holds."""
        try:
            while os.read(self._fd, 65536):
                pass
        except BlockingIOError:
            pass

    def renew(self) -> None:
        """Points the watch at the directory that lies at the path now; the same one changes nothing."""
        try:
            current = self._add()
        except OSError:  # the directory is away for the moment: keep what there is
            return
        if current != self._watch:
            self._libc.inotify_rm_watch(self._fd, self._watch)
            self._watch = current

    def _add(self) -> int:
        return self._checked(self._libc.inotify_add_watch(self._fd, self._path, _EVENTS))

    def _checked(self, result: int) -> int:
        if result < 0:
            number = ctypes.get_errno()
            text = os.strerror(number)
            if number in (errno.EMFILE, errno.ENOSPC):
                text += "; raise fs.inotify.max_user_instances or max_user_watches"
            raise OSError(number, text, os.fsdecode(self._path))
        return result
