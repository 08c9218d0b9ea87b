"""The planner's hints, from NATS: what it would have ready beside what it decides. Nothing is wrong without them."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from typing import Protocol

import msgspec
import nats.errors
import structlog
from nats.aio.msg import Msg

from dynamo_snapshot.fleet.publisher import CLOSE_S, connect
from dynamo_snapshot.model import ScalingHint, decode

log = structlog.get_logger()

OnHint = Callable[[ScalingHint], None]

RETRY_S = 1.0
"""After a server has sent the fleet away."""


class Hints(Protocol):
    async def run(self, on_hint: OnHint) -> None:
        """Listens until it is cancelled; waits for a server that is away."""


class NoHints:
    """For a fleet that nobody hints to."""

    async def run(self, on_hint: OnHint) -> None:
        await asyncio.Event().wait()


def subject(namespace: str) -> str:
    """The NATS subject of the hints for a Dynamo namespace: one ScalingHint a message, as JSON."""
    return f"dynamo_snapshot.{namespace}.scaling_hint"


class NatsHints:
    """Hints on the subject of ``namespace`` at the server ``url``; what is no hint is logged and forgotten."""

    def __init__(self, url: str, namespace: str) -> None:
        self._url, self._subject = url, subject(namespace)

    async def run(self, on_hint: OnHint) -> None:
        async def received(message: Msg) -> None:
            try:
                on_hint(decode(message.data, ScalingHint))
            except (msgspec.DecodeError, UnicodeDecodeError) as error:
                log.warning("hint_unreadable", subject=self._subject, cause=str(error))

        while True:
            closed = asyncio.Event()
            client = await connect(self._url, closed.set)
            try:
                # One that has closed already cannot be subscribed with.
                with contextlib.suppress(nats.errors.Error):
                    await client.subscribe(self._subject, cb=received)
                    await closed.wait()
            finally:
                closing = asyncio.create_task(client.close(), name="nats-close")
                await asyncio.wait([closing], timeout=CLOSE_S)
            await asyncio.sleep(RETRY_S)
