"""``fleet.yaml`` as the core reads it."""

from __future__ import annotations

from collections.abc import Mapping

from dynamo_snapshot import config
from dynamo_snapshot.fleet.core.rules import PoolRules, Rules
from dynamo_snapshot.model import WorkerSpec

LOOPBACK = "127.0.0.1"
_DEFAULTS = {
    "DYN_DISCOVERY_BACKEND": "etcd",
    "DYN_REQUEST_PLANE": "tcp",
    "DYN_EVENT_PLANE": "nats",  # zmq publishers listen on every address whatever they are told
    "DYN_EVENT_PLANE_HOST": LOOPBACK,
    "DYN_TCP_RPC_HOST": LOOPBACK,
    "DYN_TCP_RESPONSE_STREAM_HOST": LOOPBACK,
    "DYN_SYSTEM_HOST": LOOPBACK,
}


def fleet_rules(fleet: config.Fleet, etcd_url: str, nats_url: str, environment: Mapping[str, str]) -> Rules:
    """Returns what the core has to know of ``fleet``.

    Args:
        etcd_url: where workers find etcd; likewise ``nats_url``.
        environment: the controller's own; what it says of Dynamo's planes holds for workers too.
    """
    servers = {
        **{name: environment.get(name, value) for name, value in _DEFAULTS.items()},
        "DYN_NAMESPACE": fleet.namespace,
        "ETCD_ENDPOINTS": etcd_url,
        "ETCD_LEASE_TTL": str(fleet.lease_ttl_s),
        "NATS_SERVER": nats_url,
    }
    return Rules(
        fleet=fleet.name,
        namespace=fleet.namespace,
        pools={name: _pool(fleet, pool, servers) for name, pool in fleet.pools.items()},
        node_capacity=fleet.agent.max_replicas,
    )


def _pool(fleet: config.Fleet, pool: config.Pool, servers: dict[str, str]) -> PoolRules:
    values = (str(fleet.model.path), fleet.model.name, fleet.namespace)
    names = dict(zip(config.PLACEHOLDERS, values, strict=True))
    return PoolRules(
        role=pool.role.value,
        component=pool.component,
        endpoint=pool.endpoint,
        worker=WorkerSpec(
            command=tuple(_filled(word, names) for word in pool.worker.command),
            environment=dict(pool.worker.environment),
            incarnation_environment=servers,
            model_path=str(fleet.model.path),
            memory_limit_bytes=pool.worker.memory_limit_bytes,
            drain_timeout_s=pool.worker.drain_timeout_s,
            boot_timeout_s=pool.worker.boot_timeout_s,
            gpus=pool.worker.gpus,
        ),
        min_replicas=pool.min_replicas,
        max_replicas=pool.max_replicas,
        parked=pool.parked,
        captures=pool.snapshot.capture is config.CapturePolicy.FIRST_WORKER,
        minimum_gain_s=pool.snapshot.minimum_gain_s,
        quarantine_after=pool.snapshot.quarantine_after,
        max_attempts=pool.max_attempts,
        cold_start_s=pool.deadlines.cold_start_s,
        restore_s=pool.deadlines.restore_s,
        capture_s=pool.deadlines.capture_s,
        wake_s=pool.deadlines.wake_s,
        prefetch_s=pool.deadlines.prefetch_s,
        drain_s=pool.deadlines.drain_s,
        kill_s=pool.deadlines.kill_s,
    )


def _filled(word: str, names: Mapping[str, str]) -> str:
    # Not str.format: a command may hold JSON, whose braces are its own.
    for name, value in names.items():
        word = word.replace(name, value)
    return word
