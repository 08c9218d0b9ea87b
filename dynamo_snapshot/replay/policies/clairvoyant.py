"""The ceiling: a policy that knows every request and the start-up times beforehand.

No production can have it; what it reaches, no policy need be asked to exceed. It plans with a fluid model
(:mod:`clairvoyant_plan`) at several margins, tries each plan and the best constant sizes in the simulator, and
keeps the one with the lowest cost: GPU-seconds plus ``miss_cost_s`` a request that missed its TTFT objective.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from dynamo_snapshot.replay.policies.clairvoyant_plan import SLOT_S, cheapest, work
from dynamo_snapshot.replay.simulation.outcome import Outcome
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
        tried: list[tuple[float, int, Sizes]] = []
        for sizes in self._plans(requests, setting, startup):
            trial = simulate(requests, Planned(sizes), setting, startup, seed=_TRIAL_SEED)
            tried.append((self._cost(trial), len(tried), sizes))
        self._sizes = min(tried)[2]

    def decide(self, signals: Signals) -> int | None:
        return Planned(self._sizes).decide(signals)

    def _plans(self, requests: Sequence[TraceRequest], setting: Setting, startup: StartupModel) -> Iterator[Sizes]:
        lead = math.ceil(startup.quantile_s(_IN_TIME) / SLOT_S)
        drain_s = _drain_s(requests, setting)
        needed = 0.0
        for margin in _MARGINS:
            load = work(requests, setting, margin)
            ready = cheapest(load, setting, startup.typical_s, drain_s, self.knobs.miss_cost_s)
            needed = max(needed, sum(ready) / len(ready))
            yield tuple(max(ready[slot : slot + lead + 1]) for slot in range(len(ready)))
        for size in range(setting.min_replicas, min(setting.max_replicas, math.ceil(needed) + 2) + 1):
            yield (size,)

    def _cost(self, outcome: Outcome) -> float:
        return outcome.gpu_hours * 3600 + self.knobs.miss_cost_s * (1 - outcome.ttft_attainment) * outcome.requests


class Planned:
    """Follows a list of sizes."""

    name = "planned"
    interval_s = SLOT_S

    def __init__(self, sizes: Sizes) -> None:
        self._sizes = sizes

    def decide(self, signals: Signals) -> int | None:
        return self._sizes[min(round(signals.now / SLOT_S), len(self._sizes) - 1)]


def _drain_s(requests: Sequence[TraceRequest], setting: Setting) -> float:
    """How long a replica that is withdrawn drains, about: as long as the longest of a few requests runs."""
    times = PassTimes(setting.engine)
    tokens = sorted(request.output_tokens for request in requests)
    return tokens[int(_LONGEST * len(tokens))] * times.decode(0) if tokens else 0.0
