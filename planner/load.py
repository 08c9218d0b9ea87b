"""How much work there is, and whether that is known: forward-pass metrics to a :class:`Load`.

Engines publish after every forward pass and at least once a second when idle, so a sequence number
that stands still means that the worker, or the way to it, is gone. What is not known is left out of
the sum, which is then a lower bound, and named in ``unknown``.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from planner.observation import EngineSample, Observation

LEFTOVER_AFTER_S = 60.0
"""Metrics that stand still for so long are a leftover where as many workers as are ready tell fresh ones: a
message that arrives after its worker's removal stays in Dynamo's table, and would be unknown for ever."""

Rank = tuple[str, int]
"""(worker id, data-parallel rank)"""


@dataclass(frozen=True)
class Seen:
    """When a rank's metrics last changed, by the policy's clock."""

    fingerprint: tuple[int, float | None, float | None]
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


def remember(samples: Iterable[EngineSample], seen: Mapping[Rank, Seen], now: float) -> dict[Rank, Seen]:
    """Returns when each rank's metrics last changed; ranks that are gone are forgotten."""
    result: dict[Rank, Seen] = {}
    for sample in samples:
        rank = (sample.worker_id, sample.dp_rank)
        fingerprint = (sample.sequence, _plain(sample.running), _plain(sample.queued))
        known = seen.get(rank)
        result[rank] = known if known is not None and known.fingerprint == fingerprint else Seen(fingerprint, now)
    return result


def measure(observation: Observation, seen: Mapping[Rank, Seen], now: float, stale_after_s: float) -> Load:
    """Sums the fresh metrics of workers that serve.

    Args:
        seen: the result of :func:`remember` for this observation.
        stale_after_s: metrics that have not changed for longer are unknown; see also :data:`LEFTOVER_AFTER_S`.
    """
    pool = observation.pool
    ignored = pool.not_serving if pool else frozenset()
    running = queued = 0.0
    fresh: dict[str, bool] = {}
    silent: list[tuple[str, float, str]] = []
    for sample in sorted(observation.samples, key=lambda sample: (sample.worker_id, sample.dp_rank)):
        if sample.worker_id in ignored:
            continue
        age = now - seen[sample.worker_id, sample.dp_rank].at
        readable = _is_count(sample.running) and _is_count(sample.queued)
        if readable and age <= stale_after_s:
            running += sample.running or 0.0
            queued += sample.queued or 0.0
            fresh.setdefault(sample.worker_id, True)
            continue
        fresh[sample.worker_id] = False
        what = f"unchanged for {age:.1f} s" if readable else "unreadable"
        silent.append((sample.worker_id, age, what))
    reporting = sum(fresh.values())
    ready = observation.ready
    all_tell = ready is not None and reporting >= ready
    unknown = [
        f"metrics of worker {worker_id} {what}"
        for worker_id, age, what in silent
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
    return Load(running, queued, reporting, ready, tuple(unknown))


def _is_count(value: float | None) -> bool:
    return value is not None and math.isfinite(value) and value >= 0


def _plain(value: float | None) -> float | None:
    """NaN differs from itself and would make unchanged metrics look fresh."""
    return None if value is None or math.isnan(value) else value
