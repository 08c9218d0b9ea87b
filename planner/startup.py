"""How long a start takes: quantiles of what was measured, and when what is on its way will be there.

Durations are seconds from the order to serving. A restore is a fixed part plus bytes divided by a rate, so
a snapshot that was never restored has the times of others, brought to its size.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType

from planner.observation import PoolView, Starting

COLD_START, RESTORE, WAKE = "cold_start", "restore", "wake"

PRIOR_S: Mapping[str, float] = MappingProxyType({COLD_START: 60.0, RESTORE: 5.0, WAKE: 2.0})
"""Before the first measurement of a way: middling among what is published for single-GPU models."""

OVERDUE_SHARE = 0.5
"""A start that has taken longer than any before is expected to take this share of its age more."""

TRUSTED_SAMPLES = 5
"""With fewer, the largest stands for every upper quantile."""


@dataclass(frozen=True)
class StartUp:
    """Start-up times by way, in seconds; ways that were not measured have their prior."""

    times: Mapping[str, tuple[float, ...]] = field(default_factory=lambda: MappingProxyType({}))
    wakes: bool = False
    """Whether the next one is woken: enough are parked."""

    def quantile(self, way: str, share: float) -> float:
        """The duration that ``share`` (0 to 1) of starts by ``way`` do not exceed."""
        return _quantile(self._known(way), share)

    def remaining(self, start: Starting, share: float) -> float:
        """Seconds until ``start`` serves, given that it has not in ``age_s``; at the ``share`` quantile."""
        longer = [second for second in self._known(start.way) if second > start.age_s]
        if not longer:
            return start.age_s * OVERDUE_SHARE
        return _quantile(longer, share) - start.age_s

    def next_way(self) -> str:
        """The way that the fleet will take for the next one: a restore where one was ever measured or seen."""
        if self.wakes:
            return WAKE
        known = [way for way in (RESTORE, COLD_START) if self.times.get(way)]
        if len(known) == 2 and self.quantile(COLD_START, 0.5) <= self.quantile(RESTORE, 0.5):
            return COLD_START
        return known[0] if known else RESTORE

    def _known(self, way: str) -> Sequence[float]:
        return self.times.get(way) or (PRIOR_S.get(way, PRIOR_S[COLD_START]),)


def start_up(pool: PoolView | None, before: StartUp) -> StartUp:
    """What is known with this view: a status that is missing, or a way it tells nothing of, takes nothing away."""
    if pool is None:
        return before
    told = {way: measured for way, times in pool.start_times.items() if (measured := _durations(times))}
    if all(before.times.get(way) == times for way, times in told.items()):
        return before
    return StartUp(MappingProxyType({**before.times, **told}))


def restore_times(
    series: Iterable[tuple[str | None, tuple[float, ...]]], snapshot_id: str | None, sizes: Mapping[str, int]
) -> tuple[float, ...]:
    """Restore times for ``snapshot_id``: its own, or those of others brought to its size.

    Args:
        series: (snapshot, seconds) pairs.
        sizes: bytes by snapshot; where they are unknown, times count as they are.
    """
    known = [(snapshot, seconds) for snapshot, seconds in series if seconds]
    own = tuple(second for snapshot, seconds in known if snapshot == snapshot_id for second in seconds)
    if own:
        return own
    others = [(snapshot, second) for snapshot, seconds in known for second in seconds]
    sized = [(sizes[snapshot], second) for snapshot, second in others if snapshot is not None and snapshot in sizes]
    size = sizes.get(snapshot_id or "")
    if size is None or not sized:
        return tuple(second for _, second in others)
    _, per_byte = fixed_and_rate(sized)
    return tuple(max(0.0, second + per_byte * (size - known_size)) for known_size, second in sized)


def fixed_and_rate(samples: Sequence[tuple[int, float]]) -> tuple[float, float]:
    """(seconds, seconds a byte) of the least-squares line through (bytes, seconds), neither negative.

    One size alone tells no rate: all of it is fixed.
    """
    count = len(samples)
    mean_size = sum(size for size, _ in samples) / count
    mean_s = sum(second for _, second in samples) / count
    spread = sum((size - mean_size) ** 2 for size, _ in samples)
    if spread == 0:
        return mean_s, 0.0
    slope = sum((size - mean_size) * (second - mean_s) for size, second in samples) / spread
    slope = min(max(0.0, slope), mean_s / mean_size)
    return mean_s - slope * mean_size, slope


def _durations(times: Iterable[float]) -> tuple[float, ...]:
    return tuple(second for second in times if math.isfinite(second) and second >= 0)


def _quantile(samples: Sequence[float], share: float) -> float:
    ordered = sorted(samples)
    if len(ordered) < TRUSTED_SAMPLES and share > 0.5:
        return ordered[-1]
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)]
