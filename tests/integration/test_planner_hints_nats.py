"""Hints over a real NATS server: from the planner's sender to the fleet's listener, and never a reason to wait."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractContextManager, asynccontextmanager

from dynamo_snapshot.fleet.hints import NatsHints, subject
from dynamo_snapshot.model import PoolHint, ScalingHint
from planner.hint_sender import NatsHintSender

NAMESPACE = "hints-test"


def hint(parked: int) -> ScalingHint:
    now = time.time()
    return ScalingHint(at=now, expires_at=now + 30, decode=PoolHint(parked=parked, prefetch=True))


@asynccontextmanager
async def listening(url: str) -> AsyncIterator[asyncio.Queue[ScalingHint]]:
    heard: asyncio.Queue[ScalingHint] = asyncio.Queue()
    task = asyncio.create_task(NatsHints(url, NAMESPACE).run(heard.put_nowait))
    try:
        yield heard
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


async def until_heard(heard: asyncio.Queue[ScalingHint], parked: int) -> set[int | None]:
    """Returns what was heard until ``parked`` was."""
    before: set[int | None] = set()
    async with asyncio.timeout(15):
        while (told := await heard.get()).decode != PoolHint(parked=parked, prefetch=True):
            assert told.decode is not None
            before.add(told.decode.parked)
    return before


async def telling(sender: NatsHintSender, parked: int) -> None:
    """Again and again, as a planner does: the listener's subscription begins some time after its start."""
    while True:
        sender.tell(hint(parked))
        await asyncio.sleep(0.05)


async def test_the_newest_hint_reaches_the_fleet(nats_url: str) -> None:
    sender = NatsHintSender(nats_url, subject(NAMESPACE))
    await sender.start()
    async with listening(nats_url) as heard:
        teller = asyncio.create_task(telling(sender, 1))
        await until_heard(heard, 1)
        teller.cancel()
        for parked in (2, 3, 4):  # at once: only the last one counts
            sender.tell(hint(parked))
        assert await until_heard(heard, 4) <= {1}
    await sender.close()


async def test_a_server_that_is_away_holds_nobody_up_and_hears_the_newest_when_it_is_back(
    nats_on: Callable[[int], AbstractContextManager[object]], free_port: Callable[[], int]
) -> None:
    port = free_port()
    url = f"nats://127.0.0.1:{port}"
    sender = NatsHintSender(url, subject(NAMESPACE))
    await sender.start()
    for life in (1, 2):
        began = time.monotonic()
        for parked in range(100, 1100):
            sender.tell(hint(parked))
        assert time.monotonic() - began < 0.2
        with nats_on(port):
            async with listening(url) as heard:
                teller = asyncio.create_task(telling(sender, life))
                assert not await until_heard(heard, life), "what is old by now is not sent"
                teller.cancel()
    await sender.close()


async def test_one_that_never_connected_ends_at_once() -> None:
    tried = asyncio.Event()

    async def say_nothing(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        tried.set()
        await reader.read()
        writer.close()

    async with await asyncio.start_server(say_nothing, "127.0.0.1", 0) as server:
        host, port = server.sockets[0].getsockname()
        sender = NatsHintSender(f"nats://{host}:{port}", "s")
        await sender.start()
        sender.tell(hint(1))
        async with asyncio.timeout(10):
            await tried.wait()
        async with asyncio.timeout(1):
            await sender.close()
