"""What a node gives the workers that it starts, restores and lets go."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from dynamo_snapshot.agent.criu.command import Criu
from dynamo_snapshot.agent.gpus import Gpus
from dynamo_snapshot.agent.house import HostHouses
from dynamo_snapshot.agent.journal import Journal
from dynamo_snapshot.agent.node import Node
from dynamo_snapshot.config import Agent
from dynamo_snapshot.config import Gpu as GpuSettings
from dynamo_snapshot.model import Order, OrderKind, Way, WorkerSpec
from dynamo_snapshot.snapshots.compatibility import CompatibilityParts
from dynamo_snapshot.snapshots.store import SnapshotStore


@pytest.fixture
def node(tmp_path: Path, free_port: Callable[[], int]) -> Node:
    async def parts(pool: str, spec: WorkerSpec) -> CompatibilityParts:
        raise AssertionError("not asked")

    port = free_port()
    return Node(
        settings=Agent(runtime_dir=tmp_path, rpc_ports=(port, port)),
        houses=HostHouses(tmp_path),
        store=SnapshotStore(tmp_path / "store"),
        criu=Criu(Path("criu"), "4"),
        journal=Journal(tmp_path / "journal"),
        parts=parts,
    )


@pytest.mark.parametrize("way", list(Way))
def test_a_worker_is_told_who_it_is_and_how_long_it_may_drain(node: Node, way: Way) -> None:
    spec = WorkerSpec(command=("true",), incarnation_environment={"NATS_SERVER": "here"}, drain_timeout_s=90)
    now = time.time()
    order = Order(id="o", kind=OrderKind.COLD_START, replica_id="r", pool="p", fence=1, issued_at=now, deadline=now + 9)
    replica = node.admit(order, spec, way)
    told = node.release_environment(replica)
    assert told == {
        "NATS_SERVER": "here",
        "DYN_TCP_RPC_PORT": str(node.settings.rpc_ports[0]),
        "DYNAMO_SNAPSHOT_INCARNATION": replica.record.incarnation,
        "DYNAMO_SNAPSHOT_DRAIN_TIMEOUT_S": "90",
    }
    assert told.items() <= node.worker_environment(replica).items()
    node.note(replica, incarnation="another")
    assert node.release_environment(replica)["DYNAMO_SNAPSHOT_INCARNATION"] == "another"


async def test_gpus_whose_processes_cannot_be_started_are_no_agents_end(tmp_path: Path) -> None:
    gpus = Gpus(GpuSettings(), tmp_path / "no-such-folder", tmp_path / "segments", fake=True)
    with capture_logs() as said:
        await gpus.warm()
    assert [line["event"] for line in said] == ["gpus_not_ready"]
