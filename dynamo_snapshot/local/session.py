"""A fleet with a person before it: live view or lines, and signals that mean stop."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from rich.console import Console

from dynamo_snapshot.config import Fleet
from dynamo_snapshot.local.leftovers import Leftover
from dynamo_snapshot.local.observe import observe
from dynamo_snapshot.local.up import LocalFleet
from dynamo_snapshot.local.view import LiveView


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
    """Runs ``fleet`` until SIGINT or SIGTERM; returns what it left behind."""
    console = Console()
    async with stop_signals() as stop:
        with LiveView(fleet, console, plain=plain) as view:
            local = LocalFleet(fleet, view.say)
            starting = asyncio.create_task(local.start(), name="start")
            stopping = asyncio.create_task(stop.wait(), name="stop")
            await asyncio.wait({starting, stopping}, return_when=asyncio.FIRST_COMPLETED)
            if not starting.done():
                view.say("stopping before everything is up")
                starting.cancel()
                await asyncio.wait({starting})
                return []
            starting.result()
            view.say(f"serving {fleet.model.name} at {local.frontend_url}/v1")
            async with asyncio.TaskGroup() as group:
                showing = group.create_task(observe(local, view.show), name="view")
                await stop.wait()
                showing.cancel()
            view.say("stopping: workers drain first")
            left = await local.stop()
    for leftover in left:
        console.print(f"left behind: {leftover}", style="bold red")
    if not left:
        console.print("stopped; nothing left behind")
    return left
