"""How many replicas of one role: pure, ``decide(observation, memory, now) -> (proposal, memory)``.

It minimises GPU-seconds plus ``miss_cost_s`` for each request that misses its objective. What is decided now
is there one start-up time from now, so that is where it looks: of the moments on record that were like this
one, it takes what came after them as what may come now, works out how many replicas each such future needs to
keep its requests within ``ttft_objective_s``, and takes the size of least cost. Work that waits, and capacity
on its way with its expected arrival, are part of it.

Rules around that, in the order in which they apply:

1. Where nothing is known to predict with (no objective, or no rate yet), need is
   ``ceil((running + queued) / target_requests_per_replica)``. ``spare_replicas`` come on top of either.
2. A higher need raises the target at once; what is known is enough for that.
3. A lower need lowers it to the most that was needed in the last ``scale_down_after_s`` or start-up time, if
   that is longer, when the cool-down since the last change is over. A step down that is taken back within
   such a time makes the next one wait twice as long.
4. Unknown is not zero: an observation with anything missing, stale or unreadable counts as a need of
   the present target, so it holds the target for a whole window. So do the first observation after a
   start, which is seeded with what is there, and a gap between two observations.
5. Where the record shows that a constant size, or a floor under the forecast's, would have cost less (see
   :mod:`planner.steady`), it is kept. Work that is there comes before it, and the forecast where more comes
   than noise explains.
6. What the fleet says it cannot reach is not asked for until ``retry_unachievable_s`` after it last
   said so: a target that can never be met would keep Dynamo's connector unstable. What serves already
   and the minimum are asked for all the same.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from enum import StrEnum

from planner.forecast import BALANCE, Forecast, Knowledge, Objectives, observe
from planner.knobs import KNOBS, broken
from planner.load import Load, Seen, follow
from planner.observation import Observation, PoolView, Role
from planner.parked import look_ahead_with_parked
from planner.steady import Steady, Terms, Tick
from planner.waiting import Queue, Slotted
from planner.window import NeedWindow

_ROUNDING = 1e-9
"""8 requests at 4.0 each are 2 replicas, whatever binary fractions say."""
MOST_PATIENCE = 8.0
"""How many times a window may be lengthened because steps down were taken back."""


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
    forecast: Forecast | None = None
    """What was predicted; None: need came from the number of requests."""


@dataclass(frozen=True)
class Memory:
    """What the policy carries from one tick to the next; a fresh one is a start."""

    target: int | None = None
    changed_at: float = -math.inf
    last_at: float | None = None
    window: NeedWindow = field(default_factory=NeedWindow)
    seen: Seen = field(default_factory=Seen)
    limit: int | None = None
    limit_reason: str = ""
    limited_at: float = -math.inf
    knowledge: Knowledge = field(default_factory=Knowledge)
    lowered_from: int = 0
    lowered_at: float = -math.inf
    regretted_at: float = -math.inf
    patience: float = 1.0
    hold_s: float = 0.0
    free: int = 0
    """What would be proposed by the forecast alone."""
    steady: Steady = field(default_factory=Steady)
    known: NeedWindow = field(default_factory=NeedWindow)
    """What the work that was there needed."""


@dataclass(frozen=True)
class Need:
    """What this tick asks for."""

    rise: int
    """Worth ordering."""
    keep: int
    """Worth keeping, if it is there or on its way."""
    floor: int
    """For the work that is there."""
    why: str
    forecast: Forecast | None = None


@dataclass(frozen=True)
class LoadPolicy:
    """The knobs. Times are seconds, loads are requests."""

    role: Role = Role.DECODE
    ttft_objective_s: float | None = None
    itl_objective_s: float | None = None
    miss_cost_s: float = 10.0
    replica_cost: float = 1.0
    target_requests_per_replica: float = 4.0
    spare_replicas: int = 0
    min_replicas: int = 1
    max_replicas: int = 8
    scale_down_after_s: float = 4.0
    cooldown_s: float = 1.0
    hysteresis: float = 0.1
    """Share of the target load that must be free before a replica is given up, 0 to below 1."""
    stale_after_s: float = 5.0
    retry_unachievable_s: float = 5.0

    def __post_init__(self) -> None:
        wrong = broken({knob.name: getattr(self, knob.name) for knob in KNOBS})
        if wrong:
            raise ValueError("; ".join(f"{rule} ({self.role} policy)" for rule in wrong))

    @property
    def miss_replica_s(self) -> float:
        """Seconds of one replica that a request outside its objective is worth."""
        return self.miss_cost_s / self.replica_cost

    def decide(self, observation: Observation, memory: Memory, now: float) -> tuple[Proposal, Memory]:
        """Returns the proposal for this tick and the memory for the next.

        Args:
            now: seconds of a clock that never goes back.
        """
        load, seen, steps = follow(observation, memory.seen, now, self.stale_after_s)
        elapsed_s = None if memory.last_at is None else now - memory.last_at
        knowledge = observe(
            memory.knowledge,
            observation.pool,
            steps,
            load,
            elapsed_s,
            self.stale_after_s,
        )
        memory = replace(memory, seen=seen, knowledge=knowledge)
        memory = self._noting_limit(memory, observation.pool, now)
        if memory.target is None:
            return self._start(observation, load, memory, now)
        memory = self._noting_gap(memory, now)
        return self._continue(observation, load, memory, now, elapsed_s or 0.0)

    def _start(self, observation: Observation, load: Load, memory: Memory, now: float) -> tuple[Proposal, Memory]:
        if observation.ready is None:
            return Proposal(self.role, Action.NOTHING, "no opinion: " + "; ".join(load.unknown), load=load), memory
        # What is ready beyond the fleet's target drains; what is not ready yet is on its way.
        there = observation.pool.target if observation.pool else observation.ready
        need = self._need(observation, load, memory)
        target = self._bounded(max(there, need.rise))
        memory = replace(
            memory,
            target=target,
            free=target,
            changed_at=now,
            last_at=now,
            window=NeedWindow().add(now, target, self.scale_down_after_s),
        )
        reason = f"start at {target}: {observation.ready} ready, {need.why}; no lower for {self.scale_down_after_s:g} s"
        return self._proposal(Action.START, target, reason, observation, load, memory, need), memory

    def _continue(
        self, observation: Observation, load: Load, memory: Memory, now: float, elapsed_s: float
    ) -> tuple[Proposal, Memory]:
        target, free = memory.target, memory.free
        assert target is not None
        need = self._need(observation, load, memory)
        keep = max(need.rise, need.keep if load.complete else free)
        if need.forecast is not None:
            memory = replace(memory, hold_s=need.forecast.hold_s)
            if load.complete and 0 < elapsed_s <= self.stale_after_s:
                memory = replace(memory, steady=self._judging(memory, need.forecast, elapsed_s))
        length_s = self._window_s(memory)
        window = memory.window.add(now, keep, length_s)
        lowest = window.highest
        if self._too_soon(need, memory, free, now):
            new = free
            why = f"{need.why}; {need.rise} was given up {now - memory.lowered_at:.1f} s ago"
        elif need.rise > free:
            new, why = need.rise, need.why
        elif lowest >= free:
            new, why = free, need.why
            if keep < free:
                left = window.highest_at + length_s - now
                why += f"; {keep} would do, but {lowest} were needed or unknown: {left:.1f} s of the window left"
        elif now - memory.changed_at < self.cooldown_s:
            new = free
            left = memory.changed_at + self.cooldown_s - now
            why = f"{need.why}; {lowest} would do, cool-down has {left:.1f} s left"
        else:
            new, why = lowest, f"{need.why}; at most {lowest} needed in the last {length_s:g} s"
        known = memory.known.add(now, need.floor, length_s)
        memory = replace(
            self._noting_regret(memory, free, new, now),
            free=new,
            changed_at=memory.changed_at if new == free else now,
            last_at=now,
            window=window,
            known=known,
        )
        new, bounded = self._within(memory, load)
        memory = replace(memory, target=new)
        action = Action.RAISE if new > target else Action.LOWER if new < target else Action.HOLD
        change = f"{target}" if new == target else f"{target} -> {new}"
        return self._proposal(
            action, new, f"{action} {change}: {why}{bounded}", observation, load, memory, need
        ), memory

    def _judging(self, memory: Memory, forecast: Forecast, elapsed_s: float) -> Steady:
        """The record of sizes, with what came since the tick before."""
        knowledge = memory.knowledge
        demand, limit, prompts = knowledge.demand, knowledge.limit, forecast.prompts
        assert prompts is not None
        work_s, empty_s = demand.tokens * knowledge.prefill_token_s, 0.0
        queue: Queue = prompts
        if limit is not None and demand.requests * limit.request_s > work_s:
            work_s, empty_s = demand.requests * limit.request_s, limit.residence_s
            queue = Slotted(limit.slots, limit.request_s, forecast.slack_s)
        tick = Tick(
            elapsed_s,
            work_s,
            demand.requests,
            knowledge.history.now.middle**2 * knowledge.token_s,
            memory.free,
            forecast.lead_s,
        )
        terms = Terms(self.miss_replica_s, queue, BALANCE, empty_s)
        return memory.steady.add(tick, terms, self.min_replicas, self.max_replicas)

    def _within(self, memory: Memory, load: Load) -> tuple[int, str]:
        """The forecast's size within what has paid; what is known to be needed comes before it."""
        free, bounds = memory.free, memory.steady.bounds
        size = self._bounded(bounds.hold(free, memory.known.highest))
        if not load.complete:
            size = max(size, memory.target or 0)
        if size == free:
            return size, ""
        kind = "kept throughout" if bounds.most is not None else "as the least"
        return size, f"; {free} by forecast alone, but {bounds.least} {kind} would have cost less"

    def _need(self, observation: Observation, load: Load, memory: Memory) -> Need:
        by_count = self._by_count(load)
        forecast = None
        if self.ttft_objective_s is not None:
            objectives = Objectives(self.ttft_objective_s, self.itl_objective_s, self.miss_replica_s)
            there = memory.free if memory.target is not None else observation.ready or 0
            forecast = look_ahead_with_parked(
                memory.knowledge, observation, objectives, there, self.min_replicas, self.max_replicas
            )
        if forecast is None:
            return self._by_decoding(load, memory) or by_count
        need = Need(
            self._bounded(forecast.rise + self.spare_replicas),
            self._bounded(forecast.keep + self.spare_replicas),
            self._bounded(forecast.floor),
            f"{forecast.text()}{self._missing(load)}",
            forecast,
        )
        if memory.knowledge.slots.suspected and by_count.rise > need.rise:
            # Requests wait, and not for prefill: until it is known for what, they are counted.
            return replace(by_count, keep=max(by_count.keep, need.keep), forecast=forecast)
        return need

    def _by_decoding(self, load: Load, memory: Memory) -> Need | None:
        """For a pool that only decodes: what keeps the time between tokens; None while that is unknown."""
        service = memory.knowledge.service
        if self.itl_objective_s is None or service.prefills or not load.ready:
            return None
        most = service.requests_within(self.itl_objective_s)
        if most is None:
            return None

        def size(requests: float) -> int:
            return self._bounded(math.ceil(min(requests / most, self.max_replicas) - _ROUNDING) + self.spare_replicas)

        why = f"{load.requests:g} requests, {most:.1f} a replica keep {self.itl_objective_s:g} s between tokens"
        need = size(load.requests)
        return Need(need, size(load.requests / (1 - self.hysteresis)), need, why + self._missing(load))

    def _by_count(self, load: Load) -> Need:
        need = self._replicas_for(load.requests, 1.0)
        ready = "an unknown number of" if load.ready is None else str(load.ready)
        why = (
            f"{load.running:g} running + {load.queued:g} queued on {load.fresh} of {ready} ready workers, "
            f"{self.target_requests_per_replica:g} a replica"
        )
        if self.spare_replicas:
            why += f" + {self.spare_replicas} spare"
        keep = self._replicas_for(load.requests, 1 - self.hysteresis)
        return Need(need, keep, need, why + self._missing(load))

    def _proposal(
        self,
        action: Action,
        target: int,
        reason: str,
        observation: Observation,
        load: Load,
        memory: Memory,
        need: Need,
    ) -> Proposal:
        replicas = target
        # What serves already is achieved: a limit never takes it away.
        limit = memory.limit
        if limit is not None:
            limit = max(limit, self.min_replicas, min(observation.ready or 0, target))
        if limit is not None and limit < target:
            replicas = limit
            reason += f"; asking for {limit}, the fleet cannot reach more ({memory.limit_reason})"
        floor = min(need.floor, replicas)
        return Proposal(self.role, action, reason, replicas, floor, target, load, need.forecast)

    def _window_s(self, memory: Memory) -> float:
        return max(self.scale_down_after_s, memory.hold_s) * memory.patience

    def _too_soon(self, need: Need, memory: Memory, target: int, now: float) -> bool:
        """A small step down is not taken back at once for what may come, only for what is there."""
        return (
            target < need.rise <= memory.lowered_from
            and need.floor <= target
            and memory.lowered_from - target <= max(1, memory.lowered_from // 5)
            and now - memory.lowered_at < self.scale_down_after_s
        )

    def _noting_regret(self, memory: Memory, target: int, new: int, now: float) -> Memory:
        """A small step down that is taken back was one too soon; after a time without, the next one is easier."""
        window_s = self._window_s(memory)
        if new < target:
            calm = now - memory.regretted_at > 2 * window_s
            patience = max(1.0, memory.patience / 2) if calm else memory.patience
            return replace(memory, lowered_from=target, lowered_at=now, patience=patience)
        small = abs(new - memory.lowered_from) <= max(1, memory.lowered_from // 5)
        if new > target and small and now - memory.lowered_at <= 2 * window_s:
            patience = min(MOST_PATIENCE, 2 * memory.patience)
            return replace(memory, patience=patience, lowered_at=-math.inf, regretted_at=now)
        return memory

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
        return replace(memory, window=memory.window.add(now, memory.target, self._window_s(memory)))

    def _replicas_for(self, requests: float, share: float) -> int:
        replicas = requests / (self.target_requests_per_replica * share) - _ROUNDING
        # Bounded before it is rounded: finite counts may add up to infinity.
        return self._bounded(math.ceil(min(replicas, self.max_replicas)) + self.spare_replicas)

    def _bounded(self, replicas: int) -> int:
        return max(self.min_replicas, min(self.max_replicas, replicas))

    def _missing(self, load: Load) -> str:
        return f" (unknown: {'; '.join(load.unknown)})" if load.unknown else ""
