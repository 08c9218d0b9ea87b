"""Parts of a whole fleet are killed under load: each order ends once, and the fleet is at its target again.

One fleet for all tests here, as in life: what one fault leaves the next one meets. At its end nothing may be left.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio
from support.fleet_under_load import FleetUnderLoad

from dynamo_snapshot.model import OrderKind

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(240)]

OUTAGE_S = 45.0
AFTERWARDS_S = 3.0
"""How long requests are watched once all is well again."""


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def running(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[FleetUnderLoad]:
    fleet = FleetUnderLoad(tmp_path_factory.mktemp("faults"))
    try:
        await fleet.start()
        yield fleet
    finally:
        left = await fleet.stop()
    assert left == []


@pytest_asyncio.fixture(loop_scope="module")
async def fleet(running: FleetUnderLoad) -> FleetUnderLoad:
    """The fleet with one replica."""
    await running.scale(1)
    await running.settled(1)
    return running


async def test_a_killed_controller_is_succeeded_by_one_that_goes_on(fleet: FleetUnderLoad) -> None:
    begun = time.monotonic()
    await fleet.scale(4)
    await fleet.under_way_is(OrderKind.RESTORE)
    fence = fleet.status().fence
    fleet.kill("controller")
    assert OrderKind.RESTORE in {order.kind for order in await fleet.under_way()}
    await fleet.settled(4)
    assert await fleet.broken() == []
    assert fleet.status().fence > fence
    assert fleet.traffic.lost(begun) == []


async def test_a_killed_planner_takes_no_order_with_it(fleet: FleetUnderLoad) -> None:
    begun = time.monotonic()
    await fleet.scale(3)
    await fleet.under_way_is(OrderKind.RESTORE)
    fleet.kill("planner")
    assert OrderKind.RESTORE in {order.kind for order in await fleet.under_way()}
    await fleet.settled(3, timeout_s=15)  # before there is a planner again
    assert await fleet.broken() == []
    await fleet.settled(1)  # the next planner knows nothing of the floor
    assert await fleet.broken() == []
    assert fleet.traffic.lost(begun) == []


async def test_a_killed_agent_is_succeeded_by_one_that_adopts_who_serves(fleet: FleetUnderLoad) -> None:
    begun = time.monotonic()
    await fleet.scale(4)
    await fleet.under_way_is(OrderKind.RESTORE, serving=2)
    ports = await fleet.registered()
    served = {name: seen.pid for name, seen in fleet.living().items() if seen.rpc_port in ports}
    fleet.kill("agent")
    assert OrderKind.RESTORE in {order.kind for order in await fleet.under_way()}
    assert len(served) >= 2
    await fleet.settled(4)
    assert await fleet.broken() == []
    assert served.items() <= {name: seen.pid for name, seen in fleet.living().items()}.items()
    assert fleet.traffic.lost(begun) == []


@pytest.mark.parametrize("part", ["controller", "agent"])
async def test_a_drain_outlives_who_ordered_it_and_who_began_it(fleet: FleetUnderLoad, part: str) -> None:
    begun = time.monotonic()
    await fleet.scale(4)
    await fleet.settled(4)
    await fleet.scale(1)
    await fleet.under_way_is(OrderKind.DRAIN)
    fleet.kill(part)
    assert OrderKind.DRAIN in {order.kind for order in await fleet.under_way()}
    await fleet.settled(1)
    assert await fleet.broken() == []
    assert fleet.traffic.lost(begun) == []


async def test_without_nats_requests_are_served_and_loads_are_known_again_after(fleet: FleetUnderLoad) -> None:
    begun = time.monotonic()
    fleet.kill("nats")
    killed = time.time()
    await fleet.scale(2)
    await fleet.settled(2)
    await fleet.until(
        lambda: all(replica.load is not None and replica.load.at > killed for replica in fleet.status().replicas),
        "every replica's load",
    )
    assert await fleet.broken() == []
    assert fleet.traffic.lost(begun) == []


async def test_a_killed_frontend_costs_what_it_held_and_nothing_after(fleet: FleetUnderLoad) -> None:
    begun = time.monotonic()
    killed = fleet.kill("frontend")
    await fleet.settled(1)
    # It is up before it has read from discovery which models there are.
    await fleet.until(lambda: fleet.traffic.answered(killed) > 0, "an answer of the new frontend")
    ready = time.monotonic()
    await asyncio.sleep(AFTERWARDS_S)
    assert await fleet.broken() == []
    assert all(request.ended_at >= killed for request in fleet.traffic.lost(begun))
    assert fleet.traffic.lost(ready) == []
    assert fleet.traffic.answered(ready) > 0


async def test_etcd_is_killed_and_comes_back_with_its_data(fleet: FleetUnderLoad) -> None:
    begun = time.monotonic()
    await fleet.scale(3)
    await fleet.under_way_is(OrderKind.RESTORE)
    fleet.kill("etcd")
    assert OrderKind.RESTORE in {order.kind for order in await fleet.under_way()}
    await fleet.settled(3)
    assert await fleet.broken() == []
    assert fleet.traffic.lost(begun) == []


async def test_etcd_silent_for_long_costs_every_lease_and_the_fleet_comes_back(fleet: FleetUnderLoad) -> None:
    await fleet.scale(2)
    await fleet.settled(2)
    await fleet.scale(4)
    await fleet.under_way_is(OrderKind.RESTORE)
    with fleet.frozen("etcd"):
        assert OrderKind.RESTORE in {order.kind for order in await fleet.under_way()}
        await asyncio.sleep(OUTAGE_S)
    await fleet.settled(1, timeout_s=90)  # the next planner knows nothing of the floor
    await fleet.scale(3)
    await fleet.settled(3)
    await fleet.until(lambda: fleet.traffic.answered(time.monotonic() - 2) > 0, "answers again")
    back = time.monotonic()
    await asyncio.sleep(AFTERWARDS_S)
    assert await fleet.broken() == []
    assert fleet.traffic.lost(back) == []
    assert fleet.traffic.answered(back) > 0
