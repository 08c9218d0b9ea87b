"""What a fleet controller tells Prometheus: the newest FleetStatus."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from prometheus_client import Metric
from prometheus_client.registry import Collector, CollectorRegistry

from dynamo_snapshot.fleet.publisher import Publisher
from dynamo_snapshot.metrics import Family
from dynamo_snapshot.model import FleetStatus, ReplicaState

TARGET = Family("dynamo_snapshot_pool_target", "gauge", "Replicas that the planner wants serving.", ("pool", "role"))
ACHIEVABLE = Family(
    "dynamo_snapshot_pool_achievable", "gauge", "The most replicas that the pool can reach now.", ("pool", "role")
)
REPLICAS = Family(
    "dynamo_snapshot_replicas", "gauge", "Replicas, by the fleet's view of their state.", ("pool", "state")
)
QUARANTINED = Family(
    "dynamo_snapshot_quarantined_snapshots", "gauge", "Snapshots that are not used as their restores kept failing."
)
DISCOVERY_KNOWN = Family(
    "dynamo_snapshot_discovery_known", "gauge", "0 while discovery cannot be read: counts are then the last known ones."
)
STATUS_TIME = Family(
    "dynamo_snapshot_fleet_status_timestamp_seconds", "gauge", "When the status behind these was taken, Unix time."
)
FAMILIES = (TARGET, ACHIEVABLE, REPLICAS, QUARANTINED, DISCOVERY_KNOWN, STATUS_TIME)


class FleetMetrics(Collector):
    """A publisher between the controller and ``beyond``, which shows what went through last."""

    def __init__(self, registry: CollectorRegistry, beyond: Publisher) -> None:
        self._beyond = beyond
        self._status: FleetStatus | None = None
        registry.register(self)

    async def publish(self, status: FleetStatus) -> None:
        self._status = status
        await self._beyond.publish(status)

    def collect(self) -> Iterable[Metric]:
        """Yields the gauges: nothing before the first status, as unknown is not zero."""
        status = self._status
        if status is None:
            return
        yield TARGET.gauge(((pool.pool, pool.role), pool.target) for pool in status.pools)
        yield ACHIEVABLE.gauge(((pool.pool, pool.role), pool.achievable) for pool in status.pools)
        states = Counter((replica.pool, replica.state) for replica in status.replicas)
        pools = dict.fromkeys((*(pool.pool for pool in status.pools), *(pool for pool, _ in states)))
        yield REPLICAS.gauge(((pool, state.value), states[pool, state]) for pool in pools for state in ReplicaState)
        yield QUARANTINED.gauge([((), len(status.quarantined))])
        yield DISCOVERY_KNOWN.gauge([((), float(status.discovery_known))])
        yield STATUS_TIME.gauge([((), status.at)])
