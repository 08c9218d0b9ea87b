"""``keda``: KEDA on queue length.

Rules and defaults from the KEDA documentation (2.22, "Scaling Deployments" and the ScaledObject reference):
KEDA hands the trigger's value to an HPA as an external metric with an ``AverageValue`` target (the default
``metricType``), so from one replica up the HPA decides, every 15 s, by the rules of
:mod:`dynamo_snapshot.replay.policies.hpa_rules`. Each sync asks the trigger anew; with
``useCachedMetrics: true`` it gets what the last poll (``pollingInterval``, 30 s) saw. Apart from that,
``pollingInterval`` and ``cooldownPeriod`` (300 s) concern the step between 0 and 1 alone, which is outside
the study: one replica always stays.

The queue is the requests without a first token. Its target is the default of KEDA's queue triggers that have
one (``queueLength``, 5). ``metric=in_flight`` takes the requests in flight instead, as people do whose queue
empties before the load is gone.
"""

from __future__ import annotations

from dataclasses import dataclass

from dynamo_snapshot.replay.policies.hpa import BehaviorKnobs
from dynamo_snapshot.replay.policies.hpa_rules import SYNC_S, Stabilizer, average_value
from dynamo_snapshot.replay.policies.knobs import check, per_replica, positive
from dynamo_snapshot.replay.simulation.signals import Signals

METRICS = ("queue", "in_flight")


@dataclass(frozen=True)
class KedaKnobs(BehaviorKnobs):
    target: float = per_replica(5.0)
    """Queued requests that call for one replica."""
    metric: str = "queue"
    use_cached_metrics: bool = False
    polling_interval_s: float = 30.0

    def __post_init__(self) -> None:
        super().__post_init__()
        check(
            {
                "target must be a positive number": positive(self.target),
                f"metric must be one of {', '.join(METRICS)}": self.metric in METRICS,
                "polling_interval_s must be a positive number": positive(self.polling_interval_s),
            }
        )


class Keda:
    """Queue length into an HPA."""

    def __init__(self, knobs: KedaKnobs, min_replicas: int, max_replicas: int, *, name: str = "keda") -> None:
        self.name = name
        self.interval_s = SYNC_S
        self.knobs = knobs
        self._stabilizer = Stabilizer(knobs.behavior, min_replicas, max_replicas)
        self._polled: tuple[float, float] | None = None

    def decide(self, signals: Signals) -> int | None:
        desired = average_value(
            signals.ready + signals.starting,
            self._value(signals),
            self.knobs.target,
            self.knobs.tolerance,
        )
        return self._stabilizer.step(signals.now, signals.target, desired)

    def _value(self, signals: Signals) -> float:
        value = float(signals.waiting) if self.knobs.metric == "queue" else signals.in_flight
        if not self.knobs.use_cached_metrics:
            return value
        if self._polled is None or signals.now - self._polled[0] >= self.knobs.polling_interval_s:
            self._polled = (signals.now, value)
        return self._polled[1]
