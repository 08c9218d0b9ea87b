"""Means over seeds and their 95 % intervals (Student's t; differences after Welch)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, variance

# Two-sided 95 % quantiles of Student's t by degrees of freedom; between two, the smaller one's: wider, never narrower.
_T95 = {
    1: 12.706, 2: 4.303, 3: 3.182, 4: 2.776, 5: 2.571, 6: 2.447, 7: 2.365, 8: 2.306, 9: 2.262, 10: 2.228,
    12: 2.179, 15: 2.131, 20: 2.086, 25: 2.060, 30: 2.042, 40: 2.021, 60: 2.000, 120: 1.980,
}  # fmt: skip


@dataclass(frozen=True)
class Estimate:
    """``mean`` ± ``half_width``. One value alone has a half-width of 0: only what no dice decide is run once."""

    mean: float
    half_width: float

    @property
    def above_zero(self) -> bool:
        """Whether the whole interval is."""
        return self.mean - self.half_width > 0

    @property
    def below_zero(self) -> bool:
        return self.mean + self.half_width < 0


def estimate(values: Sequence[float]) -> Estimate:
    """The mean of ``values`` (one a seed, at least one) and its interval."""
    if len(values) < 2:
        return Estimate(values[0], 0.0)
    return Estimate(fmean(values), _t95(len(values) - 1) * math.sqrt(variance(values) / len(values)))


def difference(first: Sequence[float], second: Sequence[float]) -> Estimate:
    """The mean of ``first`` less that of ``second``, and its interval; their seeds need not be the same."""
    errors = [(variance(values) / len(values), len(values) - 1) for values in (first, second) if len(values) > 1]
    mean = fmean(first) - fmean(second)
    total = sum(error for error, _ in errors)
    if total == 0:
        return Estimate(mean, 0.0)
    freedom = total**2 / sum(error**2 / degrees for error, degrees in errors)
    return Estimate(mean, _t95(freedom) * math.sqrt(total))


def _t95(freedom: float) -> float:
    # Welch's degrees come out a hair below the whole number that they are.
    return _T95[max(known for known in _T95 if known <= max(1.0, freedom + 1e-9))]
