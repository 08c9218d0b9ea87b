"""Every knob of the policy: its unit, its range and what it does; one table for checks and for the reference."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class Knob:
    """One field of the policy. ``low`` and ``high`` bound it; an exclusive bound is not in the range itself."""

    name: str
    unit: str
    low: float
    high: float
    effect: str
    low_in: bool = True
    high_in: bool = False
    optional: bool = False
    """None switches it off."""

    @property
    def range(self) -> str:
        """The range in words."""
        if self.high == math.inf:
            words = f"{self.low:g} or more" if self.low_in else "a positive number"
        else:
            words = f"from {self.low:g} to {'' if self.high_in else 'below '}{self.high:g}"
        return f"{words}, or none" if self.optional else words

    def holds(self, value: float | None) -> bool:
        """Whether ``value`` is in the range."""
        if value is None:
            return self.optional
        above = value >= self.low if self.low_in else value > self.low
        return above and (value <= self.high if self.high_in else value < self.high)


KNOBS: tuple[Knob, ...] = (
    Knob(
        "ttft_objective_s",
        "s",
        0,
        math.inf,
        "within which a request's first token is in time; with none, sizes follow `target_requests_per_replica`",
        low_in=False,
        optional=True,
    ),
    Knob(
        "itl_objective_s",
        "s",
        0,
        math.inf,
        "between two tokens; bounds how many requests a replica decodes at once",
        low_in=False,
        optional=True,
    ),
    Knob(
        "miss_cost_s",
        "GPU-seconds",
        0,
        math.inf,
        "what one request outside its objective is worth: higher buys attainment with idle replicas",
    ),
    Knob(
        "replica_cost",
        "GPUs",
        0.001,
        math.inf,
        "what a replica costs a second, in the GPU-seconds of `miss_cost_s`: its GPUs, each by what its type costs "
        "beside the others, and one without GPUs as one; where it is left out, `gpus_per_replica`",
    ),
    Knob(
        "target_requests_per_replica",
        "requests",
        0,
        math.inf,
        "running and queued requests that one replica should carry, while nothing better is known",
        low_in=False,
    ),
    Knob("spare_replicas", "replicas", 0, math.inf, "kept beyond what is worth its cost, whatever happens"),
    Knob("min_replicas", "replicas", 0, math.inf, "never fewer"),
    Knob("max_replicas", "replicas", 1, math.inf, "never more"),
    Knob(
        "scale_down_after_s",
        "s",
        0,
        math.inf,
        "how long a lower need must be confirmed, at least; longer where starting anew costs more",
        low_in=False,
    ),
    Knob("cooldown_s", "s", 0, math.inf, "between the last change and a step down"),
    Knob(
        "hysteresis",
        "share",
        0,
        1,
        "of the target load that must be free before a replica is given up, where requests are counted",
    ),
    Knob(
        "stale_after_s",
        "s",
        0,
        math.inf,
        "metrics that have not changed for longer are unknown; engines report once a second when idle",
        low_in=False,
    ),
    Knob("retry_unachievable_s", "s", 0, math.inf, "how long a limit counts after the fleet last told it"),
)


def broken(values: dict[str, float | None]) -> list[str]:
    """Says what is wrong with ``values``, by knob and in combination; empty: nothing."""
    wrong = [f"{knob.name} must be {knob.range}" for knob in KNOBS if not knob.holds(values[knob.name])]
    if wrong:
        return wrong
    most, least, spare = (values[name] or 0 for name in ("max_replicas", "min_replicas", "spare_replicas"))
    rules = {
        "max_replicas must be at least 1 and at least min_replicas": most >= least,
        "spare_replicas must be below max_replicas: something has to be left for the load": spare < most,
    }
    return [rule for rule, held in rules.items() if not held]
