"""GPU workers through the agent's own pipelines: the fake driver, a real CRIU, real loaders on host memory."""

from __future__ import annotations

import json
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest
from support.agent_host import PYTHON, TOY, AgentHost, MakeHost, replica_of

from dynamo_snapshot.agent import gpus
from dynamo_snapshot.agent.cuda.driver import CudaState, Device, Inventory, Operation
from dynamo_snapshot.agent.cuda.fake import H200, SCRIPT_ENV, Script
from dynamo_snapshot.agent.teardown import left_behind
from dynamo_snapshot.model import OrderKind, OrderStatus, Outcome, Reason, ReplicaPhase, ReplicaReport, WorkerSpec
from dynamo_snapshot.snapshots.store import SnapshotStore

OTHER = msgspec.structs.replace(H200, uuid="GPU-00000000-0000-0000-0000-000000000002")
WEIGHTS_BYTES = 6 << 20
"""Of the toy, in two segments."""


def gpu_spec(gpus: int = 1, **process: object) -> WorkerSpec:
    """A pool of toys that use CUDA; ``process``: how the driver's part of them misbehaves, as a ``FakeProcess``."""
    environment = {"TOY_MEMORY_MIB": "4", "TOY_CUDA": json.dumps(process)}
    return WorkerSpec(command=(PYTHON, str(TOY)), environment=environment, gpus=gpus)


def script(
    host: AgentHost, *devices: Device, driver: str = "580.1", answers: dict[Operation, str] | None = None
) -> str:
    """Writes what the fake driver knows; returns the file."""
    inventory = Inventory(driver_version=driver, devices=devices or (H200,))
    path = host.fleet_file.with_name("driver.json")
    path.write_bytes(msgspec.json.encode(Script(inventory=inventory, answers=answers or {})))
    return str(path)


def gpu_host(make_host: MakeHost, store_dir: Path | None = None, **gpu: object) -> AgentHost:
    settings = {"replicas_per_gpu": 4, "loader_lanes": 2, "loader_buffers": 1, **gpu}
    host = make_host(gpu=settings, store_dir=store_dir)
    host.spec = gpu_spec()
    return host


def cuda_of(replica: ReplicaReport) -> dict[str, object]:
    found: dict[str, object] = json.loads(replica.evidence["cuda"])
    return found


def state_of(replica: ReplicaReport) -> object:
    return cuda_of(replica).get("state", CudaState.RUNNING)


def residents(host: AgentHost) -> list[int]:
    return gpus.residents(host.runtime_dir)


def held_by_loaders(host: AgentHost) -> list[str]:
    """Weight memory that a resident process has open."""
    links = [link for pid in residents(host) for link in Path(f"/proc/{pid}/fd").iterdir()]
    return [str(link) for link in links if "memfd:weights" in str(link.readlink())]


def phases(outcome: Outcome) -> Sequence[str]:
    return [phase.name for phase in outcome.phases]


async def restore(host: AgentHost, name: str, snapshot: str) -> Outcome:
    return await host.outcome(await host.order(OrderKind.RESTORE, name, snapshot_id=snapshot))


async def test_a_gpu_worker_is_captured_and_restored_with_its_weights_loaded_beside_it(make_host: MakeHost) -> None:
    host = gpu_host(make_host)
    host.start(**{SCRIPT_ENV: script(host)})
    snapshot = await host.captured()
    source = await host.replica("source", ReplicaPhase.REGISTERED)
    assert state_of(source) == CudaState.RUNNING
    assert source.evidence["visible"] == H200.uuid
    store = SnapshotStore(host.store_dir)
    capture = store.check_unchanged(snapshot).capture
    assert capture.cuda is not None
    assert [(device.uuid, device.needed_bytes) for device in capture.cuda.devices] == [(H200.uuid, WEIGHTS_BYTES)]
    assert sorted(path.name for path in store.segments.folder.iterdir()) == sorted(w.digest for w in capture.weights)
    for name in ("one", "two"):
        outcome = await restore(host, name, snapshot)
        assert outcome.status is OrderStatus.DONE, outcome
        clone = await host.replica(name, ReplicaPhase.REGISTERED)
        assert clone.evidence["by_loader"] == "2"
        assert state_of(clone) == CudaState.RUNNING
        assert not cuda_of(clone).get("restored_onto")
    assert held_by_loaders(host) == []
    assert await host.stop() == 0
    assert residents(host) == []


async def test_a_worker_without_cuda_costs_nothing_on_a_gpu_host(make_host: MakeHost) -> None:
    host = gpu_host(make_host)
    host.spec = WorkerSpec(command=(PYTHON, str(TOY)))
    host.start(**{SCRIPT_ENV: script(host)})
    snapshot = await host.captured()
    assert (await restore(host, "clone", snapshot)).status is OrderStatus.DONE
    capture = SnapshotStore(host.store_dir).manifest(snapshot).capture
    assert capture.cuda is None
    assert capture.weights == ()


async def test_no_helper_runs_on_a_host_without_a_gpu(make_host: MakeHost) -> None:
    host = make_host()
    host.start()
    await host.captured()
    assert residents(host) == []


async def test_a_clone_goes_onto_another_gpu_where_the_first_is_full(make_host: MakeHost) -> None:
    host = gpu_host(make_host, replicas_per_gpu=1)
    host.start(**{SCRIPT_ENV: script(host, H200, OTHER)})
    snapshot = await host.captured()
    assert (await restore(host, "clone", snapshot)).status is OrderStatus.DONE
    clone = await host.replica("clone", ReplicaPhase.REGISTERED)
    assert cuda_of(clone)["restored_onto"] == {H200.uuid: OTHER.uuid}
    assert clone.evidence["visible"] == OTHER.uuid
    full = await restore(host, "third", snapshot)
    assert full.reason == Reason.NODE_AT_CAPACITY
    assert phases(full)[-1] == "admit"
    # What is reserved survives the agent.
    await host.stop(signal.SIGKILL)
    host.start(**{SCRIPT_ENV: script(host, H200, OTHER)})
    assert (await restore(host, "fourth", snapshot)).reason == Reason.NODE_AT_CAPACITY


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"driver": "590.2"}, Reason.DRIVER_MISMATCH),
        ({"devices": (msgspec.structs.replace(H200, name="NVIDIA H100"),)}, Reason.GPU_MODEL_MISMATCH),
        ({"devices": (msgspec.structs.replace(H200, free_bytes=WEIGHTS_BYTES - 1),)}, Reason.GPU_OUT_OF_MEMORY),
        ({"devices": (msgspec.structs.replace(H200, mig=True),)}, Reason.MIG_UNSUPPORTED),
    ],
)
async def test_what_does_not_fit_is_refused_before_anything_starts(
    make_host: MakeHost, change: dict[str, Any], reason: Reason
) -> None:
    host = gpu_host(make_host)
    host.start(**{SCRIPT_ENV: script(host)})
    snapshot = await host.captured()
    await host.outcome(await host.order(OrderKind.KILL, "source"))
    await host.stop()
    devices = change.pop("devices", ())
    host.start(**{SCRIPT_ENV: script(host, *devices, **change)})
    outcome = await restore(host, "clone", snapshot)
    assert outcome.reason == reason
    assert phases(outcome)[-1] == "admit"
    assert "clone" not in host.houses()


@pytest.mark.parametrize(
    ("process", "reason"),
    [
        ({"busy_ms": 60_000}, Reason.CUDA_LOCK_TIMEOUT),
        ({"answers": {"checkpoint": "CUDA_ERROR_OUT_OF_MEMORY"}}, Reason.CUDA_CHECKPOINT_FAILED),
    ],
)
async def test_a_source_that_cannot_be_frozen_serves_on(
    make_host: MakeHost, process: dict[str, Any], reason: Reason
) -> None:
    host = gpu_host(make_host, lock_timeout_s=0.2)
    host.spec = gpu_spec(**process)
    host.start(**{SCRIPT_ENV: script(host)})
    start = await host.order(OrderKind.COLD_START, "source", capture=True)
    ready = await host.replica("source", ReplicaPhase.READY_FOR_SNAPSHOT)
    outcome = await host.outcome(await host.order(OrderKind.CAPTURE, "source"))
    assert outcome.reason == reason
    assert phases(outcome)[-1] == "freeze"
    assert (await host.outcome(start)).status is OrderStatus.DONE
    source = await host.replica("source", ReplicaPhase.REGISTERED)
    assert (source.pid, source.incarnation) == (ready.pid, ready.incarnation)
    assert state_of(source) == CudaState.RUNNING
    assert SnapshotStore(host.store_dir).list() == []


async def test_a_source_that_the_driver_does_not_give_back_is_ended_with_that_reason(make_host: MakeHost) -> None:
    host = gpu_host(make_host)
    host.spec = gpu_spec(answers={"restore": "CUDA_ERROR_OUT_OF_MEMORY"})
    host.start(**{SCRIPT_ENV: script(host)})
    await host.order(OrderKind.COLD_START, "source", capture=True)
    await host.replica("source", ReplicaPhase.READY_FOR_SNAPSHOT)
    outcome = await host.outcome(await host.order(OrderKind.CAPTURE, "source"))
    assert outcome.reason == Reason.CUDA_RESTORE_FAILED, outcome
    assert "CUDA_ERROR_OUT_OF_MEMORY" in outcome.message
    assert phases(outcome)[-1] == "thaw"
    assert SnapshotStore(host.store_dir).list() == []
    assert left_behind(host.runtime_dir) == []


async def test_a_replica_that_the_driver_does_not_restore_is_ended_and_leaves_nothing(make_host: MakeHost) -> None:
    host = gpu_host(make_host)
    host.start(**{SCRIPT_ENV: script(host)})
    snapshot = await host.captured()
    await host.outcome(await host.order(OrderKind.KILL, "source"))
    await host.stop()
    host.start(**{SCRIPT_ENV: script(host, answers={Operation.RESTORE: "CUDA_ERROR_OUT_OF_MEMORY"})})
    outcome = await restore(host, "clone", snapshot)
    assert outcome.reason == Reason.GPU_OUT_OF_MEMORY, outcome
    assert phases(outcome)[-1] == "thaw"
    assert "clone" not in host.houses()
    assert held_by_loaders(host) == []
    assert not SnapshotStore(host.store_dir).in_use(snapshot)


async def test_a_cancelled_restore_gives_its_load_up(make_host: MakeHost) -> None:
    host = gpu_host(make_host)
    host.spec = gpu_spec(takes_s=0.5)
    host.start(**{SCRIPT_ENV: script(host)})
    snapshot = await host.captured()
    order = await host.order(OrderKind.RESTORE, "clone", snapshot_id=snapshot)
    await host.replica("clone", ReplicaPhase.RESTORING)
    await host.outcome(await host.order(OrderKind.CANCEL, "clone"))
    assert (await host.outcome(order)).status is OrderStatus.CANCELLED
    assert "clone" not in host.houses()
    assert held_by_loaders(host) == []


async def test_without_a_loader_the_worker_loads_by_itself(make_host: MakeHost) -> None:
    host = gpu_host(make_host, loader=False)
    host.start(**{SCRIPT_ENV: script(host)})
    snapshot = await host.captured()
    assert (await restore(host, "clone", snapshot)).status is OrderStatus.DONE
    assert (await host.replica("clone", ReplicaPhase.REGISTERED)).evidence["by_loader"] == "0"
    assert len(residents(host)) == 1, "only the CUDA helper"


async def test_a_changed_segment_is_refused_at_admission(make_host: MakeHost) -> None:
    host = gpu_host(make_host)
    host.start(**{SCRIPT_ENV: script(host)})
    snapshot = await host.captured()
    weight = SnapshotStore(host.store_dir).manifest(snapshot).capture.weights[0]
    path = host.store_dir / ".segments" / weight.digest
    path.chmod(0o644)
    with path.open("r+b") as file:
        file.write(b"another")
    outcome = await restore(host, "clone", snapshot)
    assert outcome.reason in (Reason.SNAPSHOT_CHANGED, Reason.WEIGHTS_CORRUPT, Reason.SNAPSHOT_CORRUPT)
    assert phases(outcome)[-1] == "admit"
    reported = await host.until(lambda r: replica_of(r, "clone") is None)
    assert [replica.replica_id for replica in reported.replicas] == ["source"]


async def test_zero_pages_are_dropped_from_the_image_of_a_gpu_worker(make_host: MakeHost) -> None:
    host = gpu_host(make_host)
    host.spec = msgspec.structs.replace(host.spec, environment={**host.spec.environment, "TOY_ZEROS_MIB": "40"})
    host.start(**{SCRIPT_ENV: script(host)})
    snapshot = await host.captured()
    assert SnapshotStore(host.store_dir).manifest(snapshot).size_bytes < 40 << 20
    assert (await restore(host, "clone", snapshot)).status is OrderStatus.DONE
