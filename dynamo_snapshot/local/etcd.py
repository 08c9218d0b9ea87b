"""The little of etcd that a fleet's supervisor needs, over its JSON gateway: keys, leases, and a watch.

https://etcd.io/docs/v3.5/dev-guide/api_grpc_gateway/ - keys and values travel in base64, numbers as strings.
"""

from __future__ import annotations

import base64
import json
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

import aiohttp

from dynamo_snapshot.errors import SnapshotError
from dynamo_snapshot.model import Reason

TIMEOUT_S = 5.0


@dataclass(frozen=True)
class Key:
    """A key as etcd holds it; ``lease`` is 0 where none keeps it."""

    name: str
    value: bytes
    lease: int
    create_revision: int


@dataclass(frozen=True)
class Change:
    """One event of a watch: ``key`` was put, or, with ``deleted``, is gone."""

    key: Key
    deleted: bool


class Etcd:
    """A client of one etcd. Every method may raise ``SnapshotError(server_unreachable)``."""

    def __init__(self, url: str) -> None:
        self.url = url.rstrip("/")

    async def keys(self, prefix: str) -> list[Key]:
        answer = await self._call("kv/range", _range(prefix))
        return [_key(item) for item in answer.get("kvs", [])]

    async def put_all(self, pairs: dict[str, str]) -> None:
        """Writes all of ``pairs``, name to value, at one revision."""
        puts = [{"request_put": {"key": _encode(name), "value": _encode(value)}} for name, value in pairs.items()]
        await self._call("kv/txn", {"success": puts})

    async def delete(self, name: str) -> None:
        await self._call("kv/deleterange", {"key": _encode(name)})

    async def revoke(self, lease: int) -> None:
        """Ends a lease and every key on it; one that has ended already is no error."""
        await self._call("lease/revoke", {"ID": str(lease)}, missing_ok=True)

    async def watch(self, prefix: str, start_revision: int = 1) -> AsyncIterator[list[Change]]:
        """Yields the changes under ``prefix`` since ``start_revision``, in batches as etcd sends them.

        Ends when the stream does; a watch from revision 1 on a fresh etcd misses nothing.
        """
        request = {"create_request": {**_range(prefix), "start_revision": str(start_revision)}}
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=TIMEOUT_S)
        try:
            async with (
                aiohttp.ClientSession(timeout=timeout, read_bufsize=1 << 22) as session,
                session.post(f"{self.url}/v3/watch", data=json.dumps(request)) as answer,
            ):
                async for line in answer.content:
                    result = json.loads(line).get("result", {})
                    events = [
                        Change(_key(event["kv"]), deleted=event.get("type") == "DELETE")
                        for event in result.get("events", [])
                    ]
                    if events:
                        yield events
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            raise self._unreachable(error) from error

    async def _call(self, path: str, body: dict[str, Any], *, missing_ok: bool = False) -> dict[str, Any]:
        try:
            async with (
                aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=TIMEOUT_S)) as session,
                session.post(f"{self.url}/v3/{path}", data=json.dumps(body)) as answer,
            ):
                content: dict[str, Any] = await answer.json(content_type=None)
                if answer.status != 200 and not (missing_ok and answer.status == 404):
                    raise SnapshotError(Reason.SERVER_UNREACHABLE, f"etcd at {self.url} refused {path}: {content}")
                return content
        except (aiohttp.ClientError, OSError, TimeoutError, ValueError) as error:
            raise self._unreachable(error) from error

    def _unreachable(self, error: Exception) -> SnapshotError:
        cause = str(error) or type(error).__name__
        return SnapshotError(Reason.SERVER_UNREACHABLE, f"etcd at {self.url} does not answer: {cause}")


def _range(prefix: str) -> dict[str, str]:
    """etcd's request for all keys that begin with ``prefix``; all keys where it is empty."""
    start = prefix.encode()
    end = start[:-1] + bytes([start[-1] + 1]) if start else b"\0"
    return {"key": _encode(start or b"\0"), "range_end": _encode(end)}


def _encode(value: str | bytes) -> str:
    return base64.b64encode(value.encode() if isinstance(value, str) else value).decode()


def _key(item: dict[str, Any]) -> Key:
    return Key(
        name=base64.b64decode(item["key"]).decode(),
        value=base64.b64decode(item.get("value", "")),
        lease=int(item.get("lease", 0)),
        create_revision=int(item.get("create_revision", 0)),
    )
