"""``ray-serve``: Ray Serve's default autoscaling policy.

Rules and defaults from the Ray documentation ("Advanced Ray Serve Autoscaling", AutoscalingConfig) and
``serve/autoscaling_policy.py`` (2.5x):

* Desired is the requests ongoing in the deployment, running and queued, divided by target_ongoing_requests
  (2). The ongoing requests are the mean over look_back_period_s (30 s), pushed every metrics_interval_s (10 s).
* The difference to the running replicas is multiplied by upscaling_factor or downscaling_factor (1), then
  rounded up; where a factor below 1 would leave a wanted step down at nothing, it is one.
* The control loop (0.1 s) acts on a direction only after it has found it in every loop for longer than
  upscale_delay_s (30 s) or downscale_delay_s (600 s), compared with the target, which counts replicas on
  their way; it then goes to what is desired at that moment, and the wait begins anew.

The simulation looks once a second instead of ten times: pushes come every 10 s, so a decision is late by
less than a second.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from dynamo_snapshot.replay.policies.knobs import check, duration, per_replica, positive
from dynamo_snapshot.replay.policies.windows import Averages
from dynamo_snapshot.replay.simulation.signals import Signals

LOOP_S = 0.1
"""``CONTROL_LOOP_INTERVAL_S``."""
LOOK_S = 1.0
_ROUNDING = 1e-9


@dataclass(frozen=True)
class RayServeKnobs:
    target_ongoing_requests: float = per_replica(2.0)
    upscale_delay_s: float = 30.0
    downscale_delay_s: float = 600.0
    look_back_period_s: float = 30.0
    metrics_interval_s: float = 10.0
    upscaling_factor: float = 1.0
    downscaling_factor: float = 1.0

    def __post_init__(self) -> None:
        check(
            {
                "target_ongoing_requests must be a positive number": positive(self.target_ongoing_requests),
                "upscale_delay_s must be 0 or more": duration(self.upscale_delay_s),
                "downscale_delay_s must be 0 or more": duration(self.downscale_delay_s),
                "look_back_period_s must be a positive number": positive(self.look_back_period_s),
                "metrics_interval_s must be a positive number": positive(self.metrics_interval_s),
                "upscaling_factor must be a positive number": positive(self.upscaling_factor),
                "downscaling_factor must be a positive number": positive(self.downscaling_factor),
            }
        )


def desired_replicas(ongoing: float, running: int, knobs: RayServeKnobs) -> int:
    """The size that ``ongoing`` requests ask for, while ``running`` replicas (at least one) serve them."""
    wanted = ongoing / knobs.target_ongoing_requests
    factor = knobs.upscaling_factor if wanted > running else knobs.downscaling_factor
    size = math.ceil(running + factor * (wanted - running) - _ROUNDING)
    if math.ceil(wanted - _ROUNDING) < running and size == running:
        size -= 1
    return size


class Delay:
    """Holds a direction back until it has lasted: one instance a deployment."""

    def __init__(self, upscale_s: float, downscale_s: float) -> None:
        self._wait = {1: upscale_s, -1: downscale_s}
        self._direction = 0
        self._since = 0.0

    def step(self, now: float, target: int, desired: int) -> int:
        """Returns the new target."""
        direction = (desired > target) - (desired < target)
        if direction != self._direction:
            self._direction, self._since = direction, now
        if direction == 0 or self._loops(now) <= math.floor(self._wait[direction] / LOOP_S + _ROUNDING):
            return target
        self._direction = 0
        # Only the last replica may go to none, which is outside the study.
        return max(1, desired)

    def _loops(self, now: float) -> int:
        """In how many control loops in a row the direction was found, this one included."""
        return math.floor((now - self._since) / LOOP_S + _ROUNDING) + 1


class RayServe:
    """Feeds the policy with the requests in the system."""

    def __init__(
        self,
        knobs: RayServeKnobs = RayServeKnobs(),
        min_replicas: int = 1,
        max_replicas: int = 100,
        *,
        name: str = "ray-serve",
    ) -> None:
        self.name = name
        self.interval_s = LOOK_S
        self.knobs = knobs
        self._bounds = (min_replicas, max_replicas)
        self._ongoing = Averages(knobs.look_back_period_s)
        self._delay = Delay(knobs.upscale_delay_s, knobs.downscale_delay_s)
        self._pushed: float | None = None
        self._pushed_at = 0.0
        self._last: float | None = None

    def decide(self, signals: Signals) -> int | None:
        now, last, self._last = signals.now, self._last, signals.now
        if last is None:
            self._pushed_at = now
            return None
        self._ongoing.add(last, now, signals.in_flight)
        if now - self._pushed_at >= self.knobs.metrics_interval_s - _ROUNDING:
            self._pushed_at, self._pushed = now, self._ongoing.mean(now)
        if self._pushed is None or signals.ready == 0:
            return None
        least, most = self._bounds
        desired = max(least, min(most, desired_replicas(self._pushed, signals.ready, self.knobs)))
        return self._delay.step(now, signals.target, desired)
