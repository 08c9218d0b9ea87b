"""Publishes FleetStatus: a file that is replaced as a whole, and a NATS subject."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Protocol

import nats
import nats.errors
import structlog
from nats.aio.client import Client

from dynamo_snapshot.discovery.backoff import Backoff
from dynamo_snapshot.model import FleetStatus, encode

log = structlog.get_logger()

FILE_NAME = "fleet-status.json"


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
                log.warning("status_file_failed", path=str(self._path), error=str(error))
            self._file_failed = True
        if self._nats is not None and self._nats.is_connected:
            with contextlib.suppress(nats.errors.Error, OSError):
                await self._nats.publish(self._subject, data)

    async def connect(self, url: str) -> None:
        """Connects, as soon as the server can be reached; the client reconnects by itself from then on."""
        backoff = Backoff()

        async def quiet(error: Exception) -> None:
            log.debug("nats_error", error=str(error))

        while self._nats is None:
            try:
                self._nats = await nats.connect(
                    url, max_reconnect_attempts=-1, reconnect_time_wait=1, connect_timeout=2, error_cb=quiet
                )
            except (nats.errors.Error, OSError, TimeoutError) as error:
                log.info("nats_unreachable", url=url, error=str(error) or type(error).__name__)
                await asyncio.sleep(backoff.next())

    async def close(self) -> None:
        if self._nats is not None:
            with contextlib.suppress(nats.errors.Error, OSError, TimeoutError):
                await asyncio.wait_for(self._nats.close(), 2)


@asynccontextmanager
async def file_and_nats(folder: Path, nats_url: str, namespace: str) -> AsyncIterator[FileAndNats]:
    """Publishes to ``folder/fleet-status.json`` and to NATS, for as long as the block lasts."""
    publisher = FileAndNats(folder / FILE_NAME, subject(namespace))
    connecting = asyncio.create_task(publisher.connect(nats_url), name="nats")
    try:
        yield publisher
    finally:
        connecting.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await connecting
        await publisher.close()
