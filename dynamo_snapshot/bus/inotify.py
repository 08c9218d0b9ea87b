"""Tells, without polling, which files were renamed into a folder."""

from __future__ import annotations

import asyncio
import ctypes
import os
import struct
from pathlib import Path
from types import TracebackType

from dynamo_snapshot.errors import SnapshotError
from dynamo_snapshot.model import Reason

IN_MOVED_TO = 0x80
IN_DELETE_SELF = 0x400
IN_MOVE_SELF = 0x800
IN_Q_OVERFLOW = 0x4000
IN_IGNORED = 0x8000
IN_ONLYDIR = 0x01000000

_HEADER = struct.Struct("iIII")
_BUFFER_BYTES = 64 * 1024

_libc = ctypes.CDLL(None, use_errno=True)


class FolderWatch:
    """Watches ``folder`` from construction until :meth:`close`; used by one task of one event loop.

    Raises:
        SnapshotError: ``server_unreachable`` where the kernel grants no watch.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._fd = _libc.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC)
        if self._fd < 0:
            raise _refused(folder, ctypes.get_errno())
        mask = IN_MOVED_TO | IN_DELETE_SELF | IN_MOVE_SELF | IN_ONLYDIR
        if _libc.inotify_add_watch(self._fd, os.fsencode(folder), mask) < 0:
            number = ctypes.get_errno()
            os.close(self._fd)
            raise _refused(folder, number)

    def __enter__(self) -> FolderWatch:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Ends the watch."""
        os.close(self._fd)

    async def renamed(self) -> frozenset[str] | None:
        """Waits for renames into the folder and returns the names; None: events were lost, look at every file.

        Raises:
            SnapshotError: ``server_unreachable`` when the folder itself was removed or moved.
        """
        await self._readable()
        buffer = os.read(self._fd, _BUFFER_BYTES)
        names: set[str] = set()
        lost = False
        offset = 0
        while offset < len(buffer):
            _, mask, _, length = _HEADER.unpack_from(buffer, offset)
            offset += _HEADER.size
            if mask & (IN_DELETE_SELF | IN_MOVE_SELF | IN_IGNORED):
                raise SnapshotError(
                    Reason.SERVER_UNREACHABLE,
                    f"{self._folder}: removed while it was watched",
                    "Restart the fleet; nothing else may clean its runtime_dir.",
                )
            lost |= bool(mask & IN_Q_OVERFLOW)
            names.add(os.fsdecode(buffer[offset : offset + length].rstrip(b"\0")))
            offset += length
        return None if lost else frozenset(names)

    async def _readable(self) -> None:
        loop = asyncio.get_running_loop()
        ready = asyncio.Event()
        loop.add_reader(self._fd, ready.set)
        try:
            await ready.wait()
        finally:
            loop.remove_reader(self._fd)


def _refused(folder: Path, number: int) -> SnapshotError:
    return SnapshotError(
        Reason.SERVER_UNREACHABLE,
        f"{folder}: cannot be watched: {os.strerror(number)}",
        "Check that the folder exists; at a limit, raise fs.inotify.max_user_instances or max_user_watches.",
    )
