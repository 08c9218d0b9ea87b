"""The planner's plugin over the fleet core's simulated world, in virtual time: the whole loop but Dynamo.

Workers that serve share the requests that are there evenly and tell of them as Dynamo's engines do. A planner writes
a decision, as Dynamo's connector does, where it differs from the last that it wrote, or found at its start.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType, SimpleNamespace
from typing import Any

import msgspec
from fleet_world import World, rules
from simulated_node import Luck

from dynamo_snapshot.fleet.core.messages import Hinted
from dynamo_snapshot.fleet.core.rules import Rules
from dynamo_snapshot.fleet.status import fleet_status
from dynamo_snapshot.model import FleetStatus, ScalingHint
from planner.engine import ScalingEngine
from planner.fleet_status import NoFleetStatus
from planner.hint_sender import NoHintSender
from planner.hints import NO_HINTS, HintPolicy
from planner.joint import JointPolicy
from planner.policy import Proposal
from planner.records import DecisionLog

KNOBS: dict[str, Any] = {
    "target_requests_per_replica": 4,
    "max_replicas": 8,
    "scale_down_after_s": 20.0,
    "cooldown_s": 5.0,
}
SLOTS = 4
"""Requests that a worker has running; further ones queue."""


class Told(NoFleetStatus):
    """The status that the fleet controller would have published."""

    def __init__(self, world: World) -> None:
        self._world = world

    def latest(self) -> FleetStatus:
        return fleet_status(self._world.state, self._world.now)


class Heard(NoHintSender):
    """Hints that the fleet controller hears."""

    def __init__(self, world: World, heard: list[ScalingHint]) -> None:
        self._world, self._heard = world, heard

    def tell(self, hint: ScalingHint) -> None:
        self._heard.append(hint)
        self._world.feed(Hinted(hint=hint))


class PlannedFleet:
    """A pool of decode workers, its fleet controller, and one planner or several.

    With ``hints`` they ask for parked replicas and prefetches too, and what they ask for is ``heard`` at once.
    ``sizes`` are the decisions that were written, ``said`` the newest planner's proposals, one a tick.
    """

    def __init__(
        self,
        luck: Luck | None = None,
        fleet: Rules | None = None,
        tick_s: float = 1.0,
        hints: HintPolicy = NO_HINTS,
        advisory: bool = False,
        **knobs: Any,
    ) -> None:
        self.world = World(fleet or rules(), luck)
        self.tick_s = tick_s
        self.knobs = {**KNOBS, **knobs}
        self.hints = hints
        self.advisory = advisory
        self.planners: list[ScalingEngine] = []
        self._written: dict[ScalingEngine, int | None] = {}
        self.sizes: list[int] = []
        self.said: list[Proposal] = []
        self.heard: list[ScalingHint] = []
        self.serving: list[int] = []
        self.starting: list[int] = []
        self._passes = 0

    def add_planner(self) -> None:
        engine = ScalingEngine(
            JointPolicy.of({"decode": self.knobs}, insists=not self.advisory),
            Told(self.world),
            DecisionLog(None),
            hint_policy=self.hints,
            hints=Heard(self.world, self.heard),
            clock=lambda: self.world.now,
            wall_clock=lambda: self.world.now,
        )
        self.planners.append(engine)
        self._written[engine] = self.sizes[-1] if self.sizes else None

    def run(self, seconds: float, requests: float) -> None:
        """Lets time pass with so many requests there; the planners' ticks are spread evenly over each interval."""
        for _ in range(round(seconds / self.tick_s)):
            for planner in self.planners:
                self.world.run(self.tick_s / len(self.planners))
                self._decide(planner, requests)

    def reach(self, replicas: int, requests: float) -> None:
        """Lets the first worker boot and be captured, and the fleet grow to what ``requests`` need."""
        self.world.run(15)
        self.add_planner()
        self.run(30, requests)
        assert len(self.world.serving()) == replicas

    def _decide(self, planner: ScalingEngine, requests: float) -> None:
        workers = {f"{replica.instance_id}/0": replica for replica in self.world.serving()}
        self._passes += 1
        each = requests / len(workers) if workers else 0.0
        engines = {key: message(self._passes, each) for key in workers}
        (proposal,) = planner.propose(context(len(workers), engines))
        status = fleet_status(self.world.state, self.world.now).pools[0]
        self.said.append(proposal)
        self.serving.append(status.serving)
        self.starting.append(status.pending)
        if proposal.replicas not in (None, self._written[planner]) and not self.advisory:
            self._written[planner] = proposal.replicas
            self.world.decide(proposal.replicas)
            if self.sizes[-1:] != [proposal.replicas]:
                self.sizes.append(proposal.replicas)


def message(passes: int, requests: float) -> bytes:
    """Forward-pass metrics of one worker with so many requests: 2000 tokens prefilled in 0.2 s where there are any."""
    running = min(SLOTS, requests)
    prefill = running / 2
    scheduled = {"num_decode_requests": running - prefill, "sum_decode_kv_tokens": 2000 * (running - prefill)}
    scheduled |= {"num_prefill_requests": prefill, "sum_prefill_tokens": 2000 if prefill else 0}
    queued = {"num_prefill_requests": requests - running, "sum_prefill_tokens": 2000 * (requests - running)}
    wall_s = 0.21 if prefill else 0.01 if running else 0.0
    content = {"counter_id": passes, "wall_time": wall_s, "scheduled_requests": scheduled, "queued_requests": queued}
    return msgspec.msgpack.encode(content)


def context(
    ready: int | None,
    engines: Mapping[str, bytes],
    ready_prefill: int | None = None,
    prefill: Mapping[str, bytes] = MappingProxyType({}),
) -> Any:
    """What Dynamo's planner gives the plugin at a tick: workers, and engines' metrics by worker and rank."""
    return SimpleNamespace(
        request_id="tick",
        decision_id="decision",
        observations=SimpleNamespace(
            workers=SimpleNamespace(ready_decode=ready, ready_prefill=ready_prefill),
            fpm=SimpleNamespace(decode_engines=engines, prefill_engines=prefill),
        ),
    )
