"""Asks discovery, right before a capture, whether a worker is registered already."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import cast

from dynamo_snapshot.agent.node import Discoverable
from dynamo_snapshot.discovery.interface import Discovery, DiscoveryView
from dynamo_snapshot.errors import SnapshotError
from dynamo_snapshot.model import Reason


def asking(discovery: Discovery) -> Discoverable:
    """Returns a check against ``discovery``; it raises ``server_unreachable`` where the answer is not known."""

    async def is_registered(port: int) -> bool:
        watch = cast(AsyncGenerator[DiscoveryView, None], discovery.watch())
        async with aclosing(watch):
            view = await anext(watch)
        if view is None:
            raise SnapshotError(
                Reason.SERVER_UNREACHABLE,
                "discovery cannot be read, so nobody knows whether the worker is registered",
                "Capture again once discovery answers.",
            )
        return any(instance.port == port for instance in view)

    return is_registered
