"""One suite for every store: a real etcd, and the one in memory."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack

import pytest
import pytest_asyncio

from dynamo_snapshot.discovery.client import connected
from dynamo_snapshot.errors import SnapshotError
from dynamo_snapshot.fleet.core.messages import Memory, Quarantine
from dynamo_snapshot.fleet.in_memory import InMemoryStore, Shelf
from dynamo_snapshot.fleet.persistence import Store, etcd_store
from dynamo_snapshot.model import Reason, StartTimes, Way

Another = Callable[[], Awaitable[Store]]
MEMORY = Memory(
    targets={"decode": 3},
    decision=(17, 4),
    quarantined={"s": Quarantine(compatibility_key="k", reason="criu_restore_failed")},
    start_times=(StartTimes(pool="decode", way=Way.RESTORE, seconds=(0.5,)),),
)


@pytest_asyncio.fixture(params=["in_memory", "etcd"])
async def another(request: pytest.FixtureRequest) -> AsyncIterator[Another]:
    """Returns a function whose awaited result is one more store of the same fleet."""
    async with AsyncExitStack() as stack:
        shelf = Shelf()
        namespace = f"persistence-{time.monotonic_ns()}"

        async def make() -> Store:
            if request.param == "in_memory":
                return InMemoryStore(shelf)
            return await stack.enter_async_context(etcd_store(request.getfixturevalue("etcd_url"), namespace))

        yield make


async def test_nothing_is_remembered_at_first(another: Another) -> None:
    assert await (await another()).load() == Memory()


async def test_each_fence_is_higher_than_the_last(another: Another) -> None:
    fences = [await (await another()).take_fence(at_least=1) for _ in range(4)]
    assert fences == sorted(set(fences))


async def test_a_fence_is_above_what_nodes_have_seen(another: Another) -> None:
    store = await another()
    assert await store.take_fence(at_least=500) == 500
    assert await store.take_fence(at_least=3) == 501


async def test_controllers_that_start_at_once_get_different_fences(
    another: Another,
) -> None:
    stores = [await another() for _ in range(5)]
    fences = await asyncio.gather(*(store.take_fence(at_least=1) for store in stores))
    assert len(set(fences)) == 5


async def test_the_next_controller_finds_what_was_remembered(another: Another) -> None:
    first = await another()
    await first.take_fence(at_least=1)
    await first.save(Memory())
    await first.save(MEMORY)
    assert await (await another()).load() == MEMORY


async def test_who_lost_the_fence_cannot_write(another: Another) -> None:
    first, second = await another(), await another()
    await first.take_fence(at_least=1)
    await second.take_fence(at_least=1)
    await second.save(MEMORY)
    with pytest.raises(SnapshotError) as caught:
        await first.save(Memory())
    assert caught.value.reason is Reason.STALE_FENCE
    assert await second.load() == MEMORY


async def test_an_etcd_that_lost_its_data_is_told_again(etcd_url: str) -> None:
    namespace = f"lost-{time.monotonic_ns()}"
    async with etcd_store(etcd_url, namespace) as first, etcd_store(etcd_url, namespace) as second:
        fence = await first.take_fence(at_least=8)
        await first.save(Memory())
        async with connected(etcd_url) as client:
            await client.delete_prefix(f"dynamo_snapshot/{namespace}/".encode())
        await first.save(MEMORY)
        assert await second.load() == MEMORY
        assert await second.take_fence(at_least=1) == fence + 1
        with pytest.raises(SnapshotError) as caught:
            await first.save(Memory())
    assert caught.value.reason is Reason.STALE_FENCE


async def test_an_outage_has_its_reason(free_port: Callable[[], int]) -> None:
    async with etcd_store(f"http://127.0.0.1:{free_port()}", "nobody") as store:
        with pytest.raises(SnapshotError) as caught:
            await store.load()
    assert caught.value.reason is Reason.SERVER_UNREACHABLE


async def test_what_cannot_be_read_is_no_memory(etcd_url: str) -> None:
    namespace = f"corrupt-{time.monotonic_ns()}"
    async with connected(etcd_url) as client:
        await client.put(f"dynamo_snapshot/{namespace}/memory".encode(), b'{"targets": 7}')
    async with etcd_store(etcd_url, namespace) as store:
        assert await store.load() == Memory()
