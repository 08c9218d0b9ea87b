"""``hpa`` and ``hpa-gpu``: the Kubernetes horizontal pod autoscaler on requests in flight and on GPU utilization.

The arithmetic is that of :mod:`dynamo_snapshot.replay.policies.hpa_rules`. The metric is the mean since the
last sync, fresh at the sync: a real pipeline (scrape, adapter) would be some 15 to 60 s older.

``hpa`` has a ``Pods`` metric that each replica reports itself, as engines report requests running and
waiting: a replica that is starting has none yet, so it is silent. There is no documented default target.
``hpa-gpu`` has the utilization that DCGM reports for each GPU; there a starting replica reports too, about 0,
while it loads. Its target is the API's default for utilization, 80 %. Replicas that are draining are being
deleted and count nowhere.
"""

from __future__ import annotations

from dataclasses import dataclass

from dynamo_snapshot.replay.policies.hpa_rules import SYNC_S, TOLERANCE, Behavior, Rate, Stabilizer, Unit, pods_metric
from dynamo_snapshot.replay.policies.knobs import check, duration, per_replica, positive
from dynamo_snapshot.replay.simulation.signals import Signals


@dataclass(frozen=True)
class BehaviorKnobs:
    """``spec.behavior`` and the controller's tolerance, as knobs of every policy that ends in an HPA."""

    tolerance: float = TOLERANCE
    up_stabilization_s: float = 0.0
    down_stabilization_s: float = 300.0
    up_percent: float = 100.0
    up_pods: int = 4
    up_period_s: float = 15.0
    down_percent: float = 100.0
    down_period_s: float = 15.0

    def __post_init__(self) -> None:
        check(
            {
                "tolerance must be from 0 to below 1": 0 <= self.tolerance < 1,
                "up_stabilization_s must be from 0 to 3600": 0 <= self.up_stabilization_s <= 3600,
                "down_stabilization_s must be from 0 to 3600": 0 <= self.down_stabilization_s <= 3600,
                "up_percent and up_pods must be 0 or more, one of them above 0": duration(self.up_percent)
                and self.up_pods >= 0
                and self.up_percent + self.up_pods > 0,
                "up_period_s must be above 0 and at most 1800": 0 < self.up_period_s <= 1800,
                "down_percent must be above 0 and at most 100": 0 < self.down_percent <= 100,
                "down_period_s must be above 0 and at most 1800": 0 < self.down_period_s <= 1800,
            }
        )

    @property
    def behavior(self) -> Behavior:
        return Behavior(
            up=(
                Rate(Unit.PERCENT, self.up_percent, self.up_period_s),
                Rate(Unit.PODS, self.up_pods, self.up_period_s),
            ),
            down=(Rate(Unit.PERCENT, self.down_percent, self.down_period_s),),
            up_stabilization_s=self.up_stabilization_s,
            down_stabilization_s=self.down_stabilization_s,
        )


@dataclass(frozen=True)
class HpaKnobs(BehaviorKnobs):
    target: float = per_replica(1.0)
    """Requests in flight, waiting and running, that a replica should have."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check({"target must be a positive number": positive(self.target)})


@dataclass(frozen=True)
class HpaGpuKnobs(BehaviorKnobs):
    target: float = 0.8
    """Share of time in which a GPU should be busy."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check({"target must be above 0 and at most 1": 0 < self.target <= 1})


class Hpa:
    """On requests in flight; the bounds are the autoscaler's ``minReplicas`` and ``maxReplicas``."""

    def __init__(self, knobs: HpaKnobs, min_replicas: int, max_replicas: int, *, name: str = "hpa") -> None:
        self.name = name
        self.interval_s = SYNC_S
        self.knobs = knobs
        self._stabilizer = Stabilizer(knobs.behavior, min_replicas, max_replicas)

    def decide(self, signals: Signals) -> int | None:
        desired = pods_metric(
            signals.target,
            signals.in_flight,
            signals.ready,
            self.knobs.target,
            silent=signals.starting,
            tolerance=self.knobs.tolerance,
        )
        return self._stabilizer.step(signals.now, signals.target, desired)


class HpaGpu:
    """On GPU utilization."""

    def __init__(self, knobs: HpaGpuKnobs, min_replicas: int, max_replicas: int, *, name: str = "hpa-gpu") -> None:
        self.name = name
        self.interval_s = SYNC_S
        self.knobs = knobs
        self._stabilizer = Stabilizer(knobs.behavior, min_replicas, max_replicas)

    def decide(self, signals: Signals) -> int | None:
        desired = pods_metric(
            signals.target,
            signals.busy * signals.ready,
            signals.ready + signals.starting,
            self.knobs.target,
            tolerance=self.knobs.tolerance,
        )
        return self._stabilizer.step(signals.now, signals.target, desired)
