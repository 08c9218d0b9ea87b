"""A parked mocker with real etcd, NATS, frontend and CRIU: in no discovery until it is woken, and somebody new then."""

from __future__ import annotations

import signal
import sys
import time
from pathlib import Path

import pytest
from support.agent_host import AgentHost, MakeHost, replica_of
from support.dynamo_world import ask, environment, instances, keys, models
from support.worker_house import wait_for

from dynamo_snapshot.model import OrderKind, OrderStatus, ReplicaPhase, ReplicaReport, WorkerSpec
from worker_hooks.guard import scan


@pytest.fixture
def model(request: pytest.FixtureRequest) -> str:
    """A model and namespace of the test's own."""
    return f"parked{abs(hash(request.node.nodeid)) % 10**9}"


@pytest.fixture
def host(make_host: MakeHost, etcd_url: str, nats_url: str, tiny_model: Path, model: str) -> AgentHost:
    made = make_host()
    command = (
        sys.executable, "-m", "worker_hooks.worker", "run", "--",
        "python", "-m", "dynamo.mocker", "--model-path", str(tiny_model), "--model-name", model,
    )  # fmt: skip
    made.spec = WorkerSpec(
        command=command,
        environment={"MOCKER_RESIDENT_MIB": "40"},
        incarnation_environment=environment(etcd_url, nats_url, model),
        model_path=str(tiny_model),
    )
    return made


async def parked(host: AgentHost, name: str, snapshot: str) -> ReplicaReport:
    outcome = await host.outcome(await host.order(OrderKind.PARK, name, snapshot_id=snapshot))
    assert outcome.status is OrderStatus.DONE, outcome
    return await host.replica(name, ReplicaPhase.PARKED)


async def test_nothing_of_a_parked_worker_is_in_discovery_and_it_serves_as_somebody_new_when_woken(
    host: AgentHost, etcd_url: str, frontend_url: str, model: str
) -> None:
    host.start()
    snapshot = await host.captured()
    source = await host.replica("source", ReplicaPhase.REGISTERED)
    wait_for(lambda: model in models(frontend_url), "the model at the frontend")
    spare = await parked(host, "spare", snapshot)
    assert spare.pid is not None
    assert scan(spare.pid) == [], "no connection to the outside, no runtime thread, no io_uring"
    assert [str(each) for each in instances(etcd_url, model)] == [source.evidence["instance_id"]]
    await host.outcome(await host.order(OrderKind.DRAIN, "source"))
    assert keys(etcd_url, f"v1/instances/{model}/") == {}
    assert keys(etcd_url, f"v1/mdc/{model}/") == {}

    await host.stop(signal.SIGKILL)
    began = time.time()
    host.start()
    found = replica_of(await host.until(lambda r: r.at > began and replica_of(r, "spare")), "spare")
    assert found is not None
    assert (found.phase, found.pid) == (ReplicaPhase.PARKED, spare.pid)

    woken = await host.outcome(await host.order(OrderKind.WAKE, "spare"))
    assert woken.status is OrderStatus.DONE, woken
    serves = await host.replica("spare", ReplicaPhase.REGISTERED)
    (instance,) = instances(etcd_url, model)
    assert str(instance) == serves.evidence["instance_id"]
    for new in ("instance_id", "first_random"):
        assert serves.evidence[new] != source.evidence[new]
    assert (serves.incarnation, serves.rpc_port) != (source.incarnation, source.rpc_port)
    assert serves.evidence["resident_digest"] == source.evidence["resident_digest"]
    wait_for(lambda: model in models(frontend_url), "the model at the frontend")
    status, body = ask(frontend_url, model)
    assert status == 200
    assert body["nvext"]["worker_id"]["decode_worker_id"] == instance


async def test_a_parked_mocker_that_drains_was_never_anywhere(host: AgentHost, etcd_url: str, model: str) -> None:
    host.start()
    snapshot = await host.captured()
    await host.outcome(await host.order(OrderKind.DRAIN, "source"))
    await parked(host, "spare", snapshot)
    outcome = await host.outcome(await host.order(OrderKind.DRAIN, "spare"))
    assert outcome.status is OrderStatus.DONE
    assert outcome.finished_at - outcome.started_at < 1
    exited = (await host.replica("spare", ReplicaPhase.EXITED)).exit
    assert exited is not None
    assert exited.code == 0
    assert instances(etcd_url, model) == {}
