"""Waiting for a server that somebody else runs: said at once, then more and more seldom."""

from __future__ import annotations

import asyncio

import pytest
from virtual_time import run_virtually

from dynamo_snapshot.errors import SnapshotError
from dynamo_snapshot.local.up import wait_until_ready
from dynamo_snapshot.model import Reason


def waited(answers_after_s: float) -> tuple[list[str], SnapshotError | None]:
    """What was said of a server that answers then, and how the wait of a minute failed."""
    said: list[str] = []

    async def ready(since: float) -> bool:
        return asyncio.get_running_loop().time() >= answers_after_s

    async def wait() -> None:
        await wait_until_ready("etcd", "http://there:1", ready, said.append, 60.0)

    try:
        run_virtually(wait())
    except SnapshotError as error:
        return said, error
    return said, None


def test_one_that_answers_is_not_spoken_of() -> None:
    assert waited(0) == ([], None)


def test_a_minute_is_four_lines() -> None:
    said, error = waited(1e9)
    assert [int(line.split(": ")[1].split()[0]) for line in said] == [60, 55, 45, 25]
    assert error is not None
    assert error.reason is Reason.SERVER_UNREACHABLE


@pytest.mark.parametrize(("after", "lines"), [(1, 1), (4, 1), (6, 2), (16, 3)])
def test_it_is_waited_for_no_longer_than_it_takes(after: float, lines: int) -> None:
    said, error = waited(after)
    assert (len(said), error) == (lines, None)
