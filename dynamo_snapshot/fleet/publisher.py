"""Publishes FleetStatus: a file that is replaced as a whole, and a NATS subject."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Protocol

import nats
import nats.errors
import structlog
from nats.aio.client import Client

from dynamo_snapshot.backoff import Backoff
from dynamo_snapshot.model import FleetStatus, encode

log = structlog.get_logger()

FILE_NAME = "fleet-status.json"
CLOSE_S = 2.0
"""How long a server may hold the end of the controller up."""


class Publisher(Protocol):
    async def publish(self, status: FleetStatus) -> None:
        """Makes it known where that is possible now. Never raises: the fleet does not depend on it."""


def subject(namespace: str) -> str:
    """The NATS subject of a Dynamo namespace's FleetStatus."""
    return f"dynamo_snapshot.{namespace}.fleet_status"


class FileAndNats:
    """Use :func:`file_and_nats`."""

    def __init__(self, path: Path, subject_name: str) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._path = path
        self._subject = subject_name
        self._nats: Client | None = None
        self._newest = b""
        self._fresh = asyncio.Event()
        self._closing = False
        self._file_failed = False

    async def publish(self, status: FleetStatus) -> None:
        data = encode(status)
        try:
            scratch = self._path.with_name(f".{self._path.name}.new")
            scratch.write_bytes(data)
            scratch.replace(self._path)
            self._file_failed = False
        except OSError as error:
            if not self._file_failed:
                log.warning("status_file_failed", path=str(self._path), cause=str(error))
            self._file_failed = True
        self._newest = data
        self._fresh.set()

    async def tell(self, url: str) -> None:
        """Sends the newest status to the server at ``url`` until it is cancelled.

        A task of its own: a server that hangs makes the client wait, and the file must not. The client
        may also take a cancellation for itself, hence the flag.
        """
        while not self._closing:
            client = self._nats = await connect(url)
            while not (self._closing or client.is_closed):
                await self._fresh.wait()
                self._fresh.clear()
                if client.is_connected:
                    with contextlib.suppress(nats.errors.Error, OSError):
                        await client.publish(self._subject, self._newest)

    async def close(self, telling: asyncio.Task[None]) -> None:
        """Ends ``telling``, the task that runs :meth:`tell`, and the connection; waits for no server."""
        self._closing = True
        telling.cancel()
        await asyncio.wait([telling], timeout=CLOSE_S)
        if self._nats is not None:
            closing = asyncio.create_task(self._nats.close(), name="nats-close")
            await asyncio.wait([closing], timeout=CLOSE_S)


async def connect(url: str, on_closed: Callable[[], None] = lambda: None) -> Client:
    """Connects, as soon as the server can be reached; the client reconnects by itself from then on.

    Args:
        on_closed: called once the client has closed for good. It does so by itself when the server tells an error, as
            where credentials were changed: whoever still needs a connection makes a new one.
    """
    backoff = Backoff()

    async def quiet(error: Exception) -> None:
        log.debug("nats_error", cause=str(error))

    async def closed() -> None:
        on_closed()

    while True:
        try:
            client = await nats.connect(
                url,
                max_reconnect_attempts=-1,
                reconnect_time_wait=1,
                connect_timeout=2,
                error_cb=quiet,
                closed_cb=closed,
            )
        except (nats.errors.Error, OSError, TimeoutError) as error:
            # Not the whole URL: a password may stand in it.
            log.info("nats_unreachable", server=url.rpartition("@")[2], cause=str(error) or type(error).__name__)
            await asyncio.sleep(backoff.next())
            continue
        # asyncio.wait_for, which the client uses, loses a cancellation that comes with its result (before Python 3.12).
        if (task := asyncio.current_task()) is not None and task.cancelling():
            await client.close()
            raise asyncio.CancelledError
        return client


@asynccontextmanager
async def file_and_nats(folder: Path, nats_url: str, namespace: str) -> AsyncIterator[FileAndNats]:
    """Publishes to ``folder/fleet-status.json`` and to NATS, for as long as the block lasts."""
    publisher = FileAndNats(folder / FILE_NAME, subject(namespace))
    telling = asyncio.create_task(publisher.tell(nats_url), name="nats")
    try:
        yield publisher
    finally:
        await publisher.close(telling)
