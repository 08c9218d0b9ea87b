"""The fleets and figures of the comparison of planners, from records made by hand."""

from __future__ import annotations

from pathlib import Path

import pytest
from dynamo.planner.config.planner_config import PlannerConfig

from dynamo_snapshot.config import CapturePolicy, ScalingPolicy
from dynamo_snapshot.local import measures
from dynamo_snapshot.local.bench_planner import CONTENDERS, Contender, Objectives, figures
from dynamo_snapshot.local.demo_fleet import MAX_REPLICAS, DemoOptions, demo_fleet
from dynamo_snapshot.local.processes import planner_configuration
from dynamo_snapshot.local.recorder import Record
from dynamo_snapshot.model import Exit, Order, OrderKind, ReplicaPhase, ReplicaReport, Reported, Way
from dynamo_snapshot.replay.records import RequestRecord


@pytest.fixture
def record() -> Record:
    """A cold start before the load, a restore during it; the restored one exits at 40."""
    record = Record(began_at=0.0)
    for name, kind, at in (("a", OrderKind.COLD_START, 5.0), ("b", OrderKind.RESTORE, 20.0)):
        record.orders[name] = Order(
            id=name, kind=kind, replica_id=name, pool="decode", fence=1, issued_at=at, deadline=at + 60
        )
    record.orders["d"] = Order(
        id="d", kind=OrderKind.DRAIN, replica_id="b", pool="decode", fence=1, issued_at=39.0, deadline=99.0
    )
    for name, ended in (("a", None), ("b", Exit(code=0, at=40.0))):
        report = ReplicaReport(
            replica_id=name,
            pool="decode",
            incarnation=f"{name}-1",
            way=Way.RESTORE,
            phase=ReplicaPhase.EXITED if ended else ReplicaPhase.REGISTERED,
            since=0,
            rpc_port=1,
            exit=ended,
        )
        record.take_report(Reported(node="n", sequence=1, fence=1, at=0, replicas=(report,)))
    return record


def request(name: str, first: float | None, last: float, tokens: int, error: str | None = None) -> RequestRecord:
    return RequestRecord(
        id=name, scheduled=10.0, sent=10.0, first_token=first, last_token=last, tokens=tokens, error=error
    )


def test_a_replica_costs_from_its_order_to_its_exit_within_the_load(record: Record) -> None:
    assert measures.gpu_seconds(record, 10.0, 50.0) == 40.0 + 20.0
    assert measures.gpu_seconds(record, 10.0, 30.0) == 20.0 + 10.0
    assert measures.gpu_seconds(record, 45.0, 50.0) == 5.0


def test_attainment_counts_every_request_that_was_sent(record: Record) -> None:
    requests = [
        request("in time", 10.5, 11.0, 6),
        request("one token", 10.5, 10.5, 1),
        request("late", 12.0, 12.2, 6),
        request("slow", 10.1, 12.1, 6),
        request("failed", 10.1, 10.2, 6, error="500"),
        request("unanswered", None, 0.0, 0, error="timeout"),
    ]
    row = figures(record, requests, Objectives(ttft_s=1.0, itl_s=0.1), 10.0, 50.0)
    assert (row["requests"], row["failed"]) == (6, 2)
    assert row["ttft_attainment"] == pytest.approx(3 / 6, abs=1e-4)
    assert row["itl_attainment"] == pytest.approx(3 / 6, abs=1e-4)
    assert row["attainment"] == pytest.approx(2 / 6, abs=1e-4)
    assert (row["restores"], row["cold_starts"], row["drains"]) == (1, 0, 1)
    assert row["gpu_seconds"] == 60.0


@pytest.mark.parametrize("contender", CONTENDERS, ids=lambda contender: contender.name)
def test_dynamo_takes_the_configuration_of_every_contender(contender: Contender, tmp_path: Path) -> None:
    fleet = contender.applied(demo_fleet(DemoOptions(), tmp_path), Objectives(ttft_s=2.0, itl_s=0.1))
    assert fleet.pools["decode"].snapshot.capture is (
        CapturePolicy.FIRST_WORKER if contender.restores else CapturePolicy.NEVER
    )
    read = PlannerConfig.model_validate(planner_configuration(fleet))
    plugins = [entry.plugin_id for entry in read.plugin_registration.in_process_plugins]
    if contender.policy is ScalingPolicy.SNAPSHOT:
        assert plugins == ["snapshot-scaling"]
        knobs = read.plugin_registration.in_process_plugins[0].kwargs["roles"]["decode"]
        assert (knobs["ttft_objective_s"], knobs["itl_objective_s"], knobs["scale_down_after_s"]) == (2.0, 0.1, 4.0)
    else:
        assert plugins == []
        assert read.optimization_target == contender.policy.removeprefix("dynamo-")
        assert (read.load_adjustment_interval_seconds, read.scheduling.scale_interval_seconds) == (5, 5.0)
        assert read.max_gpu_budget == MAX_REPLICAS
        assert read.enable_load_scaling
