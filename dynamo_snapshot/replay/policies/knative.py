"""``knative-kpa``: Knative's pod autoscaler on concurrency.

Rules and defaults from Knative Serving's ``config-autoscaler`` and ``pkg/autoscaler`` (main, 2026):

* Every 2 s, two means of the requests in flight over all replicas: over the stable window (60 s) and over
  the panic window (10 % of it, 6 s); while the history is shorter, over the history.
* Each, divided by the target value of a replica and rounded up, is a desired size. The target value is the
  target concurrency (100) times the target utilization (70 %).
* Each is kept between ready ÷ max-scale-down-rate (2), rounded down, and ready × max-scale-up-rate (1000),
  rounded up; without a ready replica, 1 is taken for the ready ones.
* Panic begins when the panic size, before these limits, is at least panic-threshold (200 %) times the ready
  replicas, is prolonged while that holds, and ends a full stable window after it last held. In panic the
  larger of both sizes counts and the size never goes down.
* An autoscaler that starts with more than one ready replica starts in panic at that size: it has no history.
* With a scale-down delay (0 s), the highest size of that time counts.

Excess burst capacity (target-burst-capacity 211) says only whether the activator stays in the request path:
it never changes the size, so it is not modelled; requests that find no replica wait in the simulator's
router as they would in the activator. Scale to zero is outside the study: one replica always stays.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from dynamo_snapshot.replay.policies.knobs import check, per_replica
from dynamo_snapshot.replay.policies.windows import Averages, Recent
from dynamo_snapshot.replay.simulation.signals import Signals

TICK_S = 2.0
_ROUNDING = 1e-6
"""Knative rounds its window means to six digits."""


@dataclass(frozen=True)
class KpaKnobs:
    target: float = per_replica(100.0)
    """Requests in flight that a replica is said to bear: ``autoscaling.knative.dev/target``."""
    utilization: float = 0.7
    stable_window_s: float = 60.0
    panic_window_s: float = 6.0
    panic_threshold: float = 2.0
    max_scale_up_rate: float = 1000.0
    max_scale_down_rate: float = 2.0
    scale_down_delay_s: float = 0.0

    def __post_init__(self) -> None:
        check(
            {
                "target times utilization must be at least 0.01": 0.01 <= self.target * self.utilization < math.inf,
                "utilization must be above 0 and at most 1": 0 < self.utilization <= 1,
                "stable_window_s must be from 6 to 3600": 6 <= self.stable_window_s <= 3600,
                "panic_window_s must be from 1 to stable_window_s": 1 <= self.panic_window_s <= self.stable_window_s,
                "panic_threshold must be from 1.1 to 10": 1.1 <= self.panic_threshold <= 10,
                "max_scale_up_rate must be above 1": 1 < self.max_scale_up_rate < math.inf,
                "max_scale_down_rate must be above 1": 1 < self.max_scale_down_rate < math.inf,
                "scale_down_delay_s must be from 0 to 3600": 0 <= self.scale_down_delay_s <= 3600,
            }
        )


class KpaScaler:
    """The decision apart from the metric: means in, size out."""

    def __init__(self, knobs: KpaKnobs, ready: int, now: float) -> None:
        self._knobs = knobs
        self._panic_since: float | None = now if ready > 1 else None
        self._panic_size = ready
        self._delayed = Recent(knobs.scale_down_delay_s)

    @property
    def panicking(self) -> bool:
        return self._panic_since is not None

    def scale(self, ready: int, stable: float, panic: float, now: float) -> int:
        """Returns the desired size.

        Args:
            ready: replicas that are ready.
            stable: mean requests in flight over the stable window, all replicas together.
            panic: the same over the panic window.
            now: seconds.
        """
        knobs = self._knobs
        counted = max(1, ready)
        value = knobs.target * knobs.utilization
        most = math.ceil(knobs.max_scale_up_rate * counted)
        least = math.floor(counted / knobs.max_scale_down_rate)
        wanted, panicked = (math.ceil(mean / value - _ROUNDING) for mean in (stable, panic))
        size = min(max(wanted, least), most)
        panic_size = min(max(panicked, least), most)

        if panicked / counted >= knobs.panic_threshold:
            self._panic_since = now
        elif self._panic_since is not None and self._panic_since + knobs.stable_window_s < now:
            self._panic_since = None
            self._panic_size = 0
        if self._panic_since is not None:
            self._panic_size = size = max(size, panic_size, self._panic_size)

        if knobs.scale_down_delay_s > 0:
            self._delayed.add(now, size)
            size = self._delayed.highest()
        return size


class KnativeKpa:
    """Feeds the scaler with the requests in the system; ``min_scale`` bounds what comes of it."""

    def __init__(self, knobs: KpaKnobs = KpaKnobs(), min_scale: int = 1, *, name: str = "knative-kpa") -> None:
        self.name = name
        self.interval_s = TICK_S
        self.knobs = knobs
        self._min_scale = min_scale
        self._in_flight = Averages(knobs.stable_window_s)
        self._scaler: KpaScaler | None = None
        self._last: float | None = None

    def decide(self, signals: Signals) -> int | None:
        now, last, self._last = signals.now, self._last, signals.now
        if self._scaler is None or last is None:
            # There is no metric yet, which is no reason to scale.
            self._scaler = KpaScaler(self.knobs, signals.ready, now)
            return None
        self._in_flight.add(last, now, signals.in_flight)
        stable = self._in_flight.mean(now)
        panic = self._in_flight.mean(now, self.knobs.panic_window_s)
        if stable is None or panic is None:
            return None
        return max(self._min_scale, self._scaler.scale(signals.ready, stable, panic, now))
