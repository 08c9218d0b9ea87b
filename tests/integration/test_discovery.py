"""One suite for every discovery: a real etcd with keys as Dynamo writes them, and the one in memory."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import AsyncIterator
from typing import Any, Protocol

import aetcd
import pytest

from dynamo_snapshot.backoff import Backoff
from dynamo_snapshot.discovery import etcd
from dynamo_snapshot.discovery.client import connected
from dynamo_snapshot.discovery.etcd import EtcdDiscovery, parse_instance
from dynamo_snapshot.discovery.in_memory import InMemoryDiscovery
from dynamo_snapshot.discovery.interface import Discovery, DiscoveryView
from dynamo_snapshot.errors import SnapshotError
from dynamo_snapshot.model import Instance, Reason

ROUTES, CARDS = "v1/instances", "v1/mdc"


class Scene(Protocol):
    """A discovery, and the workers and outages that a test makes."""

    discovery: Discovery

    async def register(self, port: int) -> Instance: ...
    async def unregister(self, instance: Instance) -> None: ...
    async def outage(self, on: bool) -> None: ...


class InMemoryScene:
    def __init__(self) -> None:
        self.memory = InMemoryDiscovery()
        self.discovery: Discovery = self.memory
        self.count = 0

    async def register(self, port: int) -> Instance:
        self.count += 1
        instance = instance_at(self.count, port)
        self.memory.register(instance)
        return instance

    async def unregister(self, instance: Instance) -> None:
        self.memory.unregister(instance.instance_id)

    async def outage(self, on: bool) -> None:
        self.memory.set_reachable(not on)


class EtcdScene:
    def __init__(self, server: Any) -> None:
        self.server = server
        self.discovery: Discovery = EtcdDiscovery(server.url, "dynamo", Backoff(limit_s=0.2))

    async def register(self, port: int, lease_s: int = 10, channels: int = 1) -> Instance:
        async with connected(self.server.url) as client:
            lease = await client.lease(lease_s)
            instance = instance_at(lease.id, port)
            names = [f"v1/event_channels/namespace/dynamo/topic/kv-events/{lease.id:x}-{i}" for i in range(channels)]
            for name in (*names, *(f"{prefix}/dynamo/backend/generate/{lease.id:x}" for prefix in (ROUTES, CARDS))):
                await client.put(name.encode(), value(instance), lease)
            return instance

    async def keys(self) -> list[str]:
        async with connected(self.server.url) as client:
            return sorted(item.key.decode() for item in await client.get_prefix(b"v1/"))

    async def unregister(self, instance: Instance) -> None:
        async with connected(self.server.url) as client:
            await client.delete(f"v1/instances/dynamo/backend/generate/{instance.instance_id:x}".encode())

    async def outage(self, on: bool) -> None:
        await asyncio.to_thread(self.server.stop if on else self.server.start)


def instance_at(instance_id: int, port: int) -> Instance:
    return Instance(
        instance_id=instance_id,
        namespace="dynamo",
        component="backend",
        endpoint="generate",
        host="127.0.0.1",
        port=port,
    )


def value(instance: Instance) -> bytes:
    """As Dynamo 1.6.1 writes it."""
    name = f"{instance.instance_id:x}"
    return json.dumps(
        {
            "type": "Endpoint",
            "component": instance.component,
            "endpoint": instance.endpoint,
            "namespace": instance.namespace,
            "instance_id": instance.instance_id,
            "transport": {"tcp": f"{instance.host}:{instance.port}/{name}/dynamo/backend/generate"},
            "device_type": "cuda",
            "request_plane_codec": "msgpack",
        }
    ).encode()


@pytest.fixture(params=["in_memory", "etcd"])
def scene(request: pytest.FixtureRequest) -> Scene:
    if request.param == "in_memory":
        return InMemoryScene()
    return EtcdScene(request.getfixturevalue("etcd_server"))


async def until(views: AsyncIterator[DiscoveryView], wanted: DiscoveryView) -> None:
    """Reads views up to ``wanted``."""
    async with asyncio.timeout(20):
        while await anext(views) != wanted:
            pass


def by_id(*instances: Instance) -> tuple[Instance, ...]:
    return tuple(sorted(instances, key=lambda instance: instance.instance_id))


async def test_the_first_view_comes_at_once_even_if_empty(scene: Scene) -> None:
    async with asyncio.timeout(5):
        assert await anext(scene.discovery.watch()) == ()


async def test_who_registered_before_and_after_is_seen(scene: Scene) -> None:
    before = await scene.register(20001)
    views = scene.discovery.watch()
    await until(views, (before,))
    after = await scene.register(20002)
    await until(views, by_id(before, after))


async def test_who_leaves_is_gone(scene: Scene) -> None:
    stays, leaves = await scene.register(20001), await scene.register(20002)
    views = scene.discovery.watch()
    await until(views, by_id(stays, leaves))
    await scene.unregister(leaves)
    await until(views, (stays,))


async def test_revoking_takes_an_instance_out_and_no_other(scene: Scene) -> None:
    stays, dead = await scene.register(20001), await scene.register(20002)
    views = scene.discovery.watch()
    await scene.discovery.revoke(dead.instance_id)
    await until(views, (stays,))


async def test_revoking_who_is_gone_is_nothing_to_do(scene: Scene) -> None:
    dead = await scene.register(20001)
    await scene.discovery.revoke(dead.instance_id)
    await scene.discovery.revoke(dead.instance_id)


async def test_an_instance_may_be_revoked_twice_at_once(scene: Scene) -> None:
    stays, dead = await scene.register(20001), await scene.register(20002)
    await asyncio.gather(*(scene.discovery.revoke(dead.instance_id) for _ in range(2)))
    await until(scene.discovery.watch(), (stays,))


async def test_an_outage_is_unknown_not_empty_and_ends(scene: Scene) -> None:
    there = await scene.register(20001)
    views = scene.discovery.watch()
    await until(views, (there,))
    await scene.outage(True)
    await until(views, None)
    with pytest.raises(SnapshotError) as caught:
        await scene.discovery.revoke(there.instance_id)
    assert caught.value.reason is Reason.SERVER_UNREACHABLE
    await scene.outage(False)
    await until(views, (there,))


async def test_a_change_during_an_outage_is_seen_after_it(scene: Scene) -> None:
    gone = await scene.register(20001)
    views = scene.discovery.watch()
    await until(views, (gone,))
    await scene.unregister(gone)
    await scene.outage(True)
    await until(views, None)
    await scene.outage(False)
    await until(views, ())


async def test_a_watch_that_begins_in_an_outage_says_unknown(scene: Scene) -> None:
    await scene.outage(True)
    views = scene.discovery.watch()
    await until(views, None)
    await scene.outage(False)
    await until(views, ())


# What only etcd can get wrong


async def test_a_revoked_worker_leaves_its_card_which_goes_with_its_lease(etcd_server: Any) -> None:
    scene = EtcdScene(etcd_server)
    other = await scene.register(20001)
    before = await scene.keys()
    dead = await scene.register(20002)
    await scene.discovery.revoke(dead.instance_id)
    card = f"{CARDS}/dynamo/backend/generate/{dead.instance_id:x}"
    assert await scene.keys() == sorted([*before, card])
    assert f"{CARDS}/dynamo/backend/generate/{other.instance_id:x}" in before
    async with connected(etcd_server.url) as client:
        assert list((await client.get_lease_info(dead.instance_id)).keys) == [card.encode()]


async def test_a_card_that_would_stay_too_long_goes_at_once(etcd_server: Any) -> None:
    scene = EtcdScene(etcd_server)
    dead = await scene.register(20001, lease_s=60)
    await scene.discovery.revoke(dead.instance_id)
    assert await scene.keys() == []


async def test_a_revocation_that_stops_halfway_is_seen_to_be_unfinished(
    etcd_server: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    scene = EtcdScene(etcd_server)
    dead = await scene.register(20001, channels=200)
    everything = await scene.keys()
    transaction = aetcd.Client.transaction
    calls = 0

    async def once(self: Any, *arguments: Any, **named: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls > 1:
            raise aetcd.ClientError
        return await transaction(self, *arguments, **named)

    with monkeypatch.context() as patch:
        patch.setattr(aetcd.Client, "transaction", once)
        with pytest.raises(SnapshotError) as caught:
            await scene.discovery.revoke(dead.instance_id)
    assert caught.value.reason is Reason.SERVER_UNREACHABLE
    assert 2 < len(await scene.keys()) < len(everything)
    await until(scene.discovery.watch(), (dead,))
    await scene.discovery.revoke(dead.instance_id)
    assert await scene.keys() == [f"{CARDS}/dynamo/backend/generate/{dead.instance_id:x}"]


async def test_other_namespaces_and_transports_are_not_seen(etcd_server: Any) -> None:
    async with connected(etcd_server.url) as client:
        await client.put(b"v1/instances/dynamo2/backend/generate/1", value(instance_at(1, 20001)))
        await client.put(b"v1/instances/dynamo/backend/generate/2", b'{"type":"Endpoint"}')
        await client.put(b"v1/instances/dynamo/backend/generate/3", value(instance_at(3, 20003)))
    await until(EtcdDiscovery(etcd_server.url, "dynamo").watch(), (instance_at(3, 20003),))


async def test_a_compacted_history_does_not_stop_the_watch(etcd_server: Any) -> None:
    scene = EtcdScene(etcd_server)
    views = scene.discovery.watch()
    await until(views, ())
    async with connected(etcd_server.url) as client:
        await client.compact((await client.get_prefix(b"v1/")).header.revision)
    there = await scene.register(20001)
    await until(views, (there,))


async def test_a_watch_that_goes_deaf_without_an_error_is_begun_anew(
    etcd_server: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(etcd, "READ_AGAIN_S", 0.5)
    handle = aetcd.watcher.Watcher._handle_response

    async def deaf(self: Any, response: Any) -> None:
        if not response.events:  # it still begins
            await handle(self, response)

    monkeypatch.setattr(aetcd.watcher.Watcher, "_handle_response", deaf)
    scene = EtcdScene(etcd_server)
    views = scene.discovery.watch()
    await until(views, ())
    there = await scene.register(20001)
    async with asyncio.timeout(5):
        while (view := await anext(views)) == ():
            continue
    assert view == (there,), "without having been unknown"


async def test_a_server_that_hangs_becomes_unknown(start_etcd: Any) -> None:
    url, process = start_etcd()
    views = EtcdDiscovery(url, "dynamo", Backoff(limit_s=0.2)).watch()
    await until(views, ())
    process.send_signal(19)  # SIGSTOP
    try:
        await until(views, None)
    finally:
        process.send_signal(18)  # SIGCONT
    await until(views, ())


async def test_a_registered_worker_of_dynamo_is_matched_by_its_port(etcd_url: str, free_port: Any) -> None:
    port, namespace = free_port(), f"discovery-{os.getpid()}"
    code = (
        "import asyncio, sys\n"
        "from dynamo.runtime import DistributedRuntime\n"
        "async def main():\n"
        "    runtime = DistributedRuntime(asyncio.get_running_loop(), 'etcd', 'tcp')\n"
        "    endpoint = runtime.endpoint(sys.argv[1] + '.backend.generate')\n"
        "    async def answer(request, context):\n"
        "        yield {}\n"
        "    await endpoint.serve_endpoint(answer)\n"
        "asyncio.run(main())\n"
    )
    environment = {
        **os.environ,
        "ETCD_ENDPOINTS": etcd_url,
        "DYN_TCP_RPC_HOST": "127.0.0.1",
        "DYN_TCP_RPC_PORT": str(port),
        "DYN_TCP_RESPONSE_STREAM_HOST": "127.0.0.1",
        "DYN_EVENT_PLANE": "zmq",
    }
    environment.pop("NATS_SERVER", None)
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", code, namespace, env=environment)
    try:
        views = EtcdDiscovery(etcd_url, namespace).watch()
        async with asyncio.timeout(30):
            while not (view := await anext(views)):
                pass
        assert [(i.component, i.endpoint, i.host, i.port) for i in view] == [("backend", "generate", "127.0.0.1", port)]
        process.kill()
        await process.wait()
        await EtcdDiscovery(etcd_url, namespace).revoke(view[0].instance_id)
        await until(views, ())
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


@pytest.mark.parametrize(
    ("tcp", "host", "port"),
    [
        ("10.0.0.1:43133/2040/dynamo", "10.0.0.1", 43133),
        ("[::1]:5/x", "::1", 5),
        ("worker-0.svc:80/a", "worker-0.svc", 80),
    ],
)
def test_addresses(tcp: str, host: str, port: int) -> None:
    data = {"namespace": "n", "component": "c", "endpoint": "e", "instance_id": 7, "transport": {"tcp": tcp}}
    instance = parse_instance(json.dumps(data).encode())
    assert instance is not None
    assert (instance.host, instance.port) == (host, port)


@pytest.mark.parametrize("transport", [{"nats_tcp": "dynamo_backend"}, {"tcp": "nonsense"}, {"tcp": "host:port/x"}, {}])
def test_what_is_no_tcp_endpoint_is_ignored(transport: dict[str, str]) -> None:
    data = {"namespace": "n", "component": "c", "endpoint": "e", "instance_id": 7, "transport": transport}
    assert parse_instance(json.dumps(data).encode()) is None
