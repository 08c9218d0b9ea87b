"""``dynamo-load`` and ``dynamo-throughput``: Dynamo's own planner, driven tick by tick with a virtual clock.

Nothing is rewritten: this is ``OrchestratorEngineAdapter`` of ai-dynamo, the object that
``python -m dynamo.planner`` and Dynamo's offline replay run, fed with what its Kubernetes connector, its
forward-pass-metrics subscriber and its traffic source would have told. Its rules, in short:

* Load (every 5 s). ``target=throughput``, Dynamo's default: one replica more when any engine's KV cache,
  queue included, is over 100 % full, one less when all are under 60 %; ``target=latency``: 40 % and 10 %;
  ``target=load``: ``up_kv`` and ``down_kv`` as given. ``target=sla``: engines' pass times are learnt, one
  replica more when every engine is predicted to miss the objective for the time to first token or between
  tokens, one less when the survivors would still keep ``sensitivity`` (80 %) of it. Never more than one
  replica at a time, and none up while another is starting.
* Throughput (every 180 s, target ``sla``). Requests and lengths of the next interval are predicted (ARIMA),
  divided by the rate at which one engine keeps the objectives, rounded up; at most 8 replicas at a time.
  With ``load`` the load rules run as well, above what throughput asks for.

Under the target ``sla`` it is given a profile of the engine before it starts, as deployments are profiled for it.
Equal runs may then differ, in one process too, by more than a point of attainment: after the very same calls its
estimator (``RustForwardPassPerfModel``, compiled) has answered the same question with 19.81 and 19.83 ms. Why is
not known.
Needs ai-dynamo (``pip install 'dynamo-snapshot[dynamo]'``).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from dynamo_snapshot.errors import SnapshotError
from dynamo_snapshot.model import Reason
from dynamo_snapshot.replay.policies.dynamo_planner import Planner
from dynamo_snapshot.replay.policies.engine_facts import EngineFacts
from dynamo_snapshot.replay.policies.knobs import Load, check, duration, per_replica, positive
from dynamo_snapshot.replay.simulation.signals import Signals

LOAD_S = 5
TARGETS = ("throughput", "latency", "load", "sla")
PREDICTORS = ("constant", "arima", "kalman", "prophet")


@dataclass(frozen=True)
class DynamoLoadKnobs:
    target: str = "throughput"
    interval_s: int = LOAD_S
    ttft_share: float = 1.0
    """Objective for the time to first token that the planner is told, as a share of the study's; ``sla`` only."""
    sensitivity: int = 80
    """``load_scaling_down_sensitivity``, percent; ``sla`` only."""
    up_kv: float = per_replica(100.0, Load.KV_PERCENT)
    """``decode_scale_up_kv_rate``, percent; ``load`` only."""
    down_kv: float = per_replica(60.0, Load.KV_PERCENT)
    """``decode_scale_down_kv_rate``, percent; ``load`` only."""

    def __post_init__(self) -> None:
        check(
            {
                f"target must be one of {', '.join(TARGETS)}": self.target in TARGETS,
                "interval_s must be at least 1": self.interval_s >= 1,
                "ttft_share must be a positive number": positive(self.ttft_share),
                "sensitivity must be from 0 to 100": 0 <= self.sensitivity <= 100,
                "up_kv must be at most 100 and above down_kv": self.down_kv < self.up_kv <= 100,
                "down_kv must be 0 or more": duration(self.down_kv),
            }
        )

    def config(self, facts: EngineFacts) -> dict[str, Any]:
        options: dict[str, Any] = {
            "optimization_target": self.target,
            "enable_load_scaling": True,
            "enable_throughput_scaling": False,
            "load_adjustment_interval_seconds": self.interval_s,
            "load_scaling_down_sensitivity": self.sensitivity,
        }
        if self.target == "load":
            options |= {"decode_scale_up_kv_rate": self.up_kv, "decode_scale_down_kv_rate": self.down_kv}
        if self.target == "sla":
            options |= _objectives(facts, self.ttft_share)
        return options


@dataclass(frozen=True)
class DynamoThroughputKnobs:
    interval_s: int = 180
    load: bool = False
    """Whether load scaling runs as well."""
    predictor: str = "arima"
    ttft_share: float = 1.0
    sensitivity: int = 80
    max_change: int = 8
    """``max_throughput_scaling_replicas``."""

    def __post_init__(self) -> None:
        check(
            {
                f"interval_s must be a multiple of {LOAD_S}, above it": self.interval_s > LOAD_S
                and self.interval_s % LOAD_S == 0,
                f"predictor must be one of {', '.join(PREDICTORS)}": self.predictor in PREDICTORS,
                "ttft_share must be a positive number": positive(self.ttft_share),
                "sensitivity must be from 0 to 100": 0 <= self.sensitivity <= 100,
                "max_change must be at least 1": self.max_change >= 1,
            }
        )

    def config(self, facts: EngineFacts) -> dict[str, Any]:
        return {
            "optimization_target": "sla",
            "enable_load_scaling": self.load,
            "enable_throughput_scaling": True,
            "load_adjustment_interval_seconds": LOAD_S,
            "throughput_adjustment_interval_seconds": self.interval_s,
            "load_scaling_down_sensitivity": self.sensitivity,
            "load_predictor": self.predictor,
            "max_throughput_scaling_replicas": self.max_change,
        } | _objectives(facts, self.ttft_share)


def _objectives(facts: EngineFacts, ttft_share: float) -> dict[str, float]:
    return {"ttft_ms": facts.ttft_s * 1000 * ttft_share, "itl_ms": facts.itl_s * 1000}


class Dynamo:
    """One planner for one aggregated pool.

    Raises:
        SnapshotError: ``configuration_invalid`` where ai-dynamo's planner is not installed.
    """

    def __init__(
        self,
        knobs: DynamoLoadKnobs | DynamoThroughputKnobs,
        facts: EngineFacts,
        min_replicas: int,
        max_replicas: int,
        *,
        name: str,
    ) -> None:
        self.name = name
        self.interval_s = float(knobs.interval_s if isinstance(knobs, DynamoLoadKnobs) else LOAD_S)
        self.knobs = knobs
        try:
            self._planner = Planner(knobs.config(facts), facts, min_replicas, max_replicas)
        except ImportError as error:
            raise SnapshotError(
                Reason.CONFIGURATION_INVALID,
                f"policy {name} needs Dynamo's planner, which cannot be imported: {error}",
                "Install it: pip install 'dynamo-snapshot[dynamo]'.",
            ) from error

    def decide(self, signals: Signals) -> int | None:
        return self._planner.tick(signals)
