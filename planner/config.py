"""The configuration of ``python -m dynamo.planner`` with this plugin in it.

Dynamo insists that one of its own scaling modes is on. Its load scaling is the one that needs neither
Prometheus nor a performance model; its interval is set to decades, so it never has its first turn and
the plugin's targets are the only ones. (Where it does run, ours win: priority 1 goes before its 10.)
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from planner.hints import Hinting, HintPolicy
from planner.observation import Role

PLUGIN_ID = "snapshot-scaling"
PRIORITY = 1
NEEDS = ("observations.fpm", "observations.workers")
BY_COUNT_S, PREDICTED_S = (20.0, 5.0), (4.0, 1.0)
"""How long a lower need must be confirmed, and the cool-down: requests in flight tell less than a record of demand."""
BUILT_IN_TICK_S = 5
"""Dynamo's default for its load scaling."""
NEVER_S = 10 * 365 * 24 * 3600
"""The interval of Dynamo's own load scaling."""


@dataclass(frozen=True)
class RoleBounds:
    """How few and how many replicas one role may have, and what one takes."""

    min_replicas: int = 1
    max_replicas: int = 8
    parked: int = 0
    """Kept parked by the pool's own setting; a hint never asks for fewer."""
    gpus: int | None = None
    """That one replica takes; None: not known, which a ``gpu_budget`` refuses."""
    gpu_cost: float = 1.0
    """Of one GPU of its type, in the GPUs that ``miss_cost_s`` counts in."""


def planner_config(
    *,
    namespace: str,
    model_name: str,
    roles: Mapping[str, RoleBounds],
    backend: str = "mocker",
    tick_s: float = 1.0,
    target_requests_per_replica: float = 4.0,
    scale_down_after_s: float | None = None,
    cooldown_s: float | None = None,
    headroom_replicas: int = 0,
    ttft_objective_s: float | None = None,
    itl_objective_s: float | None = None,
    miss_cost_s: float = 10.0,
    hints: str = Hinting.NONE,
    parked_most: int = HintPolicy.parked_most,
    gpu_budget: int | None = None,
    advisory: bool = False,
    fleet_status_path: str | None = None,
    fleet_status_nats: str | None = None,
    fleet_status_subject: str | None = None,
    decision_log_path: str | None = None,
    learnt_path: str | None = None,
    learnt_of: str | None = None,
    control_api_port: int = 0,
    metrics_port: int = 0,
) -> dict[str, Any]:
    """Returns what to write as YAML or JSON for ``python -m dynamo.planner --config``.

    Args:
        namespace: the Dynamo namespace of the workers and of the decision.
        model_name: as requests name it.
        roles: bounds by role: ``decode`` (also aggregated workers), ``prefill``, or both.
        backend: ``vllm``, ``sglang``, ``trtllm`` or ``mocker``.
        tick_s: seconds between two decisions; may be below one.
        scale_down_after_s, cooldown_s: seconds; None: 4 and 1 with a ``ttft_objective_s``, where misses are
            predicted, 20 and 5 without.
        headroom_replicas: kept beyond what is needed; the policy's ``spare_replicas``.
        ttft_objective_s: seconds to the first token within which a request is in time; None: sizes follow
            ``target_requests_per_replica`` instead of predicted misses.
        miss_cost_s: GPU-seconds that one request outside its objective is worth.
        hints: ``none``, ``prefetch`` or ``park``: what is asked of the fleet beside the decisions, over NATS, at
            the planner's ``NATS_SERVER``.
        parked_most: replicas of one role that hints may ask to keep parked.
        gpu_budget: GPUs that all roles together may take; None: no bound but each role's own.
        advisory: decide and log, but change nothing.
        learnt_path: a file that keeps what is learnt for the planner's next start; of this planner alone.
        learnt_of: which engines that is learnt of, in any words; None: the model and its backend.
        control_api_port: Dynamo's API for changing bounds at run time, on localhost; 0: off.
        metrics_port: Dynamo's Prometheus metrics of the planner; 0: off.

    Raises:
        ValueError: for an unknown role or none, or unknown hints.
    """
    known = {Role(name): bounds for name, bounds in roles.items()}
    if not known:
        raise ValueError("roles is empty: name at least one of decode, prefill")
    confirmed_s, apart_s = BY_COUNT_S if ttft_objective_s is None else PREDICTED_S
    mode = "disagg" if len(known) == 2 else "agg" if Role.DECODE in known else "prefill"
    options: dict[str, Any] = {
        "roles": {
            role.value: {
                "min_replicas": bounds.min_replicas,
                "max_replicas": bounds.max_replicas,
                "target_requests_per_replica": target_requests_per_replica,
                "scale_down_after_s": confirmed_s if scale_down_after_s is None else scale_down_after_s,
                "cooldown_s": apart_s if cooldown_s is None else cooldown_s,
                "spare_replicas": headroom_replicas,
                "ttft_objective_s": ttft_objective_s,
                "itl_objective_s": itl_objective_s,
                "miss_cost_s": miss_cost_s,
                "replica_cost": (bounds.gpus or 1) * bounds.gpu_cost,
                "stale_after_s": max(5.0, 3 * tick_s),
            }
            for role, bounds in known.items()
        },
        "fleet_status_path": fleet_status_path,
        "fleet_status_nats": fleet_status_nats,
        "fleet_status_subject": fleet_status_subject,
        "decision_log_path": decision_log_path,
        "learnt_path": learnt_path,
        "learnt_of": None if learnt_path is None else learnt_of or f"{model_name} on {backend}",
        "advisory": advisory or None,
        **_budget_options(gpu_budget, known),
        **_hint_options(namespace, known, Hinting.NONE if advisory else Hinting(hints), parked_most),
    }
    return {
        "environment": "virtual",
        "namespace": namespace,
        "backend": backend,
        "mode": mode,
        "model_name": model_name,
        "optimization_target": "throughput",
        "load_adjustment_interval_seconds": NEVER_S,
        "min_endpoint": min(bounds.min_replicas for bounds in known.values()),
        # The bounds are the policy's; the virtual environment knows no GPUs and wants a number.
        "max_gpu_budget": -1,
        "decode_engine_num_gpu": 1,
        "prefill_engine_num_gpu": 1,
        "live_dashboard_port": 0,
        "control_api_port": control_api_port,
        "metric_reporting_prometheus_port": metrics_port,
        "report_interval_hours": None,
        # Never asked: nothing here needs traffic metrics. The default names a cluster's service.
        "metric_pulling_prometheus_endpoint": "http://127.0.0.1:9",
        "advisory": advisory,
        "scheduling": {"scale_interval_seconds": tick_s},
        "plugin_registration": {
            # Without a secret, so nothing may register from outside.
            "auth": {"trusted_sources": ["static_secret"]},
            "in_process_plugins": [
                {
                    "module": "planner.plugin",
                    "class": "SnapshotScaling",
                    "plugin_id": PLUGIN_ID,
                    "plugin_type": "propose",
                    "priority": PRIORITY,
                    "needs": list(NEEDS),
                    "execution_interval_seconds": 0,
                    "hold_policy": "HOLD_LAST",
                    "kwargs": {key: value for key, value in options.items() if value is not None},
                }
            ],
        },
    }


def hints_subject(namespace: str) -> str:
    """The NATS subject on which the fleet of a Dynamo namespace listens for hints."""
    return f"dynamo_snapshot.{namespace}.scaling_hint"


def _budget_options(gpu_budget: int | None, roles: Mapping[Role, RoleBounds]) -> dict[str, Any]:
    if gpu_budget is None:
        return {}
    gpus = {role.value: bounds.gpus for role, bounds in roles.items() if bounds.gpus is not None}
    return {"gpu_budget": gpu_budget, "gpus_per_replica": gpus}


def _hint_options(namespace: str, roles: Mapping[Role, RoleBounds], hints: Hinting, parked_most: int) -> dict[str, Any]:
    if hints is Hinting.NONE:
        return {}
    return {
        "hints": hints.value,
        "hints_subject": hints_subject(namespace),
        "parked_least": {role.value: bounds.parked for role, bounds in roles.items()},
        "parked_most": parked_most,
    }


def external_planner_config(config: Mapping[str, Any], gateway: str, token: str) -> dict[str, Any]:
    """Returns ``config`` (from :func:`planner_config`) for the plugin outside the planner's process.

    The planner opens its registration gateway; ``python -m planner.grpc_server`` registers there with the
    options of :func:`plugin_options`.

    Args:
        gateway: ``unix:///path``, or ``host:port`` on a network you trust: it is not encrypted.
        token: the secret both sides share.
    """
    return {
        **config,
        "scheduling": {
            **config["scheduling"],
            "gateway": {"enabled": True, "listen": gateway, "allow_insecure": not gateway.startswith("unix:")},
        },
        "plugin_registration": {
            "auth": {"trusted_sources": ["static_secret"], "static_secrets": {token: PLUGIN_ID}},
            "transport": {"allow_insecure_grpc": True},
        },
    }


def built_in_planner_config(config: Mapping[str, Any], optimization_target: str) -> dict[str, Any]:
    """Returns ``config`` (from :func:`planner_config`) without the plugin: Dynamo's own load scaling alone.

    Args:
        optimization_target: Dynamo's ``throughput`` or ``latency``: by how full queues and KV caches are.
    """
    options = plugin_options(config)["roles"].values()
    rest = {key: value for key, value in config.items() if key not in ("plugin_registration", "scheduling")}
    return {
        **rest,
        "optimization_target": optimization_target,
        "load_adjustment_interval_seconds": BUILT_IN_TICK_S,
        "max_gpu_budget": sum(int(knobs["max_replicas"]) for knobs in options),
    }


def plugin_options(config: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the plugin's own options in ``config``: what ``planner.grpc_server --config`` reads."""
    options: dict[str, Any] = config["plugin_registration"]["in_process_plugins"][0]["kwargs"]
    return options
