"""The cheapest sizes over time for requests that are known beforehand: dynamic programming over a fluid queue.

The pool is one queue of work, in seconds of one replica, that ``n`` replicas shorten by ``n`` seconds a second.
A state is (replicas, queued work); a slot costs its replicas, each start its start-up time, each stop its drain,
and each request that will miss its objective ``miss_cost_s``. The fluid knows neither batches nor which replica
a request goes to, so a miss is a probability that rises as the queue's delay nears the objective, the more
gradually the more unequal the requests of one moment are.

Plans for several margins are made in one go: arrays have the axes (size, margin, queue level).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from dynamo_snapshot.replay.simulation.setting import Setting
from dynamo_snapshot.replay.simulation.timing import PassTimes
from dynamo_snapshot.replay.trace import TraceRequest

SLOT_S = 0.5
_QUEUE_STEP_S = 0.25
"""Grain of the queued work in a state."""
_QUEUE_LEVELS = 200
"""Longer queues are cut: by then everybody in them is late."""
_BLUR_S = 0.15
"""Scale of the logistic that turns a delay into the probability of a miss, for requests that are alike."""
_LOGISTIC_VARIANCE = 0.3
"""The square of a logistic's scale is this share of its variance: 3 / pi squared."""

Floats = npt.NDArray[np.float64]
Ranks = npt.NDArray[np.int8]


@dataclass(frozen=True)
class Work:
    """What a trace asks of the pool, by slot."""

    seconds: Floats
    """Of one replica; one row a margin."""
    slack: tuple[Floats, ...]
    """Of each request that came in the slot: how long it may queue and still be in time."""
    squares: Floats
    """Sum of the squares of the slot's requests' work: what a replica gets of them varies by this over n."""


def work(requests: Sequence[TraceRequest], setting: Setting, margins: Sequence[float]) -> Work:
    """Returns the work of ``requests``, each as many times as long as the fluid has it as a margin says."""
    slots = int(requests[-1].offset_s / SLOT_S) + 1 if requests else 1
    seconds, squares = np.zeros(len(requests)), np.zeros(len(requests))
    slack: list[list[float]] = [[] for _ in range(slots)]
    times = PassTimes(setting.engine)
    full = setting.engine.max_batched_tokens
    fixed = times.prefill(0) + times.decode(0)
    places = np.array([int(request.offset_s / SLOT_S) for request in requests], dtype=np.intp)
    for number, request in enumerate(requests):
        prompt, tokens = max(1, request.input_tokens), max(1, request.output_tokens)
        # Its share of full passes, and what its context adds to each pass that decodes it.
        prefill = prompt * (times.prefill(full) + times.decode(0)) / full
        decode = tokens * (times.decode(prompt + tokens / 2) - times.decode(0))
        seconds[number] = prefill + decode
        squares[number] = prefill**2
        whole, rest = divmod(prompt, full)
        alone = whole * times.prefill(full) + (times.prefill(rest) if rest else 0.0)
        slack[places[number]].append(setting.ttft_objective_s - alone - fixed)
    return Work(
        np.array([_summed(seconds * margin, places, slots) for margin in margins]),
        tuple(np.array(of_slot) for of_slot in slack),
        _summed(squares, places, slots),
    )


def _summed(values: Floats, places: npt.NDArray[np.intp], slots: int) -> Floats:
    totals = np.zeros(slots)
    np.add.at(totals, places, values)
    return totals


def cheapest(load: Work, setting: Setting, start_s: float, stop_s: float, miss_cost_s: float) -> list[list[int]]:
    """Returns the replicas that should be ready in each slot, one plan for each margin of ``load``.

    Args:
        start_s: what a start costs beyond the time in which it serves, in GPU-seconds.
        stop_s: likewise, a stop.
    """
    sizes = np.arange(setting.min_replicas, setting.max_replicas + 1)
    queue = np.arange(_QUEUE_LEVELS) * _QUEUE_STEP_S
    plans, slots = load.seconds.shape
    by_size = sizes[:, None, None]
    served = by_size * SLOT_S
    ahead = np.zeros((len(sizes), plans, _QUEUE_LEVELS))
    choices = np.empty((slots, *ahead.shape), dtype=np.int8)
    for slot in range(slots - 1, -1, -1):
        coming = load.seconds[:, slot, None]
        cost = served + _at(ahead, queue + coming - served)
        groups = _groups(load.slack[slot])
        if groups:
            delay = np.maximum(0.0, queue + (coming - served) / 2) / by_size
            blur = np.sqrt(_BLUR_S**2 + _LOGISTIC_VARIANCE * load.squares[slot] / by_size)
            cost += miss_cost_s * _misses(delay, groups, blur)
        ahead, choices[slot] = _resized(cost, start_s, stop_s)
    return [
        _followed(load.seconds[plan], sizes, choices[:, :, plan], int(np.argmin(ahead[:, plan, 0])))
        for plan in range(plans)
    ]


def _followed(coming: Floats, sizes: npt.NDArray[np.int64], choices: npt.NDArray[np.int8], size: int) -> list[int]:
    queued, plan = 0.0, []
    for slot, seconds in enumerate(coming):
        size = int(choices[slot, size, min(_QUEUE_LEVELS - 1, round(queued / _QUEUE_STEP_S))])
        plan.append(int(sizes[size]))
        queued = max(0.0, queued + float(seconds) - plan[-1] * SLOT_S)
    return plan


def _at(values: Floats, queued: Floats) -> Floats:
    """``values`` of each margin and size at its row of queue lengths, between the levels by a straight line."""
    level = np.clip(queued / _QUEUE_STEP_S, 0, _QUEUE_LEVELS - 1.001)
    below = level.astype(np.intp)
    level -= below
    rows = np.arange(values.size, step=_QUEUE_LEVELS).reshape(*values.shape[:-1], 1)
    below += rows
    lower = values.take(below)
    below += 1
    upper = values.take(below)
    upper -= lower
    upper *= level
    upper += lower
    return upper


def _groups(slack: Floats) -> list[tuple[int, float]]:
    """Requests of one slot that can make it, in at most four groups: how many, and their mean slack."""
    able = np.sort(slack[slack > 0])
    split = np.array_split(able, min(4, len(able))) if len(able) else []
    return [(len(group), float(group.mean())) for group in split]


def _misses(delay: Floats, groups: Sequence[tuple[int, float]], blur: Floats) -> Floats:
    """How many requests miss, for each delay; those that cannot make it whatever is done are left out."""
    total = np.zeros_like(delay)
    for number, slack in groups:
        exponent = (slack - delay) / blur
        np.clip(exponent, -40, 40, out=exponent)
        np.exp(exponent, out=exponent)
        exponent += 1
        total += np.divide(number, exponent, out=exponent)
    return total


def _resized(cost: Floats, start_s: float, stop_s: float) -> tuple[Floats, Ranks]:
    """The best size to go to from each size, and what that costs; both ways are linear, so running minima do."""
    last = len(cost) - 1
    rank = np.arange(len(cost))[:, None, None]
    up, up_choice = _running_minimum((cost + rank * start_s)[::-1])
    up, up_choice = up[::-1] - rank * start_s, last - up_choice[::-1]
    down, down_choice = _running_minimum(cost - rank * stop_s)
    down += rank * stop_s
    return np.minimum(up, down), np.where(up <= down, up_choice, down_choice)


def _running_minimum(values: Floats) -> tuple[Floats, Ranks]:
    """Over the sizes, with the rank of each minimum. Row by row: numpy's ``accumulate`` takes five times as long."""
    lowest = values.copy()
    for row in range(1, len(values)):
        np.minimum(lowest[row - 1], lowest[row], out=lowest[row])
    ranks = (values == lowest) * np.arange(len(values), dtype=np.int8)[:, None, None]
    for row in range(1, len(values)):
        np.maximum(ranks[row - 1], ranks[row], out=ranks[row])
    return lowest, ranks
