"""The Kubernetes horizontal pod autoscaler's arithmetic: from a metric to a size, and how fast it may change.

Rules and defaults from the Kubernetes documentation ("Horizontal Pod Autoscaling": algorithm details,
configurable scaling behavior, default behavior) and ``pkg/controller/podautoscaler``:

* ``desired = ceil(replicas × metric ÷ target)``; a ratio within the tolerance (0.1) of 1 changes nothing.
* Pods that run but have no metric yet count as at the target when the ratio says down, as 0 when it says
  up; pods that are not running yet count as 0 when it says up. If that reverses the direction, or brings
  the ratio within the tolerance, nothing changes.
* An external metric with an ``AverageValue`` target is divided by the target alone; the tolerance is taken
  at the present number of pods.
* Stabilization: the size goes up no further than the lowest desired size of the window for that (0 s), and
  down no further than the highest of the other (300 s). The first of them is the size that was found.
* Rate: with several policies for a direction the one that allows most counts. Up, in 15 s, 100 % or
  4 pods; down, in 15 s, 100 %.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum

from dynamo_snapshot.replay.policies.windows import Recent

SYNC_S = 15.0
"""``--horizontal-pod-autoscaler-sync-period``."""
TOLERANCE = 0.1
"""``--horizontal-pod-autoscaler-tolerance``."""
_ROUNDING = 1e-9


def pods_metric(
    replicas: int,
    total: float,
    reporting: int,
    target: float,
    *,
    silent: int = 0,
    unready: int = 0,
    tolerance: float = TOLERANCE,
) -> int:
    """The size that a metric of each pod asks for.

    Args:
        replicas: the size last asked for.
        total: the metric's sum over the pods that report it.
        reporting: how many do.
        target: the metric that one pod should have.
        silent: pods that run and have no metric.
        unready: pods that do not run yet.
    """
    if reporting == 0:
        return replicas
    ratio = total / reporting / target
    count = reporting
    if silent or (unready and ratio > 1):
        original = ratio
        count += silent + (unready if original > 1 else 0)
        total += silent * target if original < 1 else 0.0
        ratio = total / count / target
        if (original < 1 < ratio) or (ratio < 1 < original):
            return replicas
    if abs(1 - ratio) <= tolerance:
        return replicas
    wanted = math.ceil(ratio * count - _ROUNDING)
    against = (ratio < 1 and wanted > replicas) or (ratio > 1 and wanted < replicas)
    return replicas if against and count != reporting else wanted


def average_value(replicas: int, total: float, target: float, tolerance: float = TOLERANCE) -> int:
    """The size that an external metric with an ``AverageValue`` target asks for.

    Args:
        replicas: the pods that exist.
        total: the metric.
        target: the part of it that one pod should have.
    """
    if replicas > 0 and abs(1 - total / (target * replicas)) <= tolerance:
        return replicas
    return math.ceil(total / target - _ROUNDING)


class Unit(StrEnum):
    PODS = "Pods"
    PERCENT = "Percent"


@dataclass(frozen=True)
class Rate:
    """One scaling policy: at most ``value`` pods, or percent of them, in ``period_s``."""

    unit: Unit
    value: float
    period_s: float = 15.0

    def highest(self, start: int) -> int:
        """How many pods there may be after a period that began with ``start``."""
        if self.unit is Unit.PODS:
            return start + int(self.value)
        return math.ceil(start * (1 + self.value / 100) - _ROUNDING)

    def lowest(self, start: int) -> int:
        if self.unit is Unit.PODS:
            return start - int(self.value)
        return math.floor(start * (1 - self.value / 100) + _ROUNDING)


DEFAULT_UP = (Rate(Unit.PERCENT, 100), Rate(Unit.PODS, 4))
DEFAULT_DOWN = (Rate(Unit.PERCENT, 100),)


@dataclass(frozen=True)
class Behavior:
    """``spec.behavior``, with ``selectPolicy: Max`` on both sides."""

    up: Sequence[Rate] = DEFAULT_UP
    down: Sequence[Rate] = DEFAULT_DOWN
    up_stabilization_s: float = 0.0
    down_stabilization_s: float = 300.0


class Stabilizer:
    """Turns desired sizes into sizes to ask for, one sync after the other.

    Args:
        behavior: windows and rates.
        min_replicas: the autoscaler's own bounds.
        max_replicas: likewise.
    """

    def __init__(self, behavior: Behavior, min_replicas: int, max_replicas: int) -> None:
        self._behavior = behavior
        self._min = min_replicas
        self._max = max_replicas
        self._desired = Recent(max(behavior.up_stabilization_s, behavior.down_stabilization_s))
        self._added: deque[tuple[float, int]] = deque()
        self._removed: deque[tuple[float, int]] = deque()
        self._began = False

    def step(self, now: float, replicas: int, desired: int) -> int:
        """Returns the size to ask for.

        Args:
            now: seconds.
            replicas: the size last asked for.
            desired: what the metric asks for.
        """
        size = self._stabilized(now, replicas, desired)
        if size > replicas:
            size = min(size, self._ceiling(now, replicas), self._max)
            size = max(size, self._min)
        elif size < replicas:
            size = max(size, self._floor(now, replicas), self._min)
            size = min(size, self._max)
        else:
            size = max(self._min, min(self._max, size))
        if size > replicas:
            self._added.append((now, size - replicas))
        elif size < replicas:
            self._removed.append((now, replicas - size))
        return size

    def _stabilized(self, now: float, replicas: int, desired: int) -> int:
        if not self._began:
            self._began = True
            self._desired.add(now, replicas)
        behavior = self._behavior
        lowest = min([desired, *self._desired.since(now - behavior.up_stabilization_s)])
        highest = max([desired, *self._desired.since(now - behavior.down_stabilization_s)])
        self._desired.add(now, desired)
        return min(max(replicas, lowest), highest)

    def _ceiling(self, now: float, replicas: int) -> int:
        allowed = (rate.highest(replicas - _changed(self._added, now - rate.period_s)) for rate in self._behavior.up)
        return max(replicas, max(allowed, default=replicas))

    def _floor(self, now: float, replicas: int) -> int:
        allowed = (rate.lowest(replicas + _changed(self._removed, now - rate.period_s)) for rate in self._behavior.down)
        return min(replicas, min(allowed, default=replicas))


def _changed(events: Iterable[tuple[float, int]], cutoff: float) -> int:
    return sum(change for at, change in events if at > cutoff)
