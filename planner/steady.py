"""Whether changing the size has paid: what each constant size would have cost, and what following the forecast did.

The pool is one queue of work, of prefill or of slots, whichever binds, that ``n`` replicas shorten by ``n``
seconds a second; what comes misses its objective when the queue is longer than that leaves, or where its
replica happens to be busy. Fed with the demand of each tick, that tells for each size, kept throughout or as a
floor under the forecast's, what it would have cost in GPU-seconds and misses; the past fades. Where load is
smooth the best constant size is cheaper than reacting to noise, until more comes than noise explains; where it
comes in bursts a floor is cheaper than starting for each.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from planner.waiting import NEGLIGIBLE, Queue

FADES_S = 600.0
"""After so many seconds, the old counts 1/e."""
LEAST_S = 120.0
"""On record before it is judged."""
CLEARLY = 0.03
"""By what share another size must be cheaper than the present one."""
CALM_S = 30.0
"""On record before load is known to be smooth."""
SMOOTH = 0.25
"""Squared coefficient of variation of ten seconds' demand up to which load is smooth: only then a size is kept
throughout."""
SURGE = 3.0
"""Demand of ten seconds that is so many standard deviations above its mean is no noise: load has changed."""


@dataclass(frozen=True)
class Tick:
    """What came since the tick before: seconds of work and requests, and the size that the forecast would have."""

    elapsed_s: float
    work_s: float
    requests: float
    busy: float
    """Seconds of work a second, over the last ten."""
    free: int
    lead_s: float


@dataclass(frozen=True)
class Terms:
    """What counts."""

    miss_replica_s: float
    """Seconds of one replica that a miss is worth."""
    queue: Queue
    """How many requests are late because their replica happens to be busy."""
    share: float
    """Of a replica's time, what can go into work, 0 to 1."""
    empty_s: float = 0.0
    """How much more an empty replica takes at once: how long a request keeps a slot, where slots bind."""


@dataclass(frozen=True)
class Bounds:
    """What the record says to stay within; ``most`` None: as the forecast says."""

    least: int = 0
    most: int | None = None
    surge: bool = False
    """More comes than noise explains: ``most`` does not hold."""

    def hold(self, free: int, known: int) -> int:
        """The size for a forecast of ``free``; ``known`` is what the work that is there needs."""
        size = max(free, self.least)
        return size if self.most is None or self.surge else min(size, max(self.most, known))


@dataclass(frozen=True)
class Steady:
    """The record: (queued seconds, cost) by size."""

    sizes: tuple[int, ...] = ()
    constant: tuple[tuple[float, float], ...] = ()
    floors: tuple[tuple[float, float], ...] = ()
    """Of the forecast's sizes, but never below this one; the first is the forecast alone."""
    ordered: tuple[tuple[float, int], ...] = ()
    """(age, size) that the forecast would have had within one start-up time."""
    seconds: float = 0.0
    busy: tuple[float, float, float] = (0.0, 0.0, 0.0)
    """Seconds, demand of ten seconds and its square, summed."""
    bounds: Bounds = Bounds()

    def add(self, tick: Tick, terms: Terms, lowest: int, highest: int) -> Steady:
        """Returns the record with one tick more, and the bounds that follow from it."""
        sizes = self.sizes
        constant, floors = self.constant, self.floors
        if not sizes or (sizes[0], sizes[-1]) != (lowest, highest):
            sizes = _sizes(lowest, highest)
            constant = floors = ((0.0, 0.0),) * len(sizes)
        ordered = ((0.0, tick.free), *((age + tick.elapsed_s, size) for age, size in self.ordered))
        ordered = tuple(entry for entry in ordered if entry[0] <= tick.lead_s + tick.elapsed_s / 2)
        there = min(size for _, size in ordered)
        keep = math.exp(-tick.elapsed_s / FADES_S)
        cost = _costs(tick, terms)
        seconds = self.seconds + tick.elapsed_s
        constant = tuple(
            cost(queued, size, size, before * keep) for size, (queued, before) in zip(sizes, constant, strict=True)
        )
        floors = tuple(
            cost(queued, max(size, there), max(size, tick.free), before * keep)
            for size, (queued, before) in zip(sizes, floors, strict=True)
        )
        weight, mean, square = (before * keep for before in self.busy)
        busy = (
            weight + tick.elapsed_s,
            mean + tick.elapsed_s * tick.busy,
            square + tick.elapsed_s * tick.busy**2,
        )
        bounds = self.bounds
        mean = busy[1] / busy[0]
        variance = max(0.0, busy[2] / busy[0] - mean**2)
        smooth = seconds >= CALM_S and variance < SMOOTH * mean**2
        if seconds >= (CALM_S if smooth else LEAST_S):
            bounds = _best(sizes, constant, floors, bounds, smooth)
        bounds = replace(bounds, surge=tick.busy > mean + SURGE * math.sqrt(variance))
        return Steady(sizes, constant, floors, ordered, seconds, busy, bounds)


def _costs(tick: Tick, terms: Terms) -> Callable[[float, int, int, float], tuple[float, float]]:
    missed_s = terms.miss_replica_s * tick.requests
    missed: dict[tuple[int, float], float] = {}
    enough = math.inf

    def cost(queued: float, serving: int, paid: int, before: float) -> tuple[float, float]:
        nonlocal enough
        rate = max(serving, 0.1) * terms.share
        left = queued + tick.work_s - rate * tick.elapsed_s
        before += paid * tick.elapsed_s
        if missed_s > 0:
            delay = (queued + max(0.0, tick.work_s - rate * tick.elapsed_s) / 2) / rate
            if terms.empty_s:
                delay = max(0.0, delay - terms.empty_s * max(0.0, 1 - tick.busy / rate))
            if delay or serving < enough:
                at = (serving, delay)
                if at not in missed:
                    late = terms.queue.late(tick.busy / rate, serving, delay)
                    missed[at] = missed_s * late
                    if not delay and late < NEGLIGIBLE:
                        enough = serving
                before += missed[at]
        return max(0.0, left), before

    return cost


def _best(
    sizes: Sequence[int],
    constant: Sequence[tuple[float, float]],
    floors: Sequence[tuple[float, float]],
    present: Bounds,
    smooth: bool,
) -> Bounds:
    cheapest = min(range(len(sizes)), key=lambda index: constant[index][1])
    lowest = min(range(len(sizes)), key=lambda index: floors[index][1])
    best = Bounds(sizes[lowest] if lowest else 0)
    cost = floors[lowest][1]
    if smooth and constant[cheapest][1] < cost:
        best, cost = Bounds(sizes[cheapest], sizes[cheapest]), constant[cheapest][1]
    if present.most is not None and not smooth:
        return best
    tracks = floors if present.most is None else constant
    at = max((index for index, size in enumerate(sizes) if size <= present.least), default=0)
    return best if cost < tracks[at][1] * (1 - CLEARLY) else present


def _sizes(lowest: int, highest: int) -> tuple[int, ...]:
    sizes = []
    size = lowest
    while size < highest:
        sizes.append(size)
        size += 1 + size // 16
    return (*sizes, highest)
