"""What a node agent tells Prometheus: how orders ended and how long their phases took, what is on its host."""

from __future__ import annotations

from collections import Counter as Count
from collections.abc import Iterable

from prometheus_client import Counter, Histogram, Metric
from prometheus_client.registry import Collector, CollectorRegistry

from dynamo_snapshot.metrics import SECONDS, Family
from dynamo_snapshot.model import Order, OrderStatus, Outcome, Reason, ReplicaPhase, Reported, SnapshotSummary
from dynamo_snapshot.snapshots.store import pool_of
from worker_hooks.reasons import HookReason

ORDERS = Family(
    "dynamo_snapshot_orders_total",
    "counter",
    "Orders that ended, by kind (`restore`, `cold_start`, `capture`, …), outcome (`done`, `failed`, `cancelled`) "
    "and reason code, which is empty where it was done.",
    ("kind", "pool", "outcome", "reason"),
)
ORDER_SECONDS = Family(
    "dynamo_snapshot_order_seconds",
    "histogram",
    "Seconds from an order's begin on this node to its end, for orders that were done.",
    ("kind", "pool"),
)
PHASE_SECONDS = Family(
    "dynamo_snapshot_phase_seconds",
    "histogram",
    "Seconds in each phase of orders that were done; phase `unaccounted` is what no phase claims.",
    ("kind", "phase"),
)
SNAPSHOTS = Family(
    "dynamo_snapshot_snapshots",
    "gauge",
    "Snapshots in the store: `admitted`, `pending` (to be digested yet) or `refused` (changed or damaged).",
    ("pool", "state"),
)
SNAPSHOT_BYTES = Family("dynamo_snapshot_snapshot_bytes", "gauge", "Bytes of the snapshots in the store.", ("pool",))
NODE_REPLICAS = Family(
    "dynamo_snapshot_node_replicas", "gauge", "Replicas on this node, by what it knows of them.", ("pool", "phase")
)
FAMILIES = (ORDERS, ORDER_SECONDS, PHASE_SECONDS, SNAPSHOTS, SNAPSHOT_BYTES, NODE_REPLICAS)

UNACCOUNTED = "unaccounted"
OTHER = "other"
"""A reason that is none of ours: a worker may give any text."""
STATES = ("admitted", "pending", "refused")
_KNOWN = frozenset(reason.value for reason in (*Reason, *HookReason))


class AgentMetrics(Collector):
    """Counts what it is told of, and shows the newest report. Used from one event loop."""

    def __init__(self, registry: CollectorRegistry, pools: Iterable[str]) -> None:
        self._pools = tuple(pools)
        self._reported: Reported | None = None
        self._orders = Counter(ORDERS.name, ORDERS.meaning, ORDERS.labels, registry=registry)
        self._seconds, self._phases = (
            Histogram(family.name, family.meaning, family.labels, buckets=SECONDS, registry=registry)
            for family in (ORDER_SECONDS, PHASE_SECONDS)
        )
        registry.register(self)

    def ended(self, order: Order, outcome: Outcome) -> None:
        """Takes in how ``order`` ended."""
        reason = outcome.reason or ""
        shown = reason if not reason or reason in _KNOWN else OTHER
        self._orders.labels(order.kind.value, order.pool, outcome.status.value, shown).inc()
        if outcome.status is not OrderStatus.DONE:
            return
        self._seconds.labels(order.kind.value, order.pool).observe(outcome.finished_at - outcome.started_at)
        for phase in outcome.phases:
            self._phases.labels(order.kind.value, phase.name).observe(phase.seconds)
        self._phases.labels(order.kind.value, UNACCOUNTED).observe(outcome.unaccounted_s)

    def reported(self, report: Reported) -> None:
        """Takes in what is so on this node."""
        self._reported = report

    def collect(self) -> Iterable[Metric]:
        """Yields the gauges: nothing before the first report, as unknown is not zero."""
        report = self._reported
        if report is None:
            return
        phases = Count((replica.pool, replica.phase) for replica in report.replicas)
        pools = dict.fromkeys((*self._pools, *(pool for pool, _ in phases)))
        yield NODE_REPLICAS.gauge(
            ((pool, phase.value), phases[pool, phase]) for pool in pools for phase in ReplicaPhase
        )
        states = Count((pool_of(summary.id), state_of(summary)) for summary in report.snapshots)
        sizes: Count[str] = Count()
        for summary in report.snapshots:
            sizes[pool_of(summary.id)] += summary.size_bytes
        stored = dict.fromkeys((*self._pools, *sizes))
        yield SNAPSHOTS.gauge(((pool, state), states[pool, state]) for pool in stored for state in STATES)
        yield SNAPSHOT_BYTES.gauge(((pool,), sizes[pool]) for pool in stored)


def state_of(summary: SnapshotSummary) -> str:
    """One of :data:`STATES`."""
    if summary.reason is not None:
        return "refused"
    return "admitted" if summary.admitted else "pending"
