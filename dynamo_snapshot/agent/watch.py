"""Waiting for a folder to change, by inotify: no poll, no delay, unless the host grants no watch."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path

import structlog

from worker_hooks.inotify import DirectoryWatch

log = structlog.get_logger()

LOOK_S = 0.5
"""How often to look where inotify is refused, as at the limit of fs.inotify.max_user_instances."""


@asynccontextmanager
async def changes(folder: Path) -> AsyncIterator[asyncio.Event]:
    """Yields an event that is set whenever an entry of ``folder`` is made, written or renamed into place."""
    event = asyncio.Event()
    try:
        watch = DirectoryWatch(folder)
    except OSError as error:
        log.warning("folder_not_watched", folder=str(folder), look_s=LOOK_S, cause=str(error))
        with _set_regularly(event):
            yield event
        return
    loop = asyncio.get_running_loop()
    with watch:

        def on_readable() -> None:
            watch.drain()
            event.set()

        loop.add_reader(watch.fileno(), on_readable)
        try:
            yield event
        finally:
            loop.remove_reader(watch.fileno())


@contextmanager
def _set_regularly(event: asyncio.Event) -> Iterator[None]:
    async def tick() -> None:
        while True:
            await asyncio.sleep(LOOK_S)
            event.set()

    task = asyncio.create_task(tick(), name="folder-looks")
    try:
        yield
    finally:
        task.cancel()
