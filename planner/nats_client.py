"""A connection to a NATS server that may be away for as long as it likes."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from nats.aio.client import Client

log = logging.getLogger(__name__)

RETRY_S = 1.0
CANCEL_AGAIN_S = 0.5


async def connected(url: str, purpose: str, on_closed: Callable[[], None] = lambda: None) -> Client:
    """Connects as soon as the server at ``url`` can be reached; the client reconnects by itself from then on.

    Args:
        purpose: for the log.
        on_closed: called once the client has closed for good. It does so by itself when the server tells an error, as
            where credentials were changed: whoever still needs a connection makes a new one.
    """
    import nats  # here, so that a planner that needs none does not load it

    where = without_password(url)

    async def failed(error: Exception) -> None:
        log.info("%s: NATS at %s: %s", purpose, where, error)

    async def closed() -> None:
        on_closed()

    while True:
        try:
            return await nats.connect(
                url,
                error_cb=failed,
                closed_cb=closed,
                max_reconnect_attempts=-1,
                reconnect_time_wait=1,
                connect_timeout=2,
            )
        except (OSError, nats.errors.Error) as error:
            log.info("%s: NATS at %s cannot be reached: %s", purpose, where, error)
            await asyncio.sleep(RETRY_S)


async def ended(task: asyncio.Task[None]) -> None:
    """Cancels ``task``, which uses a client, and waits for its end; raises what it failed with.

    It is cancelled again where need be: ``asyncio.wait_for``, which the client uses, loses a cancellation that
    comes together with its result (before Python 3.12).
    """
    while not task.done():
        task.cancel()
        await asyncio.wait([task], timeout=CANCEL_AGAIN_S)
    if not task.cancelled():
        task.result()


def without_password(url: str) -> str:
    """``url`` as it may stand in a log."""
    scheme, separator, rest = url.rpartition("://")
    return f"{scheme}{separator}{rest.rpartition('@')[2]}"
