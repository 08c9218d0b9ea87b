"""A demo's result: what ``--json`` writes and the page shows, put together from its record."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any

from dynamo_snapshot.agent.criu.command import find as find_criu
from dynamo_snapshot.config import Fleet
from dynamo_snapshot.local import host, measures
from dynamo_snapshot.local.checks import control_checks, gated_checks
from dynamo_snapshot.local.demo_fleet import DemoOptions, describe
from dynamo_snapshot.local.leftovers import KINDS, Leftover
from dynamo_snapshot.local.load_meter import LoadMeter
from dynamo_snapshot.local.recorder import Record
from dynamo_snapshot.model import Order, OrderKind, OrderStatus
from dynamo_snapshot.replay.migrations import Migration
from dynamo_snapshot.replay.pin import PinResult
from dynamo_snapshot.replay.records import LoadSummary


@dataclass
class Played:
    """What the demo itself did, beside what its record saw. Times are wall clock."""

    pins: dict[str, PinResult] = field(default_factory=dict)
    marks: list[dict[str, Any]] = field(default_factory=list)
    killed: tuple[str, float] | None = None
    idle_from: float = float("inf")
    left_serving: int | None = None
    migrations: tuple[Migration, ...] = ()
    migrations_by_metric: int = 0
    planner: list[dict[str, Any]] = field(default_factory=list)
    load: LoadSummary | None = None
    load_planned: int = 0

    def mark(self, kind: str, label: str) -> None:
        self.marks.append({"at": time.time(), "kind": kind, "label": label})


def assemble(
    options: DemoOptions, fleet: Fleet, record: Record, played: Played, meter: LoadMeter, left: list[Leftover]
) -> dict[str, Any]:
    """Returns the result, with its checks and whether all of them passed."""
    early = measures.routed_before_serving(record)
    drained = measures.drained(record, since=record.began_at)
    result = {
        "what": describe(options),
        "gate": "on" if options.gated else "off",
        "trace_speed": options.speed,
        "began_at": record.began_at,
        "ended_at": time.time(),
        "environment": host.environment(find_criu(fleet.agent.criu)),
        "requests": _requests(played),
        "restore": _restores(record, played.idle_from),
        "cold_start": _cold_starts(record),
        "capture": _captures(record),
        "scale_out": {"most_serving": measures.most_serving(record)},
        "routed_before_serving": len(early),
        "routed_before_serving_list": early,
        "unexplained_registrations": measures.unexplained_registrations(record),
        "replacement": _replacement(record, played),
        "scale_in": {"drained": len(drained), "replicas": drained, "serving": played.left_serving},
        "pinned": {
            name: {"instance_id": pin.instance_id, "sent": pin.sent, "answered": pin.succeeded, "errors": pin.errors}
            for name, pin in played.pins.items()
        },
        "left_behind": len(left),
        "left_behind_list": [str(leftover) for leftover in left],
        "left_behind_counted": {kind: sum(leftover.kind == kind for leftover in left) for kind in KINDS},
        "load_cores": meter.cores(),
        "orders": measures.order_rows(record),
        "replicas": measures.replica_rows(record),
        "decisions": measures.decision_rows(record),
        "planner_decisions": played.planner,
        "counts": measures.count_rows(record),
        "load": meter.rows,
        "marks": played.marks,
    }
    checks = gated_checks(result, played.load_planned) if options.gated else control_checks(result)
    result["checks"] = [check._asdict() for check in checks]
    result["passed"] = all(check.passed for check in checks)
    return result


def _requests(played: Played) -> dict[str, Any]:
    load = played.load
    assert load is not None, "the load ran before the result is put together"
    migrated_from: dict[str, int] = {}
    for move in played.migrations:
        migrated_from[str(move.from_worker)] = migrated_from.get(str(move.from_worker), 0) + 1
    return {
        "planned": played.load_planned,
        "sent": load.sent,
        "failed": load.failed,
        "errors": load.errors,
        "held_back": load.concurrency_limit_hits,
        "migrated": len(played.migrations),
        "migrated_from": migrated_from,
        "migrated_by_metric": played.migrations_by_metric,
        "ttft_s": {"p50": load.ttft_s.p50, "p95": load.ttft_s.p95, "max": load.ttft_s.max},
        "lateness_s": {"p50": load.lateness_s.p50, "p95": load.lateness_s.p95, "max": load.lateness_s.max},
        "peak_in_flight": load.peak_in_flight,
        "tokens": load.tokens,
    }


def _restores(record: Record, idle_from: float) -> dict[str, Any]:
    loaded = [start.seconds for start in measures.starts(record, OrderKind.RESTORE, until=idle_from)]
    idle = [start.seconds for start in measures.starts(record, OrderKind.RESTORE, since=idle_from)]
    return {
        "count": len(loaded) + len(idle),
        "failed": _count(record, OrderKind.RESTORE, OrderStatus.FAILED),
        "ordered_to_serving_s": measures.distribution(loaded),
        "idle_ordered_to_serving_s": measures.distribution(idle),
    }


def _cold_starts(record: Record) -> dict[str, Any]:
    seconds = [round(start.seconds, 3) for start in measures.starts(record, OrderKind.COLD_START)]
    return {"count": len(seconds), "ordered_to_serving_s": seconds[0] if seconds else None, "all": seconds}


def _captures(record: Record) -> dict[str, Any]:
    outcomes = [
        record.outcomes[order.id] for order in _orders(record, OrderKind.CAPTURE) if order.id in record.outcomes
    ]
    done = [outcome for outcome in outcomes if outcome.status is OrderStatus.DONE]
    return {
        "count": len(done),
        "seconds": [round(outcome.finished_at - outcome.started_at, 3) for outcome in done],
        "snapshots": [outcome.snapshot_id for outcome in done],
    }


def _replacement(record: Record, played: Played) -> dict[str, Any]:
    if played.killed is None:
        return {"killed": None, "instance_id": None, "out_of_discovery_s": None, "serving_s": None}
    registration = record.registration_of(played.killed[0])
    instance_id = registration.instance_id if registration is not None else None
    return {**measures.replacement(record, *played.killed), "instance_id": instance_id}


def _orders(record: Record, kind: OrderKind) -> list[Order]:
    return [order for order in record.orders.values() if order.kind is kind]


def _count(record: Record, kind: OrderKind, status: OrderStatus) -> int:
    outcomes = [record.outcomes.get(order.id) for order in _orders(record, kind)]
    return sum(outcome is not None and outcome.status is status for outcome in outcomes)
