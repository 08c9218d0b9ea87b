"""The cheapest sizes over time for requests that are known beforehand: dynamic programming over a fluid queue.

The pool is one queue of work, in seconds of one replica, that ``n`` replicas shorten by ``n`` seconds a second.
A state is (replicas, queued work); a slot costs its replicas, each start its start-up time, each stop its drain,
and each request that will miss its objective ``miss_cost_s``. The fluid knows neither batches nor which replica
a request goes to, so a miss is a probability that rises as the queue's delay nears the objective, the more
gradually the more unequal the requests of one moment are.
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


@dataclass(frozen=True)
class Work:
    """What a trace asks of the pool, by slot."""

    seconds: Floats
    """Of one replica."""
    slack: tuple[Floats, ...]
    """Of each request that came in the slot: how long it may queue and still be in time."""
    squares: Floats
    """Sum of the squares of the slot's requests' work: what a replica gets of them varies by this over n."""


def work(requests: Sequence[TraceRequest], setting: Setting, margin: float) -> Work:
    """Returns the work of ``requests``, each ``margin`` times as long as the fluid has it."""
    slots = int(requests[-1].offset_s / SLOT_S) + 1 if requests else 1
    seconds, squares = np.zeros(slots), np.zeros(slots)
    slack: list[list[float]] = [[] for _ in range(slots)]
    times = PassTimes(setting.engine)
    full = setting.engine.max_batched_tokens
    fixed = times.prefill(0) + times.decode(0)
    for request in requests:
        slot = int(request.offset_s / SLOT_S)
        prompt, tokens = max(1, request.input_tokens), max(1, request.output_tokens)
        # Its share of full passes, and what its context adds to each pass that decodes it.
        prefill = prompt * (times.prefill(full) + times.decode(0)) / full
        decode = tokens * (times.decode(prompt + tokens / 2) - times.decode(0))
        seconds[slot] += (prefill + decode) * margin
        squares[slot] += prefill**2
        whole, rest = divmod(prompt, full)
        alone = whole * times.prefill(full) + (times.prefill(rest) if rest else 0.0)
        slack[slot].append(setting.ttft_objective_s - alone - fixed)
    return Work(seconds, tuple(np.array(of_slot) for of_slot in slack), squares)


def cheapest(load: Work, setting: Setting, start_s: float, stop_s: float, miss_cost_s: float) -> list[int]:
    """Returns the replicas that should be ready in each slot.

    Args:
        start_s: what a start costs beyond the time in which it serves, in GPU-seconds.
        stop_s: likewise, a stop.
    """
    sizes = np.arange(setting.min_replicas, setting.max_replicas + 1)
    queue = np.arange(_QUEUE_LEVELS) * _QUEUE_STEP_S
    slots = len(load.seconds)
    served = sizes[:, None] * SLOT_S
    ahead = np.zeros((len(sizes), _QUEUE_LEVELS))
    choices = np.empty((slots, len(sizes), _QUEUE_LEVELS), dtype=np.int8)
    for slot in range(slots - 1, -1, -1):
        after = queue[None, :] + load.seconds[slot] - served
        cost = served + _at(ahead, after)
        if len(load.slack[slot]):
            delay = np.maximum(0.0, queue[None, :] + (load.seconds[slot] - served) / 2) / sizes[:, None]
            blur = np.sqrt(_BLUR_S**2 + _LOGISTIC_VARIANCE * load.squares[slot] / sizes[:, None])
            cost = cost + miss_cost_s * _misses(delay, load.slack[slot], blur)
        ahead, choices[slot] = _resized(cost, start_s, stop_s)
    return _followed(load, sizes, choices, int(np.argmin(ahead[:, 0])))


def _followed(load: Work, sizes: npt.NDArray[np.int64], choices: npt.NDArray[np.int8], size: int) -> list[int]:
    queued, plan = 0.0, []
    for slot, seconds in enumerate(load.seconds):
        size = int(choices[slot, size, min(_QUEUE_LEVELS - 1, round(queued / _QUEUE_STEP_S))])
        plan.append(int(sizes[size]))
        queued = max(0.0, queued + float(seconds) - plan[-1] * SLOT_S)
    return plan


def _at(values: Floats, queued: Floats) -> Floats:
    """``values`` of each size at its row of queue lengths, between the levels by a straight line."""
    level = np.clip(queued / _QUEUE_STEP_S, 0, _QUEUE_LEVELS - 1.001)
    below = level.astype(np.intp)
    part = level - below
    lower = np.take_along_axis(values, below, axis=1)
    upper = np.take_along_axis(values, below + 1, axis=1)
    return lower + part * (upper - lower)


def _misses(delay: Floats, slack: Floats, blur: Floats) -> Floats:
    """How many requests miss, for each delay; those that cannot make it whatever is done are left out."""
    able = np.sort(slack[slack > 0])
    groups = np.array_split(able, min(4, len(able))) if len(able) else []
    total = np.zeros_like(delay)
    for group in groups:
        exponent = np.clip((float(group.mean()) - delay) / blur, -40, 40)
        total += len(group) / (1 + np.exp(exponent))
    return total


def _resized(cost: Floats, start_s: float, stop_s: float) -> tuple[Floats, npt.NDArray[np.int8]]:
    """The best size to go to from each size, and what that costs; both ways are linear, so running minima do."""
    rank = np.arange(len(cost))[:, None]
    up, up_choice = _running_minimum((cost + rank * start_s)[::-1])
    up, up_choice = up[::-1] - rank * start_s, len(cost) - 1 - up_choice[::-1]
    down, down_choice = _running_minimum(cost - rank * stop_s)
    down = down + rank * stop_s
    return np.minimum(up, down), np.where(up <= down, up_choice, down_choice).astype(np.int8)


def _running_minimum(values: Floats) -> tuple[Floats, npt.NDArray[np.intp]]:
    """Down each column, with the row that it is from."""
    lowest = np.minimum.accumulate(values, axis=0)
    rows = np.where(values == lowest, np.arange(len(values))[:, None], 0)
    return lowest, np.maximum.accumulate(rows, axis=0)
