"""Waiting for a folder to change, by inotify: no poll, no delay."""

from __future__ import annotations

import asyncio
import ctypes
import os
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TypeVar

T = TypeVar("T")

_IN_CLOSE_WRITE, _IN_MOVED_TO, _IN_CREATE = 0x008, 0x080, 0x100
_libc = ctypes.CDLL(None, use_errno=True)


@asynccontextmanager
async def changes(folder: Path) -> AsyncIterator[asyncio.Event]:
    """Yields an event that is set whenever an entry of ``folder`` is made, written or renamed into place."""
    descriptor = _libc.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC)
    if descriptor < 0:
        raise OSError(ctypes.get_errno(), "inotify_init1 failed: raise fs.inotify.max_user_instances")
    loop = asyncio.get_running_loop()
    event = asyncio.Event()

    def drain() -> None:
        try:
            while os.read(descriptor, 65536):
                event.set()
        except BlockingIOError:
            pass

    try:
        mask = _IN_CLOSE_WRITE | _IN_MOVED_TO | _IN_CREATE
        if _libc.inotify_add_watch(descriptor, os.fsencode(folder), mask) < 0:
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()), str(folder))
        loop.add_reader(descriptor, drain)
        yield event
    finally:
        loop.remove_reader(descriptor)
        os.close(descriptor)


async def wait_until(folder: Path, look: Callable[[], T | None]) -> T:
    """Returns the first answer of ``look`` that is not None; it is asked again whenever ``folder`` changes."""
    async with changes(folder) as event:
        while (found := look()) is None:
            await event.wait()
            event.clear()
        return found
