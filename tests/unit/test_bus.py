"""One suite for every bus: what a node and the fleet may rely on."""

from __future__ import annotations

import asyncio
import errno
import os
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import NoReturn

import pytest

from dynamo_snapshot.bus.directory import DirectoryBus
from dynamo_snapshot.bus.in_process import InProcessBus
from dynamo_snapshot.bus.interface import Bus
from dynamo_snapshot.errors import SnapshotError
from dynamo_snapshot.model import Order, OrderKind, Reason, Reported, Wanted, encode


@pytest.fixture(params=["in_process", "directory"])
def bus(request: pytest.FixtureRequest, tmp_path: Path) -> Bus:
    makers: dict[str, Callable[[], Bus]] = {
        "in_process": InProcessBus,
        "directory": lambda: DirectoryBus(tmp_path / "bus"),
    }
    return makers[request.param]()


def wanted(sequence: int, node: str = "one") -> Wanted:
    order = Order(
        id=f"o{sequence}", kind=OrderKind.KILL, replica_id="r", pool="decode", fence=1, issued_at=0.0, deadline=1.0
    )
    return Wanted(node=node, fence=1, sequence=sequence, orders=(order,))


def reported(sequence: int, node: str = "one") -> Reported:
    return Reported(node=node, sequence=sequence, fence=1, at=float(sequence))


async def soon(iterator: AsyncIterator[object]) -> object:
    async with asyncio.timeout(5):
        return await anext(iterator)


async def test_nothing_is_retained_at_first(bus: Bus) -> None:
    assert await bus.read_wanted("one") is None
    assert await bus.read_reported() == {}


async def test_the_newest_list_is_retained_for_each_node(bus: Bus) -> None:
    for sequence in (1, 2):
        await bus.publish_wanted(wanted(sequence))
        await bus.publish_reported(reported(sequence))
    await bus.publish_wanted(wanted(7, "two"))
    await bus.publish_reported(reported(8, "two"))
    assert await bus.read_wanted("one") == wanted(2)
    assert await bus.read_wanted("two") == wanted(7, "two")
    assert await bus.read_reported() == {"one": reported(2), "two": reported(8, "two")}


async def test_a_watcher_sees_the_retained_list_then_newer_ones(bus: Bus) -> None:
    await bus.publish_wanted(wanted(1))
    watch = bus.watch_wanted("one")
    assert await soon(watch) == wanted(1)
    await bus.publish_wanted(wanted(9, "two"))
    await bus.publish_wanted(wanted(2))
    assert await soon(watch) == wanted(2)


async def test_a_watcher_that_waits_is_woken(bus: Bus) -> None:
    watch = bus.watch_wanted("one")
    first = asyncio.create_task(soon(watch))
    await asyncio.sleep(0)
    await bus.publish_wanted(wanted(1))
    assert await first == wanted(1)


async def test_reports_of_every_node_are_seen(bus: Bus) -> None:
    await bus.publish_reported(reported(1, "one"))
    await bus.publish_reported(reported(1, "two"))
    watch = bus.watch_reported()
    both = [await soon(watch), await soon(watch)]
    assert reported(1, "one") in both
    assert reported(1, "two") in both
    await bus.publish_reported(reported(2, "two"))
    assert await soon(watch) == reported(2, "two")


async def test_a_slow_watcher_never_misses_the_newest(bus: Bus) -> None:
    watch = bus.watch_wanted("one")
    for sequence in range(1, 30):
        await bus.publish_wanted(wanted(sequence))
    seen = [await soon(watch)]
    while seen[-1] != wanted(29):
        seen.append(await soon(watch))
    sequences = [item.sequence for item in seen if isinstance(item, Wanted)]
    assert sequences == sorted(set(sequences))


async def test_two_watchers_both_see_each_change(bus: Bus) -> None:
    watches = [bus.watch_wanted("one"), bus.watch_wanted("one")]
    await bus.publish_wanted(wanted(1))
    assert [await soon(watch) for watch in watches] == [wanted(1), wanted(1)]
    await bus.publish_wanted(wanted(2))
    assert [await soon(watch) for watch in watches] == [wanted(2), wanted(2)]


async def test_a_closed_watch_ends(bus: Bus) -> None:
    watch = bus.watch_wanted("one")
    waiting = asyncio.create_task(soon(watch))
    await asyncio.sleep(0)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    with pytest.raises(StopAsyncIteration):
        await anext(watch)


# What only the directory can get wrong


async def test_a_change_by_another_process_arrives_within_two_milliseconds(tmp_path: Path) -> None:
    bus = DirectoryBus(tmp_path)
    watch = bus.watch_reported()
    writer = (
        "import asyncio, sys, time\n"
        "from pathlib import Path\n"
        "from dynamo_snapshot.bus.directory import DirectoryBus\n"
        "from dynamo_snapshot.model import Reported\n"
        "async def main():\n"
        "    bus = DirectoryBus(Path(sys.argv[1]))\n"
        "    for n in range(1, 41):\n"
        "        await bus.publish_reported(Reported(node='one', sequence=n, fence=0, at=time.time()))\n"
        "        print(time.time(), flush=True)\n"
        "        await asyncio.sleep(0.01)\n"
        "asyncio.run(main())\n"
    )
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", writer, str(tmp_path), stdout=subprocess.PIPE, cwd=Path.cwd()
    )
    arrived: dict[int, float] = {}
    while 40 not in arrived:
        report = await soon(watch)
        assert isinstance(report, Reported)
        arrived[report.sequence] = time.time()
    output, _ = await process.communicate()
    retained = dict(enumerate(map(float, output.split()), start=1))
    delays = sorted(max(0.0, arrived[n] - retained[n]) for n in arrived)
    # The median, because the machine that runs this suite may be busy with others.
    assert delays[len(delays) // 2] <= 0.002


async def test_a_half_written_file_is_never_read(tmp_path: Path) -> None:
    bus = DirectoryBus(tmp_path)
    await bus.publish_wanted(wanted(1))
    whole = encode(wanted(2))
    (tmp_path / "wanted" / ".one.json.1.1").write_bytes(whole[: len(whole) // 2])
    assert await bus.read_wanted("one") == wanted(1)
    assert await bus.read_reported() == {}


async def test_a_corrupt_file_is_named(tmp_path: Path) -> None:
    bus = DirectoryBus(tmp_path)
    path = tmp_path / "reported" / "one.json"
    path.write_bytes(b'{"node": 3}')
    with pytest.raises(SnapshotError, match=str(path)):
        await bus.read_reported()


async def test_a_lost_event_makes_it_look_at_every_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bus = DirectoryBus(tmp_path)
    await bus.publish_wanted(wanted(1))
    watch = bus.watch_wanted("one")
    assert await soon(watch) == wanted(1)
    overflow = (-1).to_bytes(4, sys.byteorder, signed=True) + (0x4000).to_bytes(4, sys.byteorder) + bytes(8)
    read = os.read
    monkeypatch.setattr(os, "read", lambda fd, size: read(fd, size) and overflow)
    await bus.publish_wanted(wanted(2))
    assert await soon(watch) == wanted(2)


async def test_a_removed_folder_ends_the_watch_with_a_reason(tmp_path: Path) -> None:
    bus = DirectoryBus(tmp_path)
    watch = bus.watch_wanted("one")
    waiting = asyncio.create_task(soon(watch))
    await asyncio.sleep(0.01)
    (tmp_path / "wanted").rmdir()
    with pytest.raises(SnapshotError) as caught:
        await waiting
    assert caught.value.reason is Reason.SERVER_UNREACHABLE


@pytest.mark.parametrize("name", ["", "..", "a/b", ".hidden", "a\0b"])
async def test_a_node_name_cannot_leave_the_folder(tmp_path: Path, name: str) -> None:
    with pytest.raises(SnapshotError) as caught:
        await DirectoryBus(tmp_path).publish_wanted(wanted(1, name))
    assert caught.value.reason is Reason.CONFIGURATION_INVALID


async def test_a_place_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.touch()
    with pytest.raises(SnapshotError, match="cannot be written"):
        DirectoryBus(file)


@pytest.mark.parametrize(
    ("code", "reason"),
    [
        (errno.EACCES, Reason.NOT_PRIVILEGED),
        (errno.ENOSPC, Reason.DISK_FULL),
        (errno.ENOTDIR, Reason.SERVER_UNREACHABLE),
    ],
)
async def test_why_a_list_cannot_be_written_decides_the_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int, reason: Reason
) -> None:
    bus = DirectoryBus(tmp_path)

    def refuse(path: Path, target: Path) -> NoReturn:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(Path, "rename", refuse)
    with pytest.raises(SnapshotError) as caught:
        await bus.publish_wanted(wanted(1))
    assert caught.value.reason is reason
    assert caught.value.remedy


async def test_a_list_of_another_version_is_named_with_what_to_do(tmp_path: Path) -> None:
    bus = DirectoryBus(tmp_path)
    (tmp_path / "wanted" / "one.json").write_text('{"orders": 7}')
    with pytest.raises(SnapshotError, match=r"one\.json: not a wanted list") as caught:
        await bus.read_wanted("one")
    assert caught.value.reason is Reason.STATE_CORRUPT
    assert "remove the file" in caught.value.remedy
