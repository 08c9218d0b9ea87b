"""How much work there is, and whether that is known: forward-pass metrics to a :class:`Load`.

Engines publish after every forward pass and at least once a second when idle, so a sequence number
that stands still means that the worker, or the way to it, is gone. What is not known is left out of
the sum, which is then a lower bound, and named in ``unknown``.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from planner.observation import EngineSample, Observation

LEFTOVER_AFTER_S = 60.0
"""Metrics that stand still for so long are a leftover where as many workers as are ready tell fresh ones: a
message that arrives after its worker's removal stays in Dynamo's table, and would be unknown for ever."""

Step = tuple[EngineSample | None, EngineSample, float]
"""What one rank did between two ticks, as its newest metrics at each of them tell it, and for how many seconds they
have been unchanged. The former are None at its first metrics, and at the first after a silence."""


class Seen(NamedTuple):
    """The ranks' newest metrics, and when each last changed, by the policy's clock.

    Two columns and not a tuple a rank: with a thousand engines, what is made anew at each tick is what the garbage
    collector walks.
    """

    samples: Sequence[EngineSample] = ()
    changed_at: Sequence[float] = ()


@dataclass(frozen=True, slots=True)
class Steps:
    """What each fresh rank did; in columns, as :class:`Seen`."""

    before: list[EngineSample | None]
    after: list[EngineSample]
    unchanged_s: list[float]

    def __iter__(self) -> Iterator[Step]:
        return zip(self.before, self.after, self.unchanged_s, strict=True)

    def __len__(self) -> int:
        return len(self.after)

    def some(self, most: int, turn: int) -> Steps:
        """At most ``most`` of them, others at each turn."""
        stride = -(-len(self.after) // most)
        if stride <= 1:
            return self
        part = slice(turn % stride, None, stride)
        return Steps(self.before[part], self.after[part], self.unchanged_s[part])


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


def follow(observation: Observation, seen: Seen, now: float, stale_after_s: float) -> tuple[Load, Seen, Steps]:
    """Sums the fresh metrics of workers that serve; also what to remember, and what each fresh rank did.

    Args:
        seen: what this returned to remember at the tick before; ranks that are gone are forgotten.
        stale_after_s: metrics that have not changed for longer are unknown; see also :data:`LEFTOVER_AFTER_S`.
    """
    pool, samples = observation.pool, observation.samples
    ignored = pool.not_serving if pool else frozenset()
    running = queued = 0.0
    silent: list[tuple[str, float, str]] = []
    left_out: list[int] = []
    known, since = _known(samples, seen)
    remembered, befores = list(samples), list(known)
    changed_at, ages = [now] * len(samples), [0.0] * len(samples)
    for place, (sample, before, at) in enumerate(zip(samples, known, since, strict=True)):
        if before is None or before.sequence != sample.sequence or _changed(before, sample):
            age = 0.0
        else:
            remembered[place], changed_at[place] = before, at
            ages[place] = age = now - at
        is_running, is_queued = sample.running, sample.queued
        if (
            is_running is not None
            and is_queued is not None
            and 0 <= is_running < math.inf
            and 0 <= is_queued < math.inf
            and age <= stale_after_s
            and sample.worker_id not in ignored
        ):
            running += is_running
            queued += is_queued
            if now - at > stale_after_s:
                befores[place] = None
            continue
        left_out.append(place)
        if sample.worker_id not in ignored:
            readable = _is_count(is_running) and _is_count(is_queued)
            silent.append((sample.worker_id, age, f"unchanged for {age:.1f} s" if readable else "unreadable"))
    fresh = dict.fromkeys([sample.worker_id for sample in samples if sample.worker_id not in ignored], True)
    fresh.update((worker_id, False) for worker_id, _, _ in silent)
    unknown = _unknown(observation, fresh, silent)
    load = Load(running, queued, sum(fresh.values()), observation.ready, unknown)
    steps = Steps(befores, list(samples), ages)
    for column in (steps.before, steps.after, steps.unchanged_s):
        for place in reversed(left_out):
            del column[place]
    return load, Seen(remembered, changed_at), steps


def _known(samples: Sequence[EngineSample], seen: Seen) -> tuple[Sequence[EngineSample | None], Sequence[float]]:
    """What each sample's rank told before, and since when. Ranks keep their order as a rule."""
    before = seen.samples
    same = len(samples) == len(before)
    for one, other in zip(samples, before, strict=False):
        if one.worker_id != other.worker_id or one.dp_rank != other.dp_rank:
            same = False
            break
    if same:
        return before, seen.changed_at
    places = {(sample.worker_id, sample.dp_rank): place for place, sample in enumerate(before)}
    found = [places.get((sample.worker_id, sample.dp_rank)) for sample in samples]
    return (
        [None if place is None else before[place] for place in found],
        [0.0 if place is None else seen.changed_at[place] for place in found],
    )


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
