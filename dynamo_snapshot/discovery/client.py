"""Connections to etcd, and its errors in this project's terms."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from urllib.parse import urlsplit

import aetcd
import grpc

from dynamo_snapshot.errors import SnapshotError
from dynamo_snapshot.model import Reason

CALL_TIMEOUT_S = 3
DEFAULT_PORT = 2379

# Notices a server that hangs without closing its connections. etcd refuses pings more often than
# every five seconds (its --grpc-keepalive-min-time).
_CHANNEL = {
    "grpc.keepalive_time_ms": 6000,
    "grpc.keepalive_timeout_ms": 3000,
    "grpc.http2.max_pings_without_data": 0,
    "grpc.max_reconnect_backoff_ms": 1000,
    "grpc.enable_http_proxy": 0,
}


@contextmanager
def etcd_errors(url: str, what: str) -> Iterator[None]:
    """Maps whatever goes wrong between here and etcd to ``server_unreachable``; ``what`` completes "cannot"."""
    try:
        yield
    except (aetcd.ClientError, grpc.RpcError, OSError, TimeoutError) as error:
        cause = str(error).strip() or type(error).__name__
        raise SnapshotError(
            Reason.SERVER_UNREACHABLE,
            f"etcd at {url}: cannot {what}: {cause}",
            "Check that etcd runs there; the fleet goes on by itself once it answers.",
        ) from error


@asynccontextmanager
async def connected(url: str) -> AsyncIterator[aetcd.Client]:
    """A client of the etcd at ``url``, closed at the end of the block. Nothing is sent before the first call."""
    parts = urlsplit(url if "//" in url else f"//{url}")
    client = aetcd.Client(
        host=parts.hostname or "127.0.0.1",
        port=parts.port or DEFAULT_PORT,
        timeout=CALL_TIMEOUT_S,
        options=_CHANNEL,
    )
    try:
        yield client
    finally:
        await asyncio.shield(client.close())
