"""A planner in a simulated pool, for tests of what it keeps over a restart."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from dynamo_snapshot.replay.simulation.outcome import Outcome
from dynamo_snapshot.replay.simulation.run import simulate
from dynamo_snapshot.replay.simulation.setting import Setting
from dynamo_snapshot.replay.simulation.signals import Signals
from dynamo_snapshot.replay.simulation.startup import startup_model
from dynamo_snapshot.replay.simulation.timing import EngineTiming
from dynamo_snapshot.replay.trace import TraceRequest
from planner.joint import JointPolicy, Memories
from planner.observation import Observation, Role
from planner.policy import Proposal

KNOBS: dict[str, Any] = {"ttft_objective_s": 1.5, "itl_objective_s": 0.2, "max_replicas": 12}
POLICY = JointPolicy.of({"decode": KNOBS})
PREFILL_BINDS = EngineTiming(speed=0.3)
SLOTS_BIND = EngineTiming(decode_speed=0.3, max_requests=8, kv_tokens=256 * 64)
BURSTS_EVERY_S = 45.0


def unchanged(memories: Memories) -> Memories:
    return memories


@dataclass
class Planner:
    """Decides upon what a simulation shows; keeps what it remembered before each tick, and what it said."""

    restarts_at_s: float = float("inf")
    restart: Callable[[Memories], Memories] = unchanged
    """What the one that is started then remembers, of what the one before did."""
    name: str = "planner"
    interval_s: float = 1.0
    memories: Memories = field(default_factory=POLICY.fresh)
    before: list[Memories] = field(default_factory=list)
    seen: list[tuple[float, Observation]] = field(default_factory=list)
    said: list[Proposal] = field(default_factory=list)

    def decide(self, signals: Signals) -> int | None:
        if signals.now >= self.restarts_at_s:
            self.memories, self.restarts_at_s = self.restart(self.memories), float("inf")
        self.before.append(self.memories)
        self.seen.append((signals.now, signals.observation))
        proposals, self.memories = POLICY.decide({Role.DECODE: signals.observation}, self.memories, signals.now)
        self.said.append(proposals[Role.DECODE])
        return self.said[-1].replicas


def bursts(seconds: float, seed: int = 1, prompt: int = 2500) -> list[TraceRequest]:
    """A trickle, and out of it two dozen requests within four seconds, some every 45 s."""
    dice = random.Random(seed)
    requests, at = [], 10.0
    while at < seconds:
        for _ in range(dice.randint(12, 36)):
            tokens = 1 + round(dice.expovariate(1 / prompt))
            requests.append(TraceRequest(at + 4 * dice.random(), tokens, 40))
        at += BURSTS_EVERY_S * (0.5 + dice.random())
    return sorted(requests + stream(0.4, seconds, dice), key=lambda request: request.offset_s)


def stream(rate: float, seconds: float, dice: random.Random) -> list[TraceRequest]:
    requests, at = [], 0.0
    while (at := at + dice.expovariate(rate)) < seconds:
        requests.append(TraceRequest(at, 1000, 30))
    return requests


def play(
    requests: list[TraceRequest],
    planner: Planner,
    *,
    engine: EngineTiming = PREFILL_BINDS,
    seed: int = 1,
    measured_from_s: float = 0.0,
) -> Outcome:
    """Replicas are restored in 8 s."""
    setting = Setting(engine=engine, max_replicas=12, initial_replicas=2)
    return simulate(requests, planner, setting, startup_model("restore-8s"), seed=seed, measured_from_s=measured_from_s)
