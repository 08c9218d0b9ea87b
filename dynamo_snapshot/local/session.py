"""A fleet with a person before it: live view or lines, and signals that mean stop."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from enum import Enum
from typing import Any, Literal, TypeVar

from dynamo_snapshot.config import Fleet
from dynamo_snapshot.local.demo import Demo
from dynamo_snapshot.local.demo_fleet import DemoOptions
from dynamo_snapshot.local.leftovers import Leftover
from dynamo_snapshot.local.observe import observe
from dynamo_snapshot.local.up import LocalFleet
from dynamo_snapshot.local.view import LiveView, Terminal

T = TypeVar("T")


@asynccontextmanager
async def stop_signals() -> AsyncIterator[asyncio.Event]:
    """Within: SIGINT and SIGTERM set the event instead of ending the process, however often they come."""
    loop, stop = asyncio.get_running_loop(), asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop.set)
    try:
        yield stop
    finally:
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.remove_signal_handler(number)


async def run(fleet: Fleet, *, plain: bool = False) -> list[Leftover]:
    """Runs ``fleet`` until SIGINT, SIGTERM or nobody reads what it says; returns what it left behind."""
    console = Terminal()
    with LiveView(console, plain=plain) as view:
        local = LocalFleet(fleet, view.say)
        async with stop_signals() as stop:
            console.on_reader_gone = stop.set
            if await unless_stopped(local.start(), stop) is Stopped.EARLY:
                return []
            view.say(f"serving {fleet.model.name} at {local.frontend_url}/v1")
            showing = asyncio.create_task(observe(local, view.show), name="view")
            await stop.wait()
            showing.cancel()
            view.say("stopping: workers drain first")
            left = await local.stop()
    for leftover in left:
        console.print(f"left behind: {leftover}", style="bold red")
    if not left:
        console.print("stopped; nothing left behind")
    return left


async def run_demo(options: DemoOptions, console: Terminal, *, plain: bool = False) -> dict[str, Any] | None:
    """Plays the demo before a person; None when a signal or the reader's going ended it early, all taken down."""
    with LiveView(console, plain=plain) as view:
        demo = Demo(options, view.say)
        showing = asyncio.create_task(observe(demo.local, view.show), name="view")
        try:
            async with stop_signals() as stop:
                console.on_reader_gone = stop.set
                result = await unless_stopped(demo.run(), stop)
        finally:
            showing.cancel()
    return None if result is Stopped.EARLY else result


class Stopped(Enum):
    EARLY = "early"
    """A signal came before the work was done."""


async def unless_stopped(work: Coroutine[Any, Any, T], stop: asyncio.Event) -> T | Literal[Stopped.EARLY]:
    """Awaits ``work``, which is cancelled, and has cleaned up, when ``stop`` is set first."""
    working = asyncio.create_task(work, name="work")
    stopping = asyncio.create_task(stop.wait(), name="stop")
    await asyncio.wait({working, stopping}, return_when=asyncio.FIRST_COMPLETED)
    stopping.cancel()
    if working.done():
        return working.result()
    working.cancel()
    await asyncio.wait({working})
    if not working.cancelled():
        return working.result()  # it ended at the same moment, or failed while cleaning up
    return Stopped.EARLY
