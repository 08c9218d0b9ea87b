"""The figures of a recorded run, computed from its record alone. Times are seconds, instants wall clock."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from dynamo_snapshot.local.recorder import Record
from dynamo_snapshot.model import Order, OrderKind, ReplicaState

SERVES = frozenset({OrderKind.COLD_START, OrderKind.RESTORE, OrderKind.WAKE})
"""Orders after which a replica serves; one that is parked serves nobody yet."""


@dataclass(frozen=True)
class Start:
    """An order that made a replica, and when that replica entered discovery."""

    order: Order
    registered_at: float
    instance_id: int

    @property
    def seconds(self) -> float:
        return self.registered_at - self.order.issued_at


def starts(record: Record, kind: OrderKind, since: float = 0.0, until: float = float("inf")) -> list[Start]:
    """The starts of ``kind`` ordered within the time given that reached discovery, in the order of their orders."""
    found = []
    for order in sorted(record.orders.values(), key=lambda order: order.issued_at):
        if order.kind is kind and since <= order.issued_at < until:
            registration = record.registration_of(order.replica_id)
            if registration is not None:
                found.append(Start(order, registration.at, registration.instance_id))
    return found


def distribution(seconds: Sequence[float]) -> dict[str, Any]:
    """Median, 95th percentile and all values, rounded to milliseconds; None where there are none."""
    values = [round(value, 3) for value in seconds]
    return {
        "median": round(statistics.median(values), 3) if values else None,
        "p95": percentile(values, 95),
        "all": values,
    }


def percentile(values: Sequence[float], share: float) -> float | None:
    """The nearest-rank percentile: a value that was measured, never one between two."""
    if not values:
        return None
    ordered = sorted(values)
    rank = max(1, -(-len(ordered) * share // 100))
    return ordered[int(rank) - 1]


def routed_before_serving(record: Record) -> list[dict[str, Any]]:
    """Workers that were in discovery before they had passed their self-test: each could have been sent a request."""
    early = []
    for replica_id, report in record.reports.items():
        registration = record.registration_of(replica_id)
        if registration is None:
            continue
        if report.self_test_at is None or registration.at < report.self_test_at:
            ahead = None if report.self_test_at is None else round(report.self_test_at - registration.at, 3)
            early.append({"replica": replica_id, "instance_id": registration.instance_id, "ahead_s": ahead})
    return early


def unexplained_registrations(record: Record) -> list[int]:
    """Instances in discovery that no reported replica accounts for; their self-tests are unknown."""
    ports = {report.rpc_port for report in record.reports.values()}
    return [known.instance_id for known in record.registrations if known.port not in ports]


def replacement(record: Record, killed: str, killed_at: float) -> dict[str, Any]:
    """How fast a killed worker left discovery and the replica ordered in its place entered it."""
    gone = next(
        (
            known.gone_at
            for known in record.registrations
            if known.port == record.reports[killed].rpc_port and known.gone_at is not None
        ),
        None,
    )
    after = sorted((start for kind in SERVES for start in starts(record, kind, since=killed_at)), key=_issued)
    first = after[0] if after else None
    return {
        "killed": killed,
        "killed_at": killed_at,
        "out_of_discovery_s": None if gone is None else round(gone - killed_at, 3),
        "serving_s": None if first is None else round(first.registered_at - killed_at, 3),
        "replica": first.order.replica_id if first else None,
        "way": first.order.kind.value if first else None,
    }


def drained(record: Record, since: float) -> list[str]:
    """Replicas that were drained on the fleet's order since then and ended with status 0."""
    done = []
    for order in record.orders.values():
        if order.kind is OrderKind.DRAIN and order.issued_at >= since:
            report = record.reports.get(order.replica_id)
            if report is not None and report.exit is not None and report.exit.code == 0:
                done.append(order.replica_id)
    return sorted(set(done))


def most_serving(record: Record) -> int:
    """The most instances that were in discovery at one time."""
    events = [(known.at, 1) for known in record.registrations]
    events += [(known.gone_at, -1) for known in record.registrations if known.gone_at is not None]
    most = now = 0
    for _, step in sorted(events):
        now += step
        most = max(most, now)
    return most


def gpu_seconds(record: Record, since: float, until: float) -> float:
    """Seconds from each replica's order to its exit, within the time given, added up: what a GPU each would cost."""
    total = 0.0
    for order in record.orders.values():
        if order.kind in SERVES:
            report = record.reports.get(order.replica_id)
            ended = report.exit.at if report is not None and report.exit is not None else until
            total += max(0.0, min(ended, until) - max(order.issued_at, since))
    return total


def order_rows(record: Record) -> list[dict[str, Any]]:
    """One row an order: what was wanted, how it went, phase by phase, and how idle the host was."""
    rows = []
    for order in sorted(record.orders.values(), key=_order_issued):
        outcome = record.outcomes.get(order.id)
        makes = order.kind in SERVES
        registration = record.registration_of(order.replica_id) if makes else None
        row: dict[str, Any] = {
            "id": order.id,
            "kind": order.kind.value,
            "replica": order.replica_id,
            "issued_at": order.issued_at,
            "reason": order.reason,
            "status": outcome.status.value if outcome else None,
        }
        if registration is not None:
            row["ordered_to_serving_s"] = round(registration.at - order.issued_at, 3)
        if outcome is not None:
            row |= {
                "started_at": outcome.started_at,
                "finished_at": outcome.finished_at,
                "failure": outcome.reason,
                "message": outcome.message,
                "phases": [{"name": phase.name, "seconds": round(phase.seconds, 4)} for phase in outcome.phases],
                "unaccounted_s": round(outcome.unaccounted_s, 4),
                "idle_cpu": None if outcome.idle_cpu is None else round(outcome.idle_cpu, 3),
                "snapshot_id": outcome.snapshot_id,
            }
        rows.append(row)
    return rows


def replica_rows(record: Record) -> list[dict[str, Any]]:
    """One row a replica: its states with their beginnings, its instance, what it told of itself, how it ended."""
    rows = []
    for replica_id in sorted(record.reports, key=lambda replica_id: _first_seen(record, replica_id)):
        report = record.reports[replica_id]
        registration = record.registration_of(replica_id)
        rows.append(
            {
                "replica": replica_id,
                "pool": report.pool,
                "way": report.way.value,
                "snapshot_id": report.snapshot_id,
                "instance_id": registration.instance_id if registration else None,
                "registered_at": registration.at if registration else None,
                "deregistered_at": registration.gone_at if registration else None,
                "self_test_at": report.self_test_at,
                "first_random": report.evidence.get("first_random"),
                "evidence": report.evidence,
                "states": [{"state": state.value, "at": at} for state, at in record.states.get(replica_id, [])],
                "exit": None
                if report.exit is None
                else {"code": report.exit.code, "at": report.exit.at, "reason": report.exit.reason},
            }
        )
    return rows


def decision_rows(record: Record) -> list[dict[str, Any]]:
    return [
        {"at": decision.at, "pool": decision.pool, "what": decision.what, "reason": decision.reason}
        for decision in record.decisions
    ]


def count_rows(record: Record) -> list[dict[str, Any]]:
    """Target, serving and pending over time, one row at each change, all pools together."""
    return [
        {
            "at": status.at,
            "target": sum(pool.target for pool in status.pools),
            "serving": sum(pool.serving for pool in status.pools),
            "pending": sum(pool.pending for pool in status.pools),
        }
        for status in record.statuses
    ]


def all_distinct(values: Iterable[Any]) -> bool:
    """Whether no value comes twice and none is missing."""
    seen = list(values)
    return None not in seen and len(set(seen)) == len(seen)


def _issued(start: Start) -> float:
    return start.order.issued_at


def _order_issued(order: Order) -> float:
    return order.issued_at


def _first_seen(record: Record, replica_id: str) -> float:
    states: list[tuple[ReplicaState, float]] = record.states.get(replica_id, [])
    return states[0][1] if states else record.reports[replica_id].since
