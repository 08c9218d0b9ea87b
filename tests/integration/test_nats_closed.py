"""A NATS server that sends planner or fleet away, as while credentials are changed, is gone back to."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import nats
import pytest
from nats.aio.client import Client
from nats.aio.msg import Msg
from support.guarded_nats import GuardedNats

from dynamo_snapshot.fleet.hints import NatsHints
from dynamo_snapshot.fleet.hints import subject as hints_subject
from dynamo_snapshot.fleet.publisher import file_and_nats
from dynamo_snapshot.fleet.publisher import subject as status_subject
from dynamo_snapshot.model import FleetStatus, ScalingHint, decode, encode
from planner.fleet_status import FleetStatusSubject
from planner.hint_sender import NatsHintSender
from planner.nats_client import without_password

SUBJECT = "guarded"
DEAF_S = 1.5
"""Longer than a reconnection takes."""


@asynccontextmanager
async def again_and_again(act: Callable[[float], Awaitable[object]]) -> AsyncIterator[None]:
    """Calls ``act`` with the wall clock's time for as long as the block lasts."""

    async def acting() -> None:
        while True:
            await act(time.time())
            await asyncio.sleep(0.05)

    task = asyncio.create_task(acting())
    try:
        yield
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


async def _newer(newest: Callable[[], float], than: float) -> None:
    async with asyncio.timeout(15):
        while newest() <= than:  # noqa: ASYNC110  another program brings it about
            await asyncio.sleep(0.02)


async def _sent_away_and_back(let_in: Callable[[bool], None], newest: Callable[[], float]) -> None:
    await _newer(newest, 0.0)
    let_in(False)
    await asyncio.sleep(DEAF_S)
    shut_out = newest()
    await asyncio.sleep(0.2)
    assert newest() == shut_out, "the server has to have closed the connection"
    let_in(True)
    await _newer(newest, shut_out)


async def test_hints_are_sent_again_once_the_server_lets_the_planner_in(guarded_nats: GuardedNats) -> None:
    heard: list[float] = [0.0]

    async def received(message: Msg) -> None:
        heard.append(decode(message.data, ScalingHint).at)

    async def tell(now: float) -> None:
        sender.tell(ScalingHint(at=now, expires_at=now + 60))

    fleet = await nats.connect(guarded_nats.url("second"))
    sender = NatsHintSender(guarded_nats.url("first"), SUBJECT)
    try:
        await fleet.subscribe(SUBJECT, cb=received)
        await sender.start()
        async with again_and_again(tell):
            await _sent_away_and_back(guarded_nats.let_in, lambda: heard[-1])
    finally:
        await sender.close()
        await fleet.close()


async def test_the_fleets_status_is_heard_again_once_the_server_lets_the_planner_in(guarded_nats: GuardedNats) -> None:
    def newest() -> float:
        status = source.latest()
        return 0.0 if status is None else status.at

    async def publish(now: float) -> None:
        await fleet.publish(SUBJECT, encode(FleetStatus(fleet="f", at=now, fence=1)))

    fleet = await nats.connect(guarded_nats.url("second"))
    source = FleetStatusSubject(guarded_nats.url("first"), SUBJECT)
    try:
        await source.start()
        async with again_and_again(publish):
            await _sent_away_and_back(guarded_nats.let_in, newest)
    finally:
        await source.close()
        await fleet.close()


async def test_the_fleet_publishes_again_once_the_server_lets_it_in(guarded_nats: GuardedNats, tmp_path: Path) -> None:
    heard: list[float] = [0.0]

    async def received(message: Msg) -> None:
        heard.append(decode(message.data, FleetStatus).at)

    planner = await nats.connect(guarded_nats.url("second"))
    try:
        await planner.subscribe(status_subject(SUBJECT), cb=received)
        async with (
            file_and_nats(tmp_path, guarded_nats.url("first"), SUBJECT) as publisher,
            again_and_again(lambda now: publisher.publish(FleetStatus(fleet="f", at=now, fence=1))),
        ):
            await _sent_away_and_back(guarded_nats.let_in, lambda: heard[-1])
    finally:
        await planner.close()


async def test_the_fleet_hears_hints_again_once_the_server_lets_it_in(guarded_nats: GuardedNats) -> None:
    heard: list[float] = [0.0]

    async def publish(now: float) -> None:
        await planner.publish(hints_subject(SUBJECT), encode(ScalingHint(at=now, expires_at=now + 60)))

    planner = await nats.connect(guarded_nats.url("second"))
    hints = NatsHints(guarded_nats.url("first"), SUBJECT)
    listening = asyncio.create_task(hints.run(lambda hint: heard.append(hint.at)))
    try:
        async with again_and_again(publish):
            await _sent_away_and_back(guarded_nats.let_in, lambda: heard[-1])
    finally:
        listening.cancel()
        await asyncio.wait([listening])
        await planner.close()


async def _sender(url: str) -> Callable[[], Awaitable[None]]:
    sender = NatsHintSender(url, SUBJECT)
    await sender.start()
    return sender.close


async def _status_source(url: str) -> Callable[[], Awaitable[None]]:
    source = FleetStatusSubject(url, SUBJECT)
    await source.start()
    return source.close


async def _hints(url: str) -> Callable[[], Awaitable[None]]:
    listening = asyncio.create_task(NatsHints(url, SUBJECT).run(lambda hint: None))

    async def close() -> None:
        listening.cancel()
        await asyncio.wait([listening])

    return close


@pytest.mark.parametrize("start", [_sender, _status_source, _hints])
async def test_a_cancellation_that_the_client_takes_for_itself_ends_its_user_all_the_same(
    start: Callable[[str], Awaitable[Callable[[], Awaitable[None]]]],
    guarded_nats: GuardedNats,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As asyncio.wait_for does, before Python 3.12, with one that comes together with its result."""
    connect, clients, arrived = nats.connect, [], asyncio.Event()

    async def deaf(url: str, **options: Any) -> Client:
        clients.append(await connect(url, **options))
        arrived.set()
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.Event().wait()
        return clients[-1]

    monkeypatch.setattr(nats, "connect", deaf)
    close = await start(guarded_nats.url("first"))
    await arrived.wait()
    closing = asyncio.ensure_future(close())
    await asyncio.wait([closing], timeout=10)  # no asyncio.timeout: it would cancel once more
    assert closing.done()
    assert [client.is_closed for client in clients] == [True]


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("nats://user:p@ss@host:4222", "nats://host:4222"),
        ("nats://host:4222", "nats://host:4222"),
        ("token@host", "host"),
    ],
)
def test_no_password_stands_in_a_log(url: str, shown: str) -> None:
    assert without_password(url) == shown
