"""What Prometheus is told: from real outcomes, reports and statuses, under the names that are documented."""

from __future__ import annotations

import asyncio
import re
import socket
from collections.abc import Callable
from pathlib import Path

import aiohttp
import pytest
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from dynamo_snapshot import metrics
from dynamo_snapshot.agent.metrics import FAMILIES as AGENT_FAMILIES
from dynamo_snapshot.agent.metrics import AgentMetrics
from dynamo_snapshot.fleet.metrics import FAMILIES as FLEET_FAMILIES
from dynamo_snapshot.fleet.metrics import FleetMetrics
from dynamo_snapshot.model import (
    FleetStatus,
    Order,
    OrderKind,
    OrderStatus,
    Outcome,
    Phase,
    PoolStatus,
    Reason,
    ReplicaPhase,
    ReplicaReport,
    ReplicaState,
    ReplicaStatus,
    Reported,
    SnapshotSummary,
    Way,
)

PAGE = Path(__file__).parents[2] / "docs" / "metrics.md"


def shown(registry: CollectorRegistry) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
    """Every sample by name and labels, as a scraper reads it."""
    return {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(generate_latest(registry).decode())
        for sample in family.samples
    }


def at(name: str, **labels: str) -> tuple[str, frozenset[tuple[str, str]]]:
    return name, frozenset(labels.items())


def order(kind: OrderKind = OrderKind.RESTORE) -> Order:
    return Order(id="o", kind=kind, replica_id="r", pool="decode", fence=1, issued_at=0.0, deadline=60.0)


def outcome(status: OrderStatus, reason: str | None = None, seconds: float = 0.4) -> Outcome:
    return Outcome(
        order_id="o",
        status=status,
        started_at=10.0,
        finished_at=10.0 + seconds,
        reason=reason,
        phases=(Phase(name="restore", seconds=0.3), Phase(name="resume", seconds=0.07)),
        unaccounted_s=0.03,
    )


def replica(phase: ReplicaPhase) -> ReplicaReport:
    return ReplicaReport(
        replica_id=phase, pool="decode", incarnation="i", way=Way.RESTORE, phase=phase, since=0.0, rpc_port=1
    )


def snapshot(number: int, *, admitted: bool, reason: str | None = None) -> SnapshotSummary:
    return SnapshotSummary(
        id=f"decode-20300101-000000-{number:06x}",
        compatibility_key="k",
        size_bytes=100,
        created_at=0.0,
        admitted=admitted,
        reason=reason,
    )


@pytest.fixture
def registry() -> CollectorRegistry:
    return CollectorRegistry()


def test_orders_are_counted_by_outcome_and_reason_and_timed_where_they_were_done(registry: CollectorRegistry) -> None:
    agent = AgentMetrics(registry, ["decode"])
    agent.ended(order(), outcome(OrderStatus.DONE))
    agent.ended(order(), outcome(OrderStatus.DONE))
    agent.ended(order(), outcome(OrderStatus.FAILED, Reason.CRIU_RESTORE_FAILED, seconds=50))
    agent.ended(order(OrderKind.COLD_START), outcome(OrderStatus.FAILED, "boot_failed"))
    agent.ended(order(OrderKind.COLD_START), outcome(OrderStatus.FAILED, "anything a worker writes"))
    found, total = shown(registry), "dynamo_snapshot_orders_total"
    assert found[at(total, kind="restore", pool="decode", outcome="done", reason="")] == 2
    assert found[at(total, kind="restore", pool="decode", outcome="failed", reason="criu_restore_failed")] == 1
    assert found[at(total, kind="cold_start", pool="decode", outcome="failed", reason="boot_failed")] == 1
    assert found[at(total, kind="cold_start", pool="decode", outcome="failed", reason="other")] == 1
    assert found[at("dynamo_snapshot_order_seconds_count", kind="restore", pool="decode")] == 2
    assert found[at("dynamo_snapshot_order_seconds_sum", kind="restore", pool="decode")] == pytest.approx(0.8)
    phase = "dynamo_snapshot_phase_seconds"
    assert found[at(f"{phase}_sum", kind="restore", phase="restore")] == pytest.approx(0.6)
    assert found[at(f"{phase}_sum", kind="restore", phase="unaccounted")] == pytest.approx(0.06)
    assert found[at(f"{phase}_bucket", kind="restore", phase="resume", le="0.05")] == 0
    assert found[at(f"{phase}_bucket", kind="restore", phase="resume", le="0.1")] == 2


def test_what_is_on_the_node_is_absent_until_it_is_known_and_then_whole(registry: CollectorRegistry) -> None:
    agent = AgentMetrics(registry, ["decode", "prefill"])
    assert shown(registry) == {}
    snapshots = (
        snapshot(1, admitted=True),
        snapshot(2, admitted=True),
        snapshot(3, admitted=False),
        snapshot(4, admitted=False, reason=Reason.SNAPSHOT_CHANGED),
    )
    replicas = (replica(ReplicaPhase.REGISTERED), replica(ReplicaPhase.RESTORING))
    agent.reported(Reported(node="n", sequence=1, fence=1, at=0.0, replicas=replicas, snapshots=snapshots))
    found = shown(registry)
    assert found[at("dynamo_snapshot_node_replicas", pool="decode", phase="registered")] == 1
    assert found[at("dynamo_snapshot_node_replicas", pool="prefill", phase="registered")] == 0
    states = {state: found[at("dynamo_snapshot_snapshots", pool="decode", state=state)] for state in _states(found)}
    assert states == {"admitted": 2, "pending": 1, "refused": 1}
    assert found[at("dynamo_snapshot_snapshot_bytes", pool="decode")] == 400
    assert found[at("dynamo_snapshot_snapshot_bytes", pool="prefill")] == 0


def _states(found: dict[tuple[str, frozenset[tuple[str, str]]], float]) -> set[str]:
    return {dict(labels)["state"] for name, labels in found if name == "dynamo_snapshot_snapshots"}


class Kept:
    def __init__(self) -> None:
        self.statuses: list[FleetStatus] = []

    async def publish(self, status: FleetStatus) -> None:
        self.statuses.append(status)


async def test_the_fleets_status_is_shown_and_published_beyond(registry: CollectorRegistry) -> None:
    beyond = Kept()
    fleet = FleetMetrics(registry, beyond)
    assert shown(registry) == {}
    pool = PoolStatus(pool="decode", role="decode", target=4, achievable=3, serving=1, pending=1, draining=0)
    replicas = tuple(
        ReplicaStatus(replica_id=f"r-{state}", pool="decode", node="n", state=state, since=0.0, way=Way.RESTORE)
        for state in (ReplicaState.SERVING, ReplicaState.RESTORING)
    )
    status = FleetStatus(
        fleet="f", at=12.5, fence=1, pools=(pool,), replicas=replicas, quarantined={"s": "x"}, discovery_known=False
    )
    await fleet.publish(status)
    assert beyond.statuses == [status]
    found = shown(registry)
    assert found[at("dynamo_snapshot_pool_target", pool="decode", role="decode")] == 4
    assert found[at("dynamo_snapshot_pool_achievable", pool="decode", role="decode")] == 3
    assert found[at("dynamo_snapshot_replicas", pool="decode", state="serving")] == 1
    assert found[at("dynamo_snapshot_replicas", pool="decode", state="failed")] == 0
    assert found[at("dynamo_snapshot_quarantined_snapshots")] == 1
    assert found[at("dynamo_snapshot_discovery_known")] == 0
    assert found[at("dynamo_snapshot_fleet_status_timestamp_seconds")] == 12.5


async def test_every_metric_that_is_shown_is_documented_and_the_other_way_round() -> None:
    agent, fleet = CollectorRegistry(), CollectorRegistry()
    told = AgentMetrics(agent, ["decode"])
    told.ended(order(), outcome(OrderStatus.DONE))
    told.reported(Reported(node="n", sequence=1, fence=1, at=0.0, snapshots=(snapshot(1, admitted=True),)))
    await FleetMetrics(fleet, Kept()).publish(FleetStatus(fleet="f", at=0.0, fence=1))
    names = {
        # The parser calls a counter by its name without the suffix.
        f"{family.name}_total" if family.type == "counter" else family.name
        for registry in (agent, fleet)
        for family in text_string_to_metric_families(generate_latest(registry).decode())
        if not family.name.endswith("_created")
    }
    assert names == {family.name for family in (*AGENT_FAMILIES, *FLEET_FAMILIES)}
    assert set(re.findall(r"^\| `(dynamo_snapshot_\w+)`", PAGE.read_text(encoding="utf-8"), re.MULTILINE)) == names


async def test_they_are_read_over_http_where_a_port_is_given(free_port: Callable[[], int]) -> None:
    port, registry = free_port(), metrics.registry()
    AgentMetrics(registry, ["decode"]).ended(order(), outcome(OrderStatus.DONE))
    async with metrics.exposed(registry, "127.0.0.1", port), aiohttp.ClientSession() as session:
        async with session.get(f"http://127.0.0.1:{port}/metrics") as answer:
            text = await answer.text()
            assert answer.headers["Content-Type"].startswith("text/plain; version=")
        async with session.get(f"http://127.0.0.1:{port}/else") as answer:
            assert answer.status == 404
    assert 'dynamo_snapshot_orders_total{kind="restore",outcome="done",pool="decode",reason=""} 1.0' in text
    assert "process_resident_memory_bytes" in text
    async with metrics.exposed(registry, "127.0.0.1", 0):
        pass


async def test_a_port_that_is_taken_keeps_nobody_from_work_and_is_tried_again(
    free_port: Callable[[], int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(metrics, "RETRY_S", 0.05)
    port = free_port()
    with socket.create_server(("127.0.0.1", port)) as other:
        async with metrics.exposed(metrics.registry(), "127.0.0.1", port):
            pass
        async with metrics.exposed(metrics.registry(), "127.0.0.1", port), aiohttp.ClientSession() as session:
            other.close()
            async with asyncio.timeout(5):
                while (status := await _status(session, port)) is None:  # noqa: ASYNC110  # nothing could tell
                    await asyncio.sleep(0.02)
            assert status == 200


async def _status(session: aiohttp.ClientSession, port: int) -> int | None:
    try:
        async with session.get(f"http://127.0.0.1:{port}/metrics") as answer:
            return answer.status
    except aiohttp.ClientConnectionError:
        return None
