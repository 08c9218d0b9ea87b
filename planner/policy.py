"""How many replicas of one role: pure, ``decide(observation, memory, now) -> (proposal, memory)``.

The rules, in the order in which they apply:

1. Need is ``ceil((running + queued) / target_requests_per_replica) + headroom``, within the bounds.
2. A higher need raises the target at once; what is known is enough for that.
3. A lower need lowers it to the most that was needed in the last ``scale_down_after_s``, when the
   cool-down since the last change is over. Needs for the way down are computed with ``hysteresis``,
   so a load beside a boundary stays on its upper side.
4. Unknown is not zero: an observation with anything missing, stale or unreadable counts as a need of
   the present target, so it holds the target for a whole window. So do the first observation after a
   start, which is seeded with what is there, and a gap between two observations.
5. What the fleet says it cannot reach is not asked for until ``retry_unachievable_s`` after it last
   said so: a target that can never be met would keep Dynamo's connector unstable. What serves already
   and the minimum are asked for all the same.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from types import MappingProxyType

from planner.load import Load, Rank, Seen, measure, remember
from planner.observation import Observation, PoolView, Role
from planner.window import NeedWindow

_ROUNDING = 1e-9
"""8 requests at 4.0 each are 2 replicas, whatever binary fractions say."""


class Action(StrEnum):
    NOTHING = "nothing"
    """Nothing is known yet, not even how many replicas there are."""
    START = "start"
    RAISE = "raise"
    LOWER = "lower"
    HOLD = "hold"


@dataclass(frozen=True)
class Proposal:
    """What to propose for one role at one tick."""

    role: Role
    action: Action
    reason: str
    replicas: int | None = None
    """For SET; None: no opinion."""
    floor: int | None = None
    """For AT_LEAST: what the known work needs, whatever others propose; never above ``replicas``."""
    desired: int | None = None
    """What would be proposed if nothing were unachievable."""
    load: Load = field(default_factory=Load)


@dataclass(frozen=True)
class Memory:
    """What the policy carries from one tick to the next; a fresh one is a start."""

    target: int | None = None
    changed_at: float = -math.inf
    last_at: float | None = None
    window: NeedWindow = field(default_factory=NeedWindow)
    seen: Mapping[Rank, Seen] = field(default_factory=lambda: MappingProxyType({}))
    limit: int | None = None
    limit_reason: str = ""
    limited_at: float = -math.inf


@dataclass(frozen=True)
class LoadPolicy:
    """The knobs. Times are seconds, loads are requests."""

    role: Role = Role.DECODE
    target_requests_per_replica: float = 4.0
    headroom_replicas: int = 0
    min_replicas: int = 1
    max_replicas: int = 8
    scale_down_after_s: float = 20.0
    cooldown_s: float = 5.0
    hysteresis: float = 0.1
    """Share of the target load that must be free before a replica is given up, 0 to below 1."""
    stale_after_s: float = 5.0
    retry_unachievable_s: float = 5.0

    def __post_init__(self) -> None:
        checks = {
            "target_requests_per_replica must be a positive number": 0 < self.target_requests_per_replica < math.inf,
            "headroom_replicas must be 0 or more": self.headroom_replicas >= 0,
            "min_replicas must be 0 or more": self.min_replicas >= 0,
            "max_replicas must be at least 1 and at least min_replicas": self.max_replicas >= max(1, self.min_replicas),
            "scale_down_after_s must be a positive number": 0 < self.scale_down_after_s < math.inf,
            "cooldown_s must be 0 or more": 0 <= self.cooldown_s < math.inf,
            "hysteresis must be from 0 to below 1": 0 <= self.hysteresis < 1,
            "stale_after_s must be a positive number": 0 < self.stale_after_s < math.inf,
            "retry_unachievable_s must be 0 or more": 0 <= self.retry_unachievable_s < math.inf,
        }
        broken = [rule for rule, holds in checks.items() if not holds]
        if broken:
            raise ValueError("; ".join(f"{rule} ({self.role} policy)" for rule in broken))

    def decide(self, observation: Observation, memory: Memory, now: float) -> tuple[Proposal, Memory]:
        """Returns the proposal for this tick and the memory for the next.

        Args:
            now: seconds of a clock that never goes back.
        """
        seen = remember(observation.samples, memory.seen, now)
        load = measure(observation, seen, now, self.stale_after_s)
        memory = self._noting_limit(replace(memory, seen=MappingProxyType(seen)), observation.pool, now)
        if memory.target is None:
            return self._start(observation, load, memory, now)
        memory = self._noting_gap(memory, now)
        return self._continue(observation, load, memory, now)

    def _start(self, observation: Observation, load: Load, memory: Memory, now: float) -> tuple[Proposal, Memory]:
        if observation.ready is None:
            return Proposal(self.role, Action.NOTHING, "no opinion: " + "; ".join(load.unknown), load=load), memory
        there = max(observation.ready, observation.pool.target if observation.pool else 0)
        target = self._bounded(max(there, self._need(load)))
        memory = replace(
            memory,
            target=target,
            changed_at=now,
            last_at=now,
            window=NeedWindow().add(now, target, self.scale_down_after_s),
        )
        reason = (
            f"start at {target}: {observation.ready} ready, {self._work(load)}; "
            f"no lower for {self.scale_down_after_s:g} s"
        )
        return self._proposal(Action.START, target, reason, observation, load, memory), memory

    def _continue(self, observation: Observation, load: Load, memory: Memory, now: float) -> tuple[Proposal, Memory]:
        target = memory.target
        assert target is not None
        need = self._need(load)
        keep = self._need(load, 1 - self.hysteresis) if load.complete else max(need, target)
        window = memory.window.add(now, max(keep, need), self.scale_down_after_s)
        lowest = window.highest
        action = Action.HOLD
        if need > target:
            action, new = Action.RAISE, need
            reason = f"raise {target} -> {new}: {self._work(load)}"
        elif lowest >= target:
            new = target
            reason = f"hold {target}: {self._work(load)}"
            if keep < target:
                left = window.highest_at + self.scale_down_after_s - now
                reason += f"; {keep} would do, but {lowest} were needed or unknown: {left:.1f} s of the window left"
        elif now - memory.changed_at < self.cooldown_s:
            new = target
            left = memory.changed_at + self.cooldown_s - now
            reason = f"hold {target}: {self._work(load)}; {lowest} would do, cool-down has {left:.1f} s left"
        else:
            action, new = Action.LOWER, lowest
            reason = (
                f"lower {target} -> {new}: {self._work(load)}; "
                f"at most {new} needed in the last {self.scale_down_after_s:g} s"
            )
        memory = replace(
            memory,
            target=new,
            changed_at=memory.changed_at if new == target else now,
            last_at=now,
            window=window,
        )
        return self._proposal(action, new, reason, observation, load, memory), memory

    def _proposal(
        self, action: Action, target: int, reason: str, observation: Observation, load: Load, memory: Memory
    ) -> Proposal:
        replicas = target
        # What serves already is achieved: a limit never takes it away.
        limit = memory.limit
        if limit is not None:
            limit = max(limit, self.min_replicas, min(observation.ready or 0, target))
        if limit is not None and limit < target:
            replicas = limit
            reason += f"; asking for {limit}, the fleet cannot reach more ({memory.limit_reason})"
        floor = min(self._need(load), replicas)
        return Proposal(self.role, action, reason, replicas, floor, target, load)

    def _noting_limit(self, memory: Memory, pool: PoolView | None, now: float) -> Memory:
        """A limit outlives a status that goes missing, or whose obstacle vanishes once less is asked for."""
        if pool is not None and pool.limit is not None:
            reason = pool.unachievable_reason or "no reason given"
            return replace(memory, limit=pool.limit, limit_reason=reason, limited_at=now)
        if memory.limit is not None and now - memory.limited_at >= self.retry_unachievable_s:
            return replace(memory, limit=None, limit_reason="", limited_at=-math.inf)
        return memory

    def _noting_gap(self, memory: Memory, now: float) -> Memory:
        """What happened between two distant observations is unknown, so it holds."""
        assert memory.target is not None
        assert memory.last_at is not None
        if now - memory.last_at <= self.stale_after_s:
            return memory
        return replace(memory, window=memory.window.add(now, memory.target, self.scale_down_after_s))

    def _need(self, load: Load, share: float = 1.0) -> int:
        replicas = load.requests / (self.target_requests_per_replica * share) - _ROUNDING
        # Bounded before it is rounded: finite counts may add up to infinity.
        return self._bounded(math.ceil(min(replicas, self.max_replicas)) + self.headroom_replicas)

    def _bounded(self, replicas: int) -> int:
        return max(self.min_replicas, min(self.max_replicas, replicas))

    def _work(self, load: Load) -> str:
        ready = "an unknown number of" if load.ready is None else str(load.ready)
        parts = (
            f"{load.running:g} running + {load.queued:g} queued on {load.fresh} of {ready} ready workers, "
            f"{self.target_requests_per_replica:g} a replica"
        )
        if self.headroom_replicas:
            parts += f" + {self.headroom_replicas} headroom"
        if load.unknown:
            parts += f" (unknown: {'; '.join(load.unknown)})"
        return parts
