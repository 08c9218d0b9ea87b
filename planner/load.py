"""How much work there is, and whether that is known: forward-pass metrics to a :class:`Load`.

Engines publish after every forward pass and at least once a second when idle, so a sequence number
that stands still means that the worker, or the way to it, is gone. What is not known is left out of
the sum, which is then a lower bound, and named in ``unknown``.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from planner.observation import EngineSample, Observation

LEFTOVER_AFTER_S = 60.0
"""Metrics that stand still for so long are a leftover where as many workers as are ready tell fresh ones: a
message that arrives after its worker's removal stays in Dynamo's table, and would be unknown for ever."""

Rank = tuple[str, int]
"""(worker id, data-parallel rank)"""


class Seen(NamedTuple):
    """A rank's newest metrics and when they last changed, by the policy's clock."""

    sample: EngineSample
    at: float


@dataclass(frozen=True)
class Load:
    """The work of one role."""

    running: float = 0.0
    queued: float = 0.0
    fresh: int = 0
    """Serving workers whose metrics are fresh."""
    ready: int | None = None
    unknown: tuple[str, ...] = ()
    """Why the sum is only a lower bound; empty: it is complete."""

    @property
    def requests(self) -> float:
        return self.running + self.queued

    @property
    def complete(self) -> bool:
        return not self.unknown


class Step(NamedTuple):
    """What one rank did between two ticks, as its newest metrics at each of them tell it."""

    before: EngineSample | None
    """None: its first metrics, or the first after a silence."""
    after: EngineSample
    unchanged_s: float
    """Seconds since its metrics last changed."""


def follow(
    observation: Observation, seen: Mapping[Rank, Seen], now: float, stale_after_s: float
) -> tuple[Load, dict[Rank, Seen], list[Step]]:
    """Sums the fresh metrics of workers that serve; also what to remember, and what each fresh rank did.

    Args:
        seen: what this returned to remember at the tick before; ranks that are gone are forgotten.
        stale_after_s: metrics that have not changed for longer are unknown; see also :data:`LEFTOVER_AFTER_S`.
    """
    pool = observation.pool
    ignored = pool.not_serving if pool else frozenset()
    running = queued = 0.0
    fresh: dict[str, bool] = {}
    silent: list[tuple[str, float, str]] = []
    remembered: dict[Rank, Seen] = {}
    steps: list[Step] = []
    for sample in observation.samples:
        worker_id = sample.worker_id
        rank = (worker_id, sample.dp_rank)
        known = seen.get(rank)
        if known is None or known.sample.sequence != sample.sequence or _changed(known.sample, sample):
            remembered[rank] = Seen(sample, now)
            age = 0.0
        else:
            remembered[rank] = known
            age = now - known.at
        if worker_id in ignored:
            continue
        is_running, is_queued = sample.running, sample.queued
        if (
            is_running is not None
            and is_queued is not None
            and 0 <= is_running < math.inf
            and 0 <= is_queued < math.inf
            and age <= stale_after_s
        ):
            running += is_running
            queued += is_queued
            fresh.setdefault(worker_id, True)
            before = None if known is None or now - known.at > stale_after_s else known.sample
            steps.append(Step(before, sample, age))
            continue
        fresh[worker_id] = False
        readable = _is_count(is_running) and _is_count(is_queued)
        silent.append((worker_id, age, f"unchanged for {age:.1f} s" if readable else "unreadable"))
    unknown = _unknown(observation, fresh, silent)
    return Load(running, queued, sum(fresh.values()), observation.ready, unknown), remembered, steps


def _unknown(
    observation: Observation, fresh: Mapping[str, bool], silent: list[tuple[str, float, str]]
) -> tuple[str, ...]:
    ready, pool = observation.ready, observation.pool
    all_tell = ready is not None and sum(fresh.values()) >= ready
    unknown = [
        f"metrics of worker {worker_id} {what}"
        for worker_id, age, what in sorted(silent)
        if not (all_tell and age > LEFTOVER_AFTER_S)
    ]
    if pool is not None and not pool.discovery_known:
        unknown.append("discovery cannot be read")
    if ready is None:
        unknown.append("number of ready workers unknown")
    elif ready == 0:
        unknown.append("no worker is ready, so no work can be seen")
    elif len(fresh) < ready:
        unknown.append(f"no metrics from {ready - len(fresh)} of {ready} ready workers")
    return tuple(unknown)


def _changed(before: EngineSample, after: EngineSample) -> bool:
    """NaN differs from itself and must not make unchanged metrics look fresh."""
    return _plain(before.running) != _plain(after.running) or _plain(before.queued) != _plain(after.queued)


def _is_count(value: float | None) -> bool:
    return value is not None and math.isfinite(value) and value >= 0


def _plain(value: float | None) -> float | None:
    return None if value is None or math.isnan(value) else value
