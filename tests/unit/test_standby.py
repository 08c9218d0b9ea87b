"""Houses made ahead: taken one by one, made again a while later, never handed out when they have ended."""

from __future__ import annotations

import asyncio
import errno
from dataclasses import dataclass
from pathlib import Path

import pytest
from virtual_time import run_virtually

from dynamo_snapshot.agent import standby as standby_module
from dynamo_snapshot.agent.house import STANDBY, HostHouses, House
from dynamo_snapshot.agent.standby import REFILL_S, Standby
from dynamo_snapshot.errors import SnapshotError
from dynamo_snapshot.model import Reason


@dataclass
class Thing:
    name: str
    usable: bool = True


class Maker:
    def __init__(self) -> None:
        self.made: list[Thing] = []
        self.discarded: list[str] = []
        self.given: list[str] = []
        self.fails = 0

    async def make(self, name: str) -> Thing:
        await asyncio.sleep(0.01)
        assert name not in self.given, "a name is never given twice"
        self.given.append(name)
        if self.fails:
            self.fails -= 1
            raise SnapshotError(Reason.HOLDER_FAILED, "no")
        self.made.append(Thing(str(len(self.given))))
        return self.made[-1]

    async def discard(self, thing: Thing) -> None:
        self.discarded.append(thing.name)

    def standby(self, count: int) -> Standby[Thing]:
        return Standby(count, self.make, self.discard)


def names(*things: Thing | None) -> list[str | None]:
    return [None if thing is None else thing.name for thing in things]


def test_as_many_as_wanted_are_ready_and_what_was_taken_is_made_again_after_a_while() -> None:
    async def work() -> None:
        maker = Maker()
        standby = maker.standby(2)
        standby.begin()
        await asyncio.sleep(0.1)
        assert names(standby.take(), standby.take(), standby.take()) == ["1", "2", None]
        await asyncio.sleep(REFILL_S - 0.1)
        assert len(maker.made) == 2, "a restore has the processors first"
        await asyncio.sleep(0.2)
        assert names(standby.take(), standby.take()) == ["3", "4"]
        await standby.end()

    run_virtually(work())


def test_who_waits_for_all_of_them_goes_on_when_they_are_there_or_cannot_be_made() -> None:
    async def work() -> None:
        maker = Maker()
        standby = maker.standby(2)
        await standby.full()
        standby.begin()
        await standby.full()
        assert len(maker.made) == 2
        standby.take()
        await standby.full()
        assert len(maker.made) == 3
        maker.fails = 1
        standby.take()
        await standby.full()
        assert len(maker.made) == 3
        await asyncio.sleep(0.1)
        standby.take()
        waiting = asyncio.create_task(standby.full())
        await asyncio.sleep(0)
        await standby.end()
        await waiting

    run_virtually(work())


def test_who_waits_after_another_beginning_waits_for_what_that_makes() -> None:
    async def work() -> None:
        maker = Maker()
        standby = maker.standby(2)
        standby.begin()
        await standby.full()
        await standby.end()
        standby.begin()
        await standby.full()
        assert len(maker.made) == 4
        await standby.end()

    run_virtually(work())


def test_none_are_made_where_none_are_wanted() -> None:
    async def work() -> None:
        maker = Maker()
        standby = maker.standby(0)
        standby.begin()
        await asyncio.sleep(10)
        assert standby.take() is None
        assert maker.made == []
        await standby.end()

    run_virtually(work())


def test_one_that_has_ended_is_discarded_and_not_handed_out() -> None:
    async def work() -> None:
        maker = Maker()
        standby = maker.standby(2)
        standby.begin()
        await asyncio.sleep(0.1)
        maker.made[0].usable = False
        assert names(standby.take()) == ["2"]
        await asyncio.sleep(2)
        assert maker.discarded == ["1"]
        await standby.end()
        assert maker.discarded == ["1", "3", "4"]

    run_virtually(work())


def test_what_cannot_be_made_is_tried_again_when_one_is_wanted() -> None:
    async def work() -> None:
        maker = Maker()
        maker.fails = 1
        standby = maker.standby(1)
        standby.begin()
        await asyncio.sleep(1)
        assert standby.take() is None
        await asyncio.sleep(REFILL_S + 0.1)
        assert names(standby.take()) == ["2"]
        await standby.end()

    run_virtually(work())


async def test_a_full_disk_leaves_no_half_a_house_and_others_are_made_once_there_is_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(standby_module, "REFILL_S", 0.0)
    houses, begun = HostHouses(tmp_path, standby=1), asyncio.Queue[str]()

    async def build(name: str, path: Path, cgroup: Path | None) -> House:
        _half(path)
        begun.put_nowait(name)
        raise OSError(errno.ENOSPC, "no space left on device")

    monkeypatch.setattr(houses, "_build", build)
    await houses.begin()
    try:
        async with asyncio.timeout(5):
            for number in range(2):
                await begun.get()
                while any((tmp_path / STANDBY).iterdir()):  # noqa: ASYNC110  a task brings it about
                    await asyncio.sleep(0.005)
                houses.prepare(f"replica-{number}")
    finally:
        await houses.close()


def _half(house: Path) -> None:
    (house / "control").mkdir(parents=True)
