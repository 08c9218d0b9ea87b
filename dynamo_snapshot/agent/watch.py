"""Waiting for a folder to change, by inotify: no poll, no delay."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from worker_hooks.inotify import DirectoryWatch


@asynccontextmanager
async def changes(folder: Path) -> AsyncIterator[asyncio.Event]:
    """Yields an event that is set whenever an entry of ``folder`` is made, written or renamed into place."""
    loop = asyncio.get_running_loop()
    event = asyncio.Event()
    with DirectoryWatch(folder) as watch:

        def on_readable() -> None:
            watch.drain()
            event.set()

        loop.add_reader(watch.fileno(), on_readable)
        try:
            yield event
        finally:
            loop.remove_reader(watch.fileno())
