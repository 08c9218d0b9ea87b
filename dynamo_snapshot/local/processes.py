"""Command lines and environments of what `up` runs beside the servers: Dynamo's parts and ours."""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Mapping
from fractions import Fraction
from pathlib import Path
from typing import Any

from dynamo_snapshot.bus.directory import FOLDER
from dynamo_snapshot.config import Fleet, ScalingPolicy
from dynamo_snapshot.fleet.rules import fleet_rules
from dynamo_snapshot.local.service import Ready, Service, http_ok, wrote
from planner.config import NEVER_S, RoleBounds, built_in_planner_config, planner_config

FLEET_STATUS = "fleet-status.json"
DECISION_LOG = "decisions.jsonl"
LEARNT = "learnt.json"
RUNTIME_DIR_TAG = "DYNAMO_SNAPSHOT_RUNTIME_DIR"
"""Set for every process of a fleet, so that what is left of one can be told from anything else."""


def fleet_environment(fleet: Fleet, etcd_url: str, nats_url: str) -> dict[str, str]:
    """What every Dynamo process of a fleet on this host needs: what its workers are told, and some manners."""
    rules = fleet_rules(fleet, etcd_url, nats_url, {})
    told = next(iter(rules.pools.values())).worker.incarnation_environment
    return {
        **told,
        "HF_HUB_OFFLINE": "1",
        "DYN_SDK_DISABLE_ANSI_LOGGING": "1",
    }


def frontend(fleet: Fleet, environment: Mapping[str, str]) -> Service:
    """Dynamo's frontend: the OpenAI API at ``fleet.frontend``."""
    section = fleet.frontend
    command = (
        sys.executable, "-m", "dynamo.frontend", "--http-host", section.host, "--http-port", str(section.port),
        "--discovery-backend", "etcd", "--request-plane", "tcp", "--event-plane", "nats",
        "--namespace", fleet.namespace, "--router-mode", section.router_mode,
        "--migration-limit", str(section.migration_limit),
    )  # fmt: skip
    ready = http_ok(f"http://{section.host}:{section.port}/health")
    return Service(name="frontend", command=command, environment=environment, ready=ready)


def planner_configuration(fleet: Fleet, control_port: int = 0) -> dict[str, Any]:
    """What Dynamo's planner is to read: with our plugin in it, unless the fleet wants Dynamo's own scaling."""
    section = fleet.planner
    bounds = {
        pool.role.value: RoleBounds(pool.min_replicas, pool.max_replicas, pool.parked, pool.worker.gpus, pool.gpu_cost)
        for pool in fleet.pools.values()
    }
    with_plugin = planner_config(
        namespace=fleet.namespace,
        model_name=fleet.model.name,
        roles=bounds,
        backend=next(backend_of(pool.worker.command) for pool in fleet.pools.values()),
        tick_s=section.tick_s,
        target_requests_per_replica=section.target_requests_per_replica,
        ttft_objective_s=section.ttft_objective_s,
        itl_objective_s=section.itl_objective_s,
        miss_cost_s=section.miss_cost_s,
        scale_down_after_s=section.scale_down_after_s,
        headroom_replicas=section.headroom_replicas,
        hints=section.hints,
        parked_most=section.parked_most,
        gpu_budget=section.gpu_budget,
        advisory=section.advisory,
        fleet_status_path=str(fleet.agent.runtime_dir / FLEET_STATUS),
        control_api_port=control_port,
        decision_log_path=str(fleet.agent.runtime_dir / DECISION_LOG),
        learnt_path=str(fleet.agent.runtime_dir / LEARNT),
        learnt_of=engines_of(fleet),
    )
    if section.policy is ScalingPolicy.SNAPSHOT:
        return {**with_plugin, "load_adjustment_interval_seconds": whole_ticks(NEVER_S, section.tick_s)}
    return built_in_planner_config(with_plugin, section.policy.removeprefix("dynamo-"))


def whole_ticks(at_least_s: int, tick_s: float) -> int:
    """Seconds, a whole number of them and of ticks: Dynamo's planner refuses an interval that is not."""
    seconds = Fraction(str(tick_s)).numerator
    return -(-at_least_s // seconds) * seconds


def engines_of(fleet: Fleet) -> str:
    """The model, and a digest of all else that its workers run with: what is learnt of some holds for such ones."""
    pools = sorted((pool.role.value, pool.worker) for pool in fleet.pools.values())
    ways = [(role, worker.command, sorted(worker.environment.items()), worker.gpus) for role, worker in pools]
    digest = hashlib.sha256(json.dumps([str(fleet.model.path), ways]).encode()).hexdigest()
    return f"{fleet.model.name} ({digest[:12]})"


def backend_of(command: tuple[str, ...]) -> str:
    """Dynamo's name of the engine that ``command`` runs: its planner derives component names from it."""
    engines = ("vllm", "sglang", "trtllm")
    return next((engine for engine in engines if f"dynamo.{engine}" in command), "mocker")


def planner(configuration: Path, environment: Mapping[str, str]) -> Service:
    """Dynamo's planner with our plugin in its process."""
    # The virtual connector checks this often, in whole seconds, whether its last decision was carried out.
    own = {"SCALING_CHECK_INTERVAL": "1", "SCALING_MAX_WAIT_TIME": "10"}
    command = (sys.executable, "-m", "dynamo.planner", "--config", str(configuration))
    return Service(name="planner", command=command, environment={**environment, **own})


def controller(fleet: Fleet, fleet_file: Path, environment: Mapping[str, str]) -> Service:
    """The fleet controller; ready once it has published a status."""
    return _own_command("controller", fleet_file, environment, wrote(fleet.agent.runtime_dir, FLEET_STATUS))


def agent(fleet: Fleet, fleet_file: Path, environment: Mapping[str, str]) -> Service:
    """This host's node agent; ready once it has reported."""
    return _own_command("agent", fleet_file, environment, wrote(fleet.agent.runtime_dir / FOLDER, "**/*"))


def _own_command(name: str, fleet_file: Path, environment: Mapping[str, str], ready: Ready) -> Service:
    command = (sys.executable, "-m", "dynamo_snapshot.cli.main", name, str(fleet_file))
    return Service(name=name, command=command, environment=environment, ready=ready, stop_timeout_s=20)
