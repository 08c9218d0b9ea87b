"""Waiting in tests for what happens in a folder."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from dynamo_snapshot.agent.watch import changes

T = TypeVar("T")


async def wait_until(folder: Path, look: Callable[[], T | None]) -> T:
    """Returns the first answer of ``look`` that is not None; it is asked again whenever ``folder`` changes."""
    async with changes(folder) as event:
        while (found := look()) is None:
            await event.wait()
            event.clear()
        return found
