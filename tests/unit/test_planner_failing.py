"""A policy that fails lowers nothing: what was proposed before is held, and after a while its memory is given up."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from planned_fleet import context, message

from planner.engine import FORGET_S, ScalingEngine
from planner.fleet_status import NoFleetStatus
from planner.joint import JointPolicy, Memories
from planner.observation import Observation, Role
from planner.policy import Action, LoadPolicy, Proposal
from planner.records import DecisionLog


@dataclass
class Trouble:
    """What a policy's arithmetic has; ``poisoned``: with what it remembers alone."""

    now: bool = False
    poisoned: bool = False


@dataclass(frozen=True)
class Troubled(JointPolicy):
    trouble: Trouble = field(default_factory=Trouble)

    def decide(
        self, observations: Mapping[Role, Observation], memories: Memories, now: float
    ) -> tuple[dict[Role, Proposal], Memories]:
        remembers = any(memory.policy.target is not None for memory in memories.values())
        if self.trouble.now or (self.trouble.poisoned and remembers):
            raise ZeroDivisionError("float division by zero")
        return super().decide(observations, memories, now)


class Ticks:
    """Ticks of a plugin whose workers have so many requests."""

    def __init__(self, log: Path) -> None:
        self.trouble, self.now, self._passes = Trouble(), 100.0, 0
        roles = {Role.DECODE: LoadPolicy(role=Role.DECODE), Role.PREFILL: LoadPolicy(role=Role.PREFILL)}
        self.engine = ScalingEngine(
            Troubled(roles, trouble=self.trouble),
            NoFleetStatus(),
            DecisionLog(log),
            clock=lambda: self.now,
            wall_clock=lambda: self.now,
        )

    def tick(self, ready: int, requests: float, seconds: float = 1.0) -> Proposal:
        """Returns what is proposed for decode."""
        self.now += seconds
        self._passes += 1
        engines = {f"{worker}/0": message(self._passes, requests / ready) for worker in range(ready)}
        (decode,) = (each for each in self.engine.propose(context(ready, engines)) if each.role is Role.DECODE)
        return decode


@pytest.fixture
def ticks(tmp_path: Path) -> Ticks:
    return Ticks(tmp_path / "decisions.jsonl")


def test_while_decisions_fail_the_last_one_is_held_whatever_is_ready(ticks: Ticks, tmp_path: Path) -> None:
    before = ticks.tick(4, 16)
    assert (before.replicas, before.floor) == (4, 4)
    ticks.trouble.now = True
    held = ticks.tick(1, 16)
    assert (held.action, held.replicas, held.floor) == (Action.HOLD, 4, 4)
    assert held.reason == "hold 4: the decision failed (ZeroDivisionError: float division by zero)"
    ticks.trouble.now = False
    after = ticks.tick(4, 24)
    assert (after.action, after.replicas) == (Action.RAISE, 6)
    lines = [json.loads(line) for line in (tmp_path / "decisions.jsonl").read_text().splitlines()]
    assert [line["tick"] for line in lines if line.get("role") == "decode"] == [1, 2, 3]


def test_before_the_first_decision_there_is_nothing_to_hold(ticks: Ticks) -> None:
    ticks.trouble.now = True
    assert ticks.tick(4, 16).replicas is None
    ticks.trouble.now = False
    assert ticks.tick(4, 16).replicas == 4


def test_a_reset_forgets_what_would_be_held_too(ticks: Ticks) -> None:
    ticks.tick(4, 16)
    ticks.engine.reset()
    ticks.trouble.now = True
    assert ticks.tick(4, 16).replicas is None


def test_what_is_remembered_is_forgotten_when_decisions_fail_for_long(ticks: Ticks, tmp_path: Path) -> None:
    ticks.tick(4, 16)
    ticks.trouble.poisoned = True
    for _ in range(int(FORGET_S)):
        assert ticks.tick(4, 16).action is Action.HOLD
    assert ticks.tick(4, 16).action is Action.START
    lines = [json.loads(line) for line in (tmp_path / "decisions.jsonl").read_text().splitlines()]
    assert len([line for line in lines if "begins" in line]) == 2
    assert len({line["run"] for line in lines}) == 2


def test_a_failure_that_lasts_is_logged_once_a_minute(ticks: Ticks, caplog: pytest.LogCaptureFixture) -> None:
    ticks.tick(4, 16)
    ticks.trouble.now = True
    for _ in range(int(3 * FORGET_S)):
        assert ticks.tick(4, 16).replicas == 4
    assert len([record for record in caplog.records if record.exc_info]) == 3
