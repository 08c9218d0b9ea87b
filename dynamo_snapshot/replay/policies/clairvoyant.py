"""The ceiling: a policy that knows every request and the start-up times beforehand.

No production can have it; what it reaches, no policy need be asked to exceed. It plans with a fluid model
(:mod:`clairvoyant_plan`) at several margins, tries each plan and the best constant sizes in the simulator, and
keeps the one with the lowest cost: GPU-seconds plus ``miss_cost_s`` a request that missed its TTFT objective.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

from dynamo_snapshot.replay.policies.clairvoyant_plan import SLOT_S, cheapest, work
from dynamo_snapshot.replay.simulation.run import simulate
from dynamo_snapshot.replay.simulation.setting import Setting
from dynamo_snapshot.replay.simulation.signals import Signals
from dynamo_snapshot.replay.simulation.startup import StartupModel
from dynamo_snapshot.replay.simulation.timing import PassTimes
from dynamo_snapshot.replay.trace import TraceRequest

Sizes = tuple[int, ...]
"""What to ask for in each slot; the last one for good."""

_MARGINS = (0.8, 0.95, 1.1, 1.3, 1.6)
_IN_TIME = 0.95
"""Share of the starts that are ordered early enough."""
_LONGEST = 0.9
"""As a share of all requests' lengths."""
_TRIAL_SEED = 1_000_003
"""Plans are tried with other start-up times than the run's."""


@dataclass(frozen=True)
class ClairvoyantKnobs:
    miss_cost_s: float = 30.0
    """GPU-seconds that one request outside its TTFT objective is worth, more than 0."""

    def __post_init__(self) -> None:
        if not 0 < self.miss_cost_s < math.inf:
            raise ValueError(f"miss_cost_s must be a positive number, not {self.miss_cost_s}")


class Clairvoyant:
    """Knows the future; one cost knob."""

    interval_s = SLOT_S

    def __init__(self, knobs: ClairvoyantKnobs = ClairvoyantKnobs(), *, name: str = "clairvoyant") -> None:
        self.name = name
        self.knobs = knobs
        self._sizes: Sizes = ()

    def foresee(self, requests: Sequence[TraceRequest], setting: Setting, startup: StartupModel) -> None:
        """Plans for this trace; called by the simulator before the run."""
        self._sizes = _foresight(tuple(requests), setting).plan(startup, self.knobs.miss_cost_s)

    def decide(self, signals: Signals) -> int | None:
        return Planned(self._sizes).decide(signals)


class Foresight:
    """What is known of a trace beforehand. Neither a plan nor what it came to in a trial is worked out twice."""

    def __init__(self, requests: Sequence[TraceRequest], setting: Setting) -> None:
        self._requests = requests
        self._setting = setting
        self._load = work(requests, setting, _MARGINS)
        self._plans: dict[tuple[StartupModel, float], Sizes] = {}
        self._trials: dict[tuple[StartupModel | None, Sizes], Trial] = {}

    def plan(self, startup: StartupModel, miss_cost_s: float) -> Sizes:
        """The sizes with the lowest cost in their trial; of equal ones, those that were thought of first."""
        known = self._plans.get((startup, miss_cost_s))
        if known is None:
            tried = list(dict.fromkeys(self._ideas(startup, miss_cost_s)))
            known = min(tried, key=lambda sizes: self._trial(sizes, startup).cost(miss_cost_s))
            self._plans[startup, miss_cost_s] = known
        return known

    def _ideas(self, startup: StartupModel, miss_cost_s: float) -> Iterator[Sizes]:
        setting = self._setting
        lead = math.ceil(startup.quantile_s(_IN_TIME) / SLOT_S)
        drain_s = _drain_s(self._requests, setting)
        needed = 0.0
        for ready in cheapest(self._load, setting, startup.typical_s, drain_s, miss_cost_s):
            needed = max(needed, sum(ready) / len(ready))
            yield tuple(max(ready[slot : slot + lead + 1]) for slot in range(len(ready)))
        for size in range(setting.min_replicas, min(setting.max_replicas, math.ceil(needed) + 2) + 1):
            yield (size,)

    def _trial(self, sizes: Sizes, startup: StartupModel) -> Trial:
        # A constant size never starts a replica.
        key = (startup if len(sizes) > 1 else None, sizes)
        if key not in self._trials:
            outcome = simulate(self._requests, Planned(sizes), self._setting, startup, seed=_TRIAL_SEED)
            self._trials[key] = Trial(outcome.gpu_hours * 3600, 1 - outcome.ttft_attainment, outcome.requests)
        return self._trials[key]


@lru_cache(maxsize=8)
def _foresight(requests: tuple[TraceRequest, ...], setting: Setting) -> Foresight:
    return Foresight(requests, setting)


class Trial(NamedTuple):
    """What a plan came to."""

    gpu_s: float
    missed: float
    """Share of the requests without a first token in time."""
    requests: int

    def cost(self, miss_cost_s: float) -> float:
        return self.gpu_s + miss_cost_s * self.missed * self.requests


class Planned:
    """Follows a list of sizes."""

    name = "planned"
    interval_s = SLOT_S

    def __init__(self, sizes: Sizes) -> None:
        self.sizes = sizes

    def decide(self, signals: Signals) -> int | None:
        return self.sizes[min(round(signals.now / SLOT_S), len(self.sizes) - 1)]


def _drain_s(requests: Sequence[TraceRequest], setting: Setting) -> float:
    """How long a replica that is withdrawn drains, about: as long as the longest of a few requests runs."""
    times = PassTimes(setting.engine)
    tokens = sorted(request.output_tokens for request in requests)
    return tokens[int(_LONGEST * len(tokens))] * times.decode(0) if tokens else 0.0
