"""The fleet's status over a real NATS server: received, and never a reason to fail."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import nats

from dynamo_snapshot.model import FleetStatus, encode
from planner.fleet_status import FleetStatusSubject


async def received(source: FleetStatusSubject, at: float) -> None:
    async with asyncio.timeout(10):
        while True:
            status = source.latest()
            if status is not None and status.at == at:
                return
            await asyncio.sleep(0.01)


async def test_the_newest_readable_status_is_kept(nats_url: str) -> None:
    subject = "dynamo_snapshot.planner-test.fleet_status"
    source = FleetStatusSubject(nats_url, subject)
    await source.start()
    publisher = await nats.connect(nats_url)
    try:
        assert source.latest() is None
        published = asyncio.create_task(
            _publish_until_cancelled(publisher, subject, FleetStatus(fleet="f", at=1.0, fence=1))
        )
        await received(source, 1.0)
        published.cancel()
        await publisher.publish(subject, b"not a status")
        await publisher.publish(subject, encode(FleetStatus(fleet="f", at=2.0, fence=1)))
        await received(source, 2.0)
    finally:
        await publisher.close()
        await source.close()


async def _publish_until_cancelled(publisher: nats.NATS, subject: str, status: FleetStatus) -> None:
    """The subscription begins some time after start()."""
    while True:
        await publisher.publish(subject, encode(status))
        await asyncio.sleep(0.05)


async def test_a_server_that_is_away_is_no_error(free_port: Callable[[], int]) -> None:
    source = FleetStatusSubject(f"nats://127.0.0.1:{free_port()}", "s")
    await source.start()
    await asyncio.sleep(0.1)
    assert source.latest() is None
    await source.close()
