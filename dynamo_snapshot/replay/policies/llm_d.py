"""``llm-d``: the saturation rules of llm-d's Workload Variant Autoscaler, which end in an HPA.

Rules and defaults from its documentation (``saturation-analyzer.md``, ``saturation-scaling-config.md``,
``hpa-integration.md``, 0.5):

* Each replica's KV cache usage and queue length are the peaks of the last minute.
* A replica is saturated from kvCacheThreshold (0.80) or queueLengthThreshold (5) on.
* Scale up by one when the replicas that are not saturated have on average less than kvSpareTrigger (0.1) or
  queueSpareTrigger (3) left below the thresholds, or when there are none; not while replicas are starting.
* Scale down by one when their load, spread over one replica less, would leave both triggers' worth, and at
  least two are not saturated.
* That is decided every 60 s and published as a metric, which an HPA follows: by default both directions are
  stabilized for 240 s and change by at most 10 pods in 150 s.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from dynamo_snapshot.replay.policies.hpa_rules import SYNC_S, Behavior, Rate, Stabilizer, Unit, average_value
from dynamo_snapshot.replay.policies.knobs import check, duration, per_replica, positive
from dynamo_snapshot.replay.simulation.signals import Signals
from planner.observation import EngineSample

PEAK_S = 60.0
ANALYSIS_S = 60.0


@dataclass(frozen=True)
class LlmDKnobs:
    kv_threshold: float = 0.8
    queue_threshold: float = per_replica(5.0)
    kv_spare: float = 0.1
    queue_spare: float = per_replica(3.0)
    up_stabilization_s: float = 240.0
    down_stabilization_s: float = 240.0
    pods: int = 10
    period_s: float = 150.0

    def __post_init__(self) -> None:
        check(
            {
                "kv_threshold must be above 0 and at most 1": 0 < self.kv_threshold <= 1,
                "kv_spare must be 0 or more and below kv_threshold": 0 <= self.kv_spare < self.kv_threshold,
                "queue_threshold must be a positive number": positive(self.queue_threshold),
                "queue_spare must be 0 or more and below queue_threshold": 0 <= self.queue_spare < self.queue_threshold,
                "up_stabilization_s must be 0 or more": duration(self.up_stabilization_s),
                "down_stabilization_s must be 0 or more": duration(self.down_stabilization_s),
                "pods must be at least 1": self.pods >= 1,
                "period_s must be a positive number": positive(self.period_s),
            }
        )


@dataclass(frozen=True)
class Usage:
    """One replica: share of its KV cache, requests in its queue."""

    kv: float
    queue: float


def saturation_target(replicas: Sequence[Usage], starting: int, knobs: LlmDKnobs) -> int:
    """How many replicas there should be, given those that report."""
    ready = len(replicas)
    free = [usage for usage in replicas if usage.kv < knobs.kv_threshold and usage.queue < knobs.queue_threshold]
    kv, queue = sum(usage.kv for usage in free), sum(usage.queue for usage in free)

    def tight(count: int) -> bool:
        return (
            count == 0
            or knobs.kv_threshold - kv / count < knobs.kv_spare
            or knobs.queue_threshold - queue / count < knobs.queue_spare
        )

    if tight(len(free)):
        return ready + starting if starting else ready + 1
    if len(free) >= 2 and not tight(len(free) - 1):
        return ready + starting - 1
    return ready + starting


class LlmD:
    """Looks at each engine's metrics at every scrape, decides once a minute.

    Args:
        kv_tokens: tokens that fit into an engine's KV cache.
    """

    def __init__(
        self, knobs: LlmDKnobs, kv_tokens: int, min_replicas: int, max_replicas: int, *, name: str = "llm-d"
    ) -> None:
        self.name = name
        self.interval_s = SYNC_S
        self.knobs = knobs
        self._kv_tokens = kv_tokens
        self._scrapes: list[tuple[float, dict[str, Usage]]] = []
        self._analysed: tuple[float, int] | None = None
        rates = (Rate(Unit.PODS, knobs.pods, knobs.period_s),)
        self._stabilizer = Stabilizer(
            Behavior(rates, rates, knobs.up_stabilization_s, knobs.down_stabilization_s), min_replicas, max_replicas
        )

    def decide(self, signals: Signals) -> int | None:
        now = signals.now
        self._scrapes.append((now, self._usages(signals.observation.samples)))
        self._scrapes = [scrape for scrape in self._scrapes if scrape[0] > now - PEAK_S]
        if self._analysed is None or now - self._analysed[0] >= ANALYSIS_S:
            self._analysed = (now, saturation_target(self._peaks(), signals.starting, self.knobs))
        wanted = average_value(signals.ready + signals.starting, self._analysed[1], 1.0)
        return self._stabilizer.step(now, signals.target, wanted)

    def _usages(self, samples: Iterable[EngineSample]) -> dict[str, Usage]:
        return {
            sample.worker_id: Usage(
                ((sample.decode_kv_tokens or 0.0) + (sample.prefill_kv_tokens or 0.0)) / self._kv_tokens,
                sample.queued or 0.0,
            )
            for sample in samples
        }

    def _peaks(self) -> list[Usage]:
        """The replicas of the newest scrape, each with its peaks."""
        newest = self._scrapes[-1][1]
        seen = {worker: [usages[worker] for _, usages in self._scrapes if worker in usages] for worker in newest}
        return [Usage(max(one.kv for one in all_), max(one.queue for one in all_)) for all_ in seen.values()]
