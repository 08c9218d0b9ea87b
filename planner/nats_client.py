"""A connection to a NATS server that may be away for as long as it likes."""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from nats.aio.client import Client

log = logging.getLogger(__name__)

RETRY_S = 1.0


async def connected(url: str, purpose: str) -> Client:
    """Connects as soon as the server at ``url`` can be reached; the client reconnects by itself from then on.

    Args:
        purpose: for the log.
    """
    import nats  # here, so that a planner that needs none does not load it

    async def failed(error: Exception) -> None:
        log.info("%s: NATS at %s: %s", purpose, url, error)

    while True:
        try:
            return await nats.connect(
                url, error_cb=failed, max_reconnect_attempts=-1, reconnect_time_wait=1, connect_timeout=2
            )
        except (OSError, nats.errors.Error) as error:
            log.info("%s: NATS at %s cannot be reached: %s", purpose, url, error)
            await asyncio.sleep(RETRY_S)
