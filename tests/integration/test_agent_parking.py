"""Parked replicas and their wake on a real host: real houses, real CRIU, the toy worker, with and without a GPU."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from pathlib import Path

import msgspec
import pytest
from support.agent_host import AgentHost, MakeHost, replica_of, toy_spec
from test_agent_gpu import OTHER, WEIGHTS_BYTES, gpu_host, held_by_loaders, phases, script

from dynamo_snapshot.agent.cuda.fake import H200, SCRIPT_ENV
from dynamo_snapshot.agent.page_cache import cached_bytes
from dynamo_snapshot.errors import SnapshotError
from dynamo_snapshot.model import OrderKind, OrderStatus, Outcome, Reason, ReplicaPhase, ReplicaReport
from dynamo_snapshot.snapshots.store import SnapshotStore


async def park(host: AgentHost, name: str, snapshot: str) -> Outcome:
    return await host.outcome(await host.order(OrderKind.PARK, name, snapshot_id=snapshot))


async def wake(host: AgentHost, name: str) -> Outcome:
    return await host.outcome(await host.order(OrderKind.WAKE, name))


async def killed_and_found_again(host: AgentHost, name: str, **environment: str) -> ReplicaReport:
    """Kills the agent and starts another; returns what that reports of the parked replica ``name``."""
    await host.stop(signal.SIGKILL)
    began = time.time()
    host.start(**environment)
    reported = await host.until(lambda r: r.at > began and replica_of(r, name))
    found = replica_of(reported, name)
    assert found is not None
    assert found.phase is ReplicaPhase.PARKED
    return found


async def test_a_parked_worker_has_its_identity_and_has_resumed_nothing_until_it_is_woken(make_host: MakeHost) -> None:
    host = make_host()
    host.start()
    snapshot = await host.captured()
    outcome = await park(host, "spare", snapshot)
    assert outcome.status is OrderStatus.DONE, outcome
    assert phases(outcome) == ["queue", "admit", "house", "restore", "adopt", "thaw", "release", "settle"]
    parked = await host.replica("spare", ReplicaPhase.PARKED)
    control = host.runtime_dir / "replicas/spare/control"
    state = msgspec.json.decode((control / "worker-state.json").read_bytes())
    assert [name for name, _ in state["history"]][-2:] == ["IDENTITY_APPLIED", "PARKED"]
    assert state["incarnation"] == parked.incarnation
    with pytest.raises(SnapshotError) as refused:
        SnapshotStore(host.store_dir).remove(snapshot)
    assert refused.value.reason is Reason.SNAPSHOT_IN_USE
    woken = await wake(host, "spare")
    assert woken.status is OrderStatus.DONE, woken
    assert phases(woken) == ["admit", "load", "release", "resume"]
    serves = await host.replica("spare", ReplicaPhase.REGISTERED)
    assert (serves.pid, serves.incarnation, serves.rpc_port) == (parked.pid, parked.incarnation, parked.rpc_port)
    assert int(serves.evidence["port"]) == parked.rpc_port
    SnapshotStore(host.store_dir).remove(snapshot)


async def test_a_second_wake_and_a_wake_of_nobody_are_refused_and_harm_nothing(make_host: MakeHost) -> None:
    host = make_host()
    host.start()
    snapshot = await host.captured()
    await park(host, "spare", snapshot)
    orders = [await host.order(OrderKind.WAKE, "spare") for _ in range(2)]
    outcomes = [await host.outcome(order) for order in orders]
    assert [outcome.reason for outcome in outcomes] == [None, Reason.WORKER_NOT_READY]
    assert (await wake(host, "nobody")).reason == Reason.UNKNOWN_REPLICA
    assert (await host.replica("spare", ReplicaPhase.REGISTERED)).exit is None


@pytest.mark.parametrize("kind", [OrderKind.DRAIN, OrderKind.KILL])
async def test_a_parked_worker_goes_at_once(make_host: MakeHost, kind: OrderKind) -> None:
    host = make_host()
    host.start()
    snapshot = await host.captured()
    await park(host, "spare", snapshot)
    outcome = await host.outcome(await host.order(kind, "spare"))
    assert outcome.status is OrderStatus.DONE
    assert outcome.finished_at - outcome.started_at < 1
    exited = (await host.replica("spare", ReplicaPhase.EXITED)).exit
    assert exited is not None
    assert exited.code == (0 if kind is OrderKind.DRAIN else -signal.SIGKILL)
    assert not SnapshotStore(host.store_dir).in_use(snapshot)
    late = await wake(host, "spare")
    assert late.reason == Reason.WORKER_NOT_READY
    assert "exited" in late.message


async def test_a_parked_worker_that_dies_is_reported_and_cannot_be_woken(make_host: MakeHost) -> None:
    host = make_host()
    host.start()
    snapshot = await host.captured()
    await park(host, "spare", snapshot)
    parked = await host.replica("spare", ReplicaPhase.PARKED)
    assert parked.pid is not None
    os.kill(parked.pid, signal.SIGKILL)
    await host.replica("spare", ReplicaPhase.EXITED)
    assert (await wake(host, "spare")).reason == Reason.WORKER_NOT_READY


async def test_a_parked_worker_outlives_its_agent_and_is_woken_by_the_next(make_host: MakeHost) -> None:
    host = make_host()
    host.start()
    snapshot = await host.captured()
    await park(host, "spare", snapshot)
    parked = await host.replica("spare", ReplicaPhase.PARKED)
    found = await killed_and_found_again(host, "spare")
    assert (found.pid, found.incarnation) == (parked.pid, parked.incarnation)
    assert SnapshotStore(host.store_dir).in_use(snapshot), "its next agent keeps its snapshot for it as well"
    assert (await wake(host, "spare")).status is OrderStatus.DONE
    assert (await host.replica("spare", ReplicaPhase.REGISTERED)).pid == parked.pid


@pytest.mark.parametrize("kind", [OrderKind.CANCEL, OrderKind.DRAIN, OrderKind.KILL])
async def test_a_replica_can_be_ended_at_any_moment_of_its_wake(make_host: MakeHost, kind: OrderKind) -> None:
    host = make_host()
    host.start()
    snapshot = await host.captured()
    for number, delay in enumerate([0.0, 0.001, 0.003, 0.006, 0.01, 0.02, 0.04]):
        name = f"spare-{number}"
        await park(host, name, snapshot)
        woken = await host.order(OrderKind.WAKE, name)
        await asyncio.sleep(delay)
        stopped = await host.order(kind, name)
        outcomes = [await host.outcome(order) for order in (woken, stopped)]
        left = replica_of(await host.until(lambda r: r), name)
        if kind is OrderKind.CANCEL and outcomes[1].status is OrderStatus.FAILED:  # it had registered by then
            assert [outcome.reason for outcome in outcomes] == [None, Reason.CANCELLED]
            assert left is not None
            assert left.phase is ReplicaPhase.REGISTERED
            await host.outcome(await host.order(OrderKind.KILL, name))
        else:
            assert outcomes[1].status is OrderStatus.DONE
            assert left is None or left.exit is not None, outcomes
    await host.until(lambda r: [one.replica_id for one in r.replicas if one.exit is None] == ["source"])


async def test_a_worker_that_does_not_know_how_to_park_is_ended(make_host: MakeHost) -> None:
    host = make_host()
    host.spec = toy_spec(flaw="never_park")
    host.start()
    snapshot = await host.captured()
    outcome = await park(host, "spare", snapshot)
    assert outcome.reason == Reason.WORKER_NOT_READY
    assert "did not stop when it was told to park" in outcome.message
    assert host.houses() == ["source"]


async def test_a_wake_that_passes_its_deadline_ends_the_worker(make_host: MakeHost) -> None:
    host = make_host()
    host.spec = toy_spec(flaw="never_register")
    host.start()
    await host.order(OrderKind.COLD_START, "source", capture=True)
    await host.replica("source", ReplicaPhase.READY_FOR_SNAPSHOT)
    captured = await host.outcome(await host.order(OrderKind.CAPTURE, "source"))
    assert captured.snapshot_id is not None
    await park(host, "spare", captured.snapshot_id)
    outcome = await host.outcome(await host.order(OrderKind.WAKE, "spare", within_s=0.5))
    assert outcome.reason == Reason.DEADLINE_EXCEEDED
    assert phases(outcome)[-1] == "resume"
    assert host.houses() == ["source"]


async def test_a_wake_loads_the_weights_that_parking_left_out(make_host: MakeHost) -> None:
    host = gpu_host(make_host)
    host.start(**{SCRIPT_ENV: script(host)})
    snapshot = await host.captured()
    assert (await park(host, "spare", snapshot)).status is OrderStatus.DONE
    assert held_by_loaders(host) == []
    await killed_and_found_again(host, "spare", **{SCRIPT_ENV: script(host)})
    woken = await wake(host, "spare")
    assert woken.status is OrderStatus.DONE, woken
    assert (await host.replica("spare", ReplicaPhase.REGISTERED)).evidence["by_loader"] == "2"
    assert held_by_loaders(host) == []


async def test_parked_replicas_take_no_serving_place_and_wake_when_one_is_free(make_host: MakeHost) -> None:
    host = gpu_host(make_host, replicas_per_gpu=1)
    host.start(**{SCRIPT_ENV: script(host)})
    snapshot = await host.captured()
    for name in ("first", "second"):
        assert (await park(host, name, snapshot)).status is OrderStatus.DONE
    refused = await wake(host, "first")
    assert refused.reason == Reason.NODE_AT_CAPACITY, "the source serves there"
    assert phases(refused) == ["admit"]
    await host.replica("first", ReplicaPhase.PARKED)
    await host.outcome(await host.order(OrderKind.DRAIN, "source"))
    assert (await wake(host, "first")).status is OrderStatus.DONE
    assert (await wake(host, "second")).reason == Reason.NODE_AT_CAPACITY


async def test_a_wake_without_memory_for_the_weights_leaves_the_replica_parked(make_host: MakeHost) -> None:
    host = gpu_host(make_host)
    host.start(**{SCRIPT_ENV: script(host)})
    snapshot = await host.captured()
    await host.outcome(await host.order(OrderKind.KILL, "source"))
    await host.stop()
    host.start(**{SCRIPT_ENV: script(host, msgspec.structs.replace(H200, free_bytes=WEIGHTS_BYTES - 1))})
    assert (await park(host, "spare", snapshot)).status is OrderStatus.DONE, "parked it needs no weights"
    assert (await wake(host, "spare")).reason == Reason.GPU_OUT_OF_MEMORY
    await host.replica("spare", ReplicaPhase.PARKED)


async def test_parked_replicas_are_spread_over_the_gpus(make_host: MakeHost) -> None:
    host = gpu_host(make_host)
    host.start(**{SCRIPT_ENV: script(host, H200, OTHER)})
    snapshot = await host.captured()
    await host.outcome(await host.order(OrderKind.KILL, "source"))
    seen = set()
    for name in ("first", "second"):
        await park(host, name, snapshot)
        assert (await wake(host, name)).status is OrderStatus.DONE
        seen.add((await host.replica(name, ReplicaPhase.REGISTERED)).evidence["visible"])
    assert seen == {H200.uuid, OTHER.uuid}


def forget_cached(files: list[Path]) -> None:
    for file in files:
        descriptor = os.open(file, os.O_RDONLY)
        os.fsync(descriptor)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)


async def test_a_prefetch_brings_images_and_weights_into_memory(make_host: MakeHost) -> None:
    host = gpu_host(make_host)
    host.start(**{SCRIPT_ENV: script(host)})
    snapshot = await host.captured()
    store = SnapshotStore(host.store_dir)
    manifest = store.manifest(snapshot)
    files = [store.images(snapshot) / entry.path for entry in manifest.files if entry.size]
    files += [store.segments.folder / segment.digest for segment in manifest.capture.weights]
    forget_cached(files)
    assert sum(cached_bytes(file) for file in files) < manifest.size_bytes // 4
    outcome = await host.outcome(await host.order(OrderKind.PREFETCH, "prefetch-1", snapshot_id=snapshot))
    assert outcome.status is OrderStatus.DONE, outcome
    assert all(cached_bytes(file) >= file.stat().st_size for file in files)
    assert not store.in_use(snapshot)
    missing = await host.outcome(await host.order(OrderKind.PREFETCH, "prefetch-2", snapshot_id="no-such"))
    assert missing.reason == Reason.SNAPSHOT_MISSING


async def test_a_wake_is_faster_than_a_restore(make_host: MakeHost) -> None:
    host = make_host()
    host.spec = toy_spec(memory_mib=300)
    host.start()
    snapshot = await host.captured()
    restored = await host.outcome(await host.order(OrderKind.RESTORE, "clone", snapshot_id=snapshot))
    await park(host, "spare", snapshot)
    woken = await wake(host, "spare")
    for outcome in (restored, woken):
        assert outcome.status is OrderStatus.DONE, outcome
    assert woken.finished_at - woken.started_at < restored.finished_at - restored.started_at
