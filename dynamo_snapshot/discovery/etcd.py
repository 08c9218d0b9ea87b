"""Discovery in etcd, as Dynamo 1.6 keeps it.

An instance is a JSON value under ``v1/instances/<namespace>/<component>/<endpoint>/<id in hex>``, and
its id is the etcd lease that all keys of its worker hang on. Deleting keys of a live worker would make
it vanish for good.

A dead worker's model card (``v1/mdc/…``) routes nothing. It outlives the other keys until the lease ends: a
frontend that loses a model's last card forgets the model, and for its next worker reads the tokenizer anew, which
takes most of a second where it has 150 000 words.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import aetcd
import msgspec

from dynamo_snapshot.backoff import Backoff
from dynamo_snapshot.discovery.client import connected, etcd_errors
from dynamo_snapshot.discovery.interface import DiscoveryView
from dynamo_snapshot.errors import SnapshotError
from dynamo_snapshot.model import Instance

PREFIX = "v1/instances/"
_CARDS = b"v1/mdc/"
CARD_STAYS_S = 30
"""A card that would stay for longer goes at once: as long as it is there, a frontend refuses a worker of the same
model whose card differs. Dynamo gives its leases 30 s or less."""
_TRANSACTION = 128
"""As many operations as etcd takes in one (its ``--max-txn-ops``)."""
READ_AGAIN_S = 30.0
"""After so long without an event everything is read anew: a watch that the server gave up, or whose stream
ended in order, tells its reader nothing of it."""


class EtcdDiscovery:
    """Dynamo ``namespace`` in the etcd at ``url``."""

    def __init__(self, url: str, namespace: str, backoff: Backoff | None = None) -> None:
        self._url = url
        self._prefix = f"{PREFIX}{namespace}/".encode()
        self._backoff = backoff or Backoff()

    async def watch(self) -> AsyncIterator[DiscoveryView]:
        known = True
        while True:
            try:
                async for view in self._follow():
                    known = True
                    self._backoff.reset()
                    yield view
            except SnapshotError:
                if known:
                    known = False
                    yield None
            await asyncio.sleep(self._backoff.next())

    async def revoke(self, instance_id: int) -> None:
        async with connected(self._url) as client:
            with etcd_errors(self._url, f"revoke instance {instance_id}"):
                lease = await client.get_lease_info(_signed(instance_id))
                # Sorted, instances come after channels: as long as one is seen, its revocation is asked for again.
                stays = _CARDS if lease.TTL <= CARD_STAYS_S else ()
                await _delete(client, sorted(key for key in lease.keys if not key.startswith(stays)))

    async def _follow(self) -> AsyncIterator[DiscoveryView]:
        """Yields views until the connection, or the history that the watch needs, is lost, or all was quiet."""
        async with connected(self._url) as client:
            with etcd_errors(self._url, "read discovery"):
                present = await client.get_prefix(self._prefix)
                instances = {item.key: parse_instance(item.value) for item in present}
            yield _view(instances)
            with etcd_errors(self._url, "watch discovery"):
                # From the revision after the one that was read: nothing between the two is missed.
                watch = await client.watch_prefix(self._prefix, start_revision=present.header.revision + 1)
                events = aiter(watch)
                while (event := await _next(events)) is not None:
                    if event.kind == aetcd.rtypes.EventKind.PUT:
                        instances[event.kv.key] = parse_instance(event.kv.value)
                    else:
                        instances.pop(event.kv.key, None)
                    yield _view(instances)


async def _next(events: AsyncIterator[aetcd.rtypes.Event]) -> aetcd.rtypes.Event | None:
    """The next event; None: there was none for :data:`READ_AGAIN_S`, or there will be none."""
    try:
        async with asyncio.timeout(READ_AGAIN_S):
            return await anext(events)
    except (TimeoutError, StopAsyncIteration):
        return None


async def _delete(client: aetcd.Client, keys: list[bytes]) -> None:
    for first in range(0, len(keys), _TRANSACTION):
        some = keys[first : first + _TRANSACTION]
        await client.transaction(compare=[], success=[client.transactions.delete(key) for key in some], failure=[])


class _Transport(msgspec.Struct):
    tcp: str | None = None


class _Registration(msgspec.Struct):
    """The part of Dynamo's value that is read here; whatever else stands there is ignored."""

    namespace: str
    component: str
    endpoint: str
    instance_id: int
    transport: _Transport


def parse_instance(value: bytes) -> Instance | None:
    """Reads one registration; None where it is no TCP endpoint, which no worker of this project is.

    ``transport.tcp`` is ``host:port/…``; an IPv6 host stands in brackets.
    """
    try:
        registration = msgspec.json.decode(value, type=_Registration)
    except msgspec.DecodeError:
        return None
    address, _, _ = (registration.transport.tcp or "").partition("/")
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal():
        return None
    return Instance(
        instance_id=registration.instance_id,
        namespace=registration.namespace,
        component=registration.component,
        endpoint=registration.endpoint,
        host=host.strip("[]"),
        port=int(port),
    )


def _view(instances: dict[bytes, Instance | None]) -> tuple[Instance, ...]:
    known = [instance for instance in instances.values() if instance is not None]
    return tuple(sorted(known, key=lambda instance: (instance.instance_id, instance.component, instance.endpoint)))


def _signed(instance_id: int) -> int:
    """Lease ids are signed 64-bit numbers in etcd, instance ids unsigned ones in Dynamo."""
    return instance_id - (1 << 64) if instance_id >= 1 << 63 else instance_id
