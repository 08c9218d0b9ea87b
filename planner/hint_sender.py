"""Sends hints to the fleet over NATS: the newest, when it can be sent; nobody waits for it."""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, Protocol

from dynamo_snapshot.model import ScalingHint, encode
from planner.nats_client import RETRY_S, connected, ended, without_password

if TYPE_CHECKING:
    from nats.aio.client import Client

log = logging.getLogger(__name__)

SEND_S = 2.0
"""A server that takes longer for one hint is tried again with the newest."""


class HintSender(Protocol):
    """Where hints go."""

    async def start(self) -> None:
        """Begins to send; returns at once and never raises because a server is away."""

    def tell(self, hint: ScalingHint) -> None:
        """Takes ``hint`` over and returns at once; a newer one replaces one that was not sent yet."""

    async def close(self) -> None: ...


class NoHintSender:
    """For a planner that gives no hints."""

    async def start(self) -> None:
        return None

    def tell(self, hint: ScalingHint) -> None:
        return None

    async def close(self) -> None:
        return None


class NatsHintSender:
    """Publishes on ``subject`` of the NATS server at ``url``."""

    def __init__(self, url: str, subject: str) -> None:
        self._url = url
        self._subject = subject
        self._newest: ScalingHint | None = None
        self._fresh = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        if self._task is None:
            self._task = asyncio.create_task(self._send(), name="scaling-hints")

    def tell(self, hint: ScalingHint) -> None:
        self._newest = hint
        self._fresh.set()

    async def close(self) -> None:
        if self._task is not None:
            await ended(self._task)
            self._task = None

    async def _send(self) -> None:
        while True:
            await self._send_until_closed(await connected(self._url, "scaling hints"))

    async def _send_until_closed(self, client: Client) -> None:
        try:
            while not client.is_closed:
                await self._fresh.wait()
                self._fresh.clear()
                # A client that is not connected would keep each hint, and send all of them later.
                if not (client.is_connected and await self._sent(client)):
                    self._fresh.set()
                    await asyncio.sleep(RETRY_S)
        finally:
            await client.close()

    async def _sent(self, client: Client) -> bool:
        import nats.errors

        if self._newest is None:
            return True
        try:
            async with asyncio.timeout(SEND_S):
                await client.publish(self._subject, encode(self._newest))
                await client.flush()
        except (OSError, nats.errors.Error) as error:
            log.info("scaling hints: NATS at %s: %r", without_password(self._url), error)
            return False
        return True
