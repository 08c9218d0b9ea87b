"""The file of what is learnt: kept now and then, read at the start, and never in the way of a decision."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import threading
from collections.abc import Callable
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from planned_fleet import context, message

from dynamo_snapshot.replay.decisions.anew import verify
from planner.config import RoleBounds, planner_config, plugin_options
from planner.engine import FORGET_S, ScalingEngine, engine_from_options
from planner.fleet_status import NoFleetStatus
from planner.joint import JointPolicy
from planner.learnt import OLDEST_S, decode
from planner.learnt_file import EVERY_S, MOST_BYTES, LearntFile
from planner.observation import Role
from planner.policy import Action, Proposal
from planner.records import DecisionLog

POLICY = JointPolicy.of({"decode": {"ttft_objective_s": 1.5}})
LEARNS_S = 20
"""After so many busy ticks pass times are known."""


class AtOnce(Executor):
    """In place of a thread; ``holds`` what is submitted while it is ``busy``."""

    def __init__(self) -> None:
        self.busy, self.holds = False, list[Callable[[], None]]()

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        future: Future[Any] = Future()
        self.holds.append(lambda: future.set_result(fn(*args, **kwargs)))
        if not self.busy:
            self.go_on()
        return future

    def go_on(self) -> None:
        self.busy = False
        while self.holds:
            self.holds.pop(0)()


class Troubled(JointPolicy):
    """Fails while it is told to."""

    failing = False

    def decide(self, *arguments: Any) -> Any:
        if Troubled.failing:
            raise ZeroDivisionError("float division by zero")
        return super().decide(*arguments)


class Planner:
    """One life of a planner at ``path``, ticking once a second of the clock that all of them share."""

    now = 5000.0

    def __init__(self, path: Path, of: str = "engines", log: Path | None = None) -> None:
        self.thread = AtOnce()
        self.file = LearntFile(path, of, thread=self.thread)
        self.engine = ScalingEngine(
            Troubled(POLICY.policies),
            NoFleetStatus(),
            DecisionLog(log),
            learnt=self.file,
            clock=lambda: Planner.now % 1000,  # as after a reboot
            wall_clock=lambda: Planner.now,
        )
        self._passes = 0

    def run(self, seconds: int = LEARNS_S, requests: float = 6.0) -> Proposal:
        """Returns the last proposal."""
        for _ in range(seconds):
            Planner.now += 1.0
            self._passes += 1
            engines = {f"{worker}/0": message(self._passes, requests / 2) for worker in range(2)}
            (proposal,) = self.engine.propose(context(2, engines))
        return proposal

    def knows(self) -> bool:
        """Whether its first decision is made with what was learnt before."""
        first = self.run(1)
        assert first.action is Action.START
        return first.forecast is not None

    def end(self) -> None:
        asyncio.run(self.engine.close())


@pytest.fixture(autouse=True)
def _clock() -> None:
    Planner.now, Troubled.failing = 5000.0, False


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "learnt.json"


@pytest.fixture
def kept(path: Path) -> bytes:
    """What a planner left that has learnt."""
    planner = Planner(path)
    planner.run()
    planner.end()
    return path.read_bytes()


def said(caplog: pytest.LogCaptureFixture) -> list[str]:
    logged = [each for each in caplog.records if each.name == "planner.learnt_file" and each.levelno >= logging.WARNING]
    assert not any(each.exc_info for each in logged)
    return [each.getMessage() for each in logged]


def test_the_next_planner_goes_on_where_the_one_before_was_killed(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    Planner(path).run(int(EVERY_S) + 5)
    Planner.now += 20
    with caplog.at_level(logging.INFO):
        second = Planner(path)
    assert "going on with what was learnt until 24 s ago" in caplog.text
    first = second.run(1)
    assert first.action is Action.START
    assert first.forecast is not None
    assert first.forecast.alike > 0
    assert not said(caplog)


def test_it_is_written_every_half_minute_and_at_the_end(path: Path) -> None:
    planner = Planner(path)
    planner.run(int(EVERY_S))
    assert not path.exists()
    planner.run(1)
    assert decode(path.read_bytes()).at == Planner.now
    at = Planner.now
    planner.run(int(EVERY_S) - 1)
    assert decode(path.read_bytes()).at == at
    planner.run(1)
    assert decode(path.read_bytes()).at == at + EVERY_S
    planner.run(7)
    planner.end()
    assert decode(path.read_bytes()).at == at + EVERY_S + 7
    assert sorted(each.name for each in path.parent.iterdir()) == ["learnt.json", "learnt.json.lock"]


def test_what_was_read_is_no_newer_for_having_been_read(path: Path, kept: bytes) -> None:
    for _ in range(5):
        Planner(path).run(int(EVERY_S) - 1)
    assert path.read_bytes() == kept


def test_a_slow_disk_delays_nothing_and_nothing_piles_up(path: Path) -> None:
    planner = Planner(path)
    planner.thread.busy = True
    planner.run(5 * int(EVERY_S))
    assert len(planner.thread.holds) == 1
    assert not path.exists()
    planner.thread.go_on()
    assert decode(path.read_bytes()).at == 5001.0 + EVERY_S


def test_in_a_thread_of_its_own_it_is_the_same(path: Path) -> None:
    file = LearntFile(path, "engines")
    asyncio.run(file.close(POLICY, POLICY.fresh(), 5000.0))
    assert decode(path.read_bytes()).roles.keys() == {Role.DECODE}


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (b"", "Input data was truncated"),
        (b"{}", "missing required field `of`"),
        (b"\x00\xff nonsense", "is malformed"),
        (b" " * (MOST_BYTES + 1), "bytes, of"),
        (b'{"x":' + b"[" * 100_000, "it is nested too deeply"),
        (b'{"of":"engines","at":1.0,"roles":{}}', "it is 1 hours away"),
    ],
    ids=["empty", "another", "nonsense", "huge", "deep", "old"],
)
def test_a_file_of_no_use_is_set_aside_with_a_word(
    path: Path, content: bytes, why: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("planner.learnt.OLDEST_S", 3600.0)
    path.write_bytes(content)
    assert not Planner(path).knows()
    (line,) = said(caplog)
    assert why in line
    assert "it is now learnt.json.set-aside, and learning starts anew" in line
    assert not path.exists()
    assert path.with_name("learnt.json.set-aside").read_bytes() == content


@pytest.mark.parametrize("share", [0.1, 0.5, 0.99])
def test_a_torn_file_is_set_aside(path: Path, kept: bytes, share: float, caplog: pytest.LogCaptureFixture) -> None:
    path.write_bytes(kept[: int(share * len(kept))])
    assert not Planner(path).knows()
    assert len(said(caplog)) == 1


def test_what_is_of_other_engines_or_too_old_is_set_aside(
    path: Path, kept: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    assert not Planner(path, of="others").knows()
    path.with_name("learnt.json.set-aside").rename(path)
    Planner.now += OLDEST_S - 60
    assert Planner(path).knows()
    Planner.now += 60
    assert not Planner(path).knows()
    other, old = said(caplog)
    assert "it is of engines, not of others" in other
    assert "it is 24 hours away; 24 count" in old


@pytest.mark.parametrize("make", [Path.mkdir, os.mkfifo], ids=["folder", "pipe"])
def test_what_is_no_file_is_left_alone(
    path: Path, make: Callable[[Path], None], caplog: pytest.LogCaptureFixture
) -> None:
    make(path)
    assert not Planner(path).knows()
    (line,) = said(caplog)
    assert "cannot be read" in line
    assert path.exists()


def test_a_file_that_cannot_be_written_is_reported_once_and_stops_nothing(
    path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = path.parent / "later"
    planner = Planner(folder / "learnt.json")
    assert planner.run(4 * int(EVERY_S)).replicas is not None
    (line,) = said(caplog)
    assert "cannot be written" in line
    assert "No such file or directory" in line
    folder.mkdir()
    planner.run(int(EVERY_S))
    assert decode((folder / "learnt.json").read_bytes()).at == Planner.now - (Planner.now - 5001.0) % EVERY_S
    assert len(said(caplog)) == 1


def test_where_no_thread_can_be_started_decisions_go_on(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    class NoThread(Executor):
        def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
            raise RuntimeError("can't start new thread")

    file = LearntFile(path, thread=NoThread())
    for now in (0.0, EVERY_S, 2 * EVERY_S):
        file.keep(POLICY, POLICY.fresh(), now, Planner.now)
    file.forget("it is wrong")
    asyncio.run(file.close(POLICY, POLICY.fresh(), Planner.now))
    (line,) = said(caplog)
    assert "cannot be written: can't start new thread" in line


def test_of_two_planners_one_writes_and_the_other_says_so_until_it_may(
    path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    live = Planner(path)
    live.run(int(EVERY_S) + 1)
    at = decode(path.read_bytes()).at
    other = Planner(path)
    assert other.knows(), "as in a rolling update"
    other.run(3 * int(EVERY_S))
    (line,) = said(caplog)
    assert "another planner keeps it: give this one a learnt_path of its own" in line
    other.engine.reset()
    assert decode(path.read_bytes()).at == at, "what the other forgets is not the live one's"
    live.end()
    ended = decode(path.read_bytes()).at
    other.run(2 * int(EVERY_S))
    assert decode(path.read_bytes()).at > ended


def test_a_planner_of_other_engines_does_not_take_a_live_ones_file_away(
    path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    live = Planner(path)
    live.run(int(EVERY_S) + 1)
    before = path.read_bytes()
    assert not Planner(path, of="others").knows()
    (line,) = said(caplog)
    assert "it is of engines, not of others; another planner keeps it" in line
    assert path.read_bytes() == before
    live.end()


def test_a_file_that_is_still_being_written_at_the_end_is_no_other_planners(
    path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("planner.learnt_file.CLOSE_S", 0.01)
    disk_answers, thread = threading.Event(), ThreadPoolExecutor(1)
    file = LearntFile(path, "engines", thread=thread)
    for now in (0.0, EVERY_S):
        file.keep(POLICY, POLICY.fresh(), now, Planner.now)
    thread.submit(disk_answers.wait)
    asyncio.run(file.close(POLICY, POLICY.fresh(), Planner.now))
    other = Planner(path)
    other.run(int(EVERY_S) + 1)
    disk_answers.set()
    thread.shutdown()
    slow, refused = said(caplog)
    assert "takes long to write" in slow
    assert "another planner keeps it" in refused
    other.run(int(EVERY_S))
    assert decode(path.read_bytes()).at == Planner.now


def test_what_was_learnt_is_kept_though_a_connection_ends_with_an_error(path: Path) -> None:
    class Broken(NoFleetStatus):
        async def close(self) -> None:
            raise ValueError("Port could not be cast to integer value")

    engine = ScalingEngine(POLICY, Broken(), DecisionLog(None), learnt=LearntFile(path))
    with pytest.raises(ValueError, match="Port"):
        asyncio.run(engine.close())
    assert decode(path.read_bytes()).roles.keys() == {Role.DECODE}


def test_what_is_to_be_forgotten_does_not_come_back(path: Path, kept: bytes, caplog: pytest.LogCaptureFixture) -> None:
    planner = Planner(path)
    assert planner.knows()
    planner.thread.busy = True
    planner.run(int(EVERY_S) + 1)  # it is being written at the very moment
    planner.engine.reset()
    planner.thread.go_on()
    assert not planner.knows()
    assert not path.exists()
    assert not Planner(path).knows()
    (line,) = said(caplog)
    assert "the planner was told to forget" in line


def test_what_may_be_why_decisions_fail_is_neither_kept_nor_brought_back(
    path: Path, kept: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    planner = Planner(path)
    assert planner.knows()
    planner.run(1)
    Troubled.failing = True
    planner.run(int(FORGET_S))
    assert path.read_bytes() == kept
    assert planner.run(1).replicas is not None
    assert not path.exists()
    (line,) = said(caplog)
    assert "decisions have failed for 60 s" in line
    planner.end()
    assert not path.exists()
    Troubled.failing = False
    assert not Planner(path).knows()


@pytest.mark.parametrize("before", [0, 1])
def test_where_a_first_decision_fails_the_next_is_made_without_what_was_learnt(
    path: Path, kept: bytes, before: int, caplog: pytest.LogCaptureFixture
) -> None:
    planner = Planner(path)
    if before:
        assert planner.knows()
    Troubled.failing = True
    assert planner.run(1).action is (Action.HOLD if before else Action.NOTHING)
    Troubled.failing = False
    assert not planner.knows()
    (line,) = said(caplog)
    assert "one of the first two decisions failed, maybe for what was learnt before; it is now" in line


def test_a_log_over_restarts_is_decided_anew_the_same(path: Path, tmp_path: Path) -> None:
    log = tmp_path / "decisions.jsonl"
    for life in range(3):
        planner = Planner(path, log=log)
        assert planner.knows() is (life > 0)
        planner.run(60)
        planner.end()
    found = verify(log)
    assert found.holds, found.first
    assert found.same == 3 * 61

    lines = log.read_bytes().splitlines()
    beginnings = [number for number, line in enumerate(lines) if b'"begins"' in line]
    assert ["memories" in json.loads(lines[number])["begins"] for number in beginnings] == [False, True, True]
    without = json.loads(lines[beginnings[1]])
    del without["begins"]["memories"]
    lines[beginnings[1]] = json.dumps(without).encode()
    log.write_bytes(b"\n".join(lines) + b"\n")
    assert verify(log).different > 0, "what a run begins with has to be told"


def test_options_name_the_file_and_whose_it_is(path: Path) -> None:
    bounds = {"decode": RoleBounds()}
    without = plugin_options(planner_config(namespace="n", model_name="m", roles=bounds))
    assert not {"learnt_path", "learnt_of"} & without.keys()
    options = plugin_options(
        planner_config(namespace="n", model_name="m", roles=bounds, backend="vllm", learnt_path=str(path))
    )
    assert options["learnt_of"] == "m on vllm"
    asyncio.run(engine_from_options(**options).close())
    assert decode(path.read_bytes()).of == "m on vllm"
