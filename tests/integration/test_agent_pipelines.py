"""The agent on a real host: real houses, real CRIU, a toy worker."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from pathlib import Path

import pytest
from support.agent_host import POOL, AgentHost, MakeHost, criu_that, replica_of, toy_spec

from dynamo_snapshot.agent.process import inner_pid, wait_pid
from dynamo_snapshot.agent.teardown import left_behind
from dynamo_snapshot.errors import SnapshotError
from dynamo_snapshot.model import OrderKind, OrderStatus, Reason, ReplicaPhase
from dynamo_snapshot.snapshots.store import SnapshotStore


async def test_capture_leaves_the_source_serving_and_two_restores_run_at_once(make_host: MakeHost) -> None:
    host = make_host()
    host.start()
    snapshot = await host.captured()
    source = await host.replica("source", ReplicaPhase.REGISTERED)
    orders = [await host.order(OrderKind.RESTORE, name, snapshot_id=snapshot) for name in ("one", "two")]
    outcomes = [await host.outcome(order) for order in orders]
    for outcome in outcomes:
        assert outcome.status is OrderStatus.DONE, outcome
        assert [phase.name for phase in outcome.phases] == [
            "queue", "admit", "load", "house", "restore", "adopt", "thaw", "release", "resume",
        ]  # fmt: skip
        assert outcome.idle_cpu is None or 0 <= outcome.idle_cpu <= 1
    assert min(outcome.unaccounted_s for outcome in outcomes) < 0.05
    reported = await host.until(lambda r: len(r.replicas) == 3)
    replicas = [replica_of(reported, name) for name in ("source", "one", "two")]
    assert all(replica and replica.phase is ReplicaPhase.REGISTERED for replica in replicas)
    for distinct in ("incarnation", "rpc_port", "pid"):
        assert len({getattr(replica, distinct) for replica in replicas}) == 3
    evidence = [replica.evidence for replica in replicas if replica]
    assert len({one["first_random"] for one in evidence}) == 3
    assert len({one["resident_digest"] for one in evidence}) == 1
    assert [int(one["port"]) for one in evidence] == [replica.rpc_port for replica in replicas if replica]
    assert (host.runtime_dir / "replicas/one/logs/worker.log").read_text().splitlines() == ["registered"]
    assert replicas[0] is not None
    assert replicas[0].pid == source.pid


async def test_clones_and_their_source_do_not_share_the_driver_s_socket(make_host: MakeHost) -> None:
    host = make_host()
    host.spec = toy_spec(flaw="driver_socket")
    host.start()
    snapshot = await host.captured()
    orders = [await host.order(OrderKind.RESTORE, name, snapshot_id=snapshot) for name in ("one", "two")]
    for order in orders:
        outcome = await host.outcome(order)
        assert outcome.status is OrderStatus.DONE, outcome
    reported = await host.until(lambda r: len(r.replicas) == 3)
    bound = await asyncio.to_thread(Path("/proc/net/unix").read_text)
    for replica in reported.replicas:
        assert replica.pid is not None
        namespace, inner = os.stat(f"/proc/{replica.pid}/ns/pid").st_ino, inner_pid(replica.pid)
        assert f"@cuda-uvmfd-{namespace}-{inner}@" in bound


@pytest.mark.parametrize("way", ["cold", "restored"])
async def test_an_exit_is_reported_at_once_with_its_status(make_host: MakeHost, way: str) -> None:
    host = make_host()
    host.start()
    victims = ("one", "two", "three")
    if way == "cold":
        orders = [await host.order(OrderKind.COLD_START, name) for name in (*victims, "other")]
    else:
        snapshot = await host.captured()
        orders = [await host.order(OrderKind.RESTORE, name, snapshot_id=snapshot) for name in (*victims, "other")]
    for order in orders:
        assert (await host.outcome(order)).status is OrderStatus.DONE
    stamped, reported = zip(*[await _killed(host, name) for name in victims], strict=True)
    # By the best of three: nobody looks every so often, but a busy machine may keep one of them waiting.
    assert 0 <= min(stamped) < 0.05
    assert 0 <= min(reported) < 0.05
    drained = await host.outcome(await host.order(OrderKind.DRAIN, "other"))
    assert drained.status is OrderStatus.DONE
    gone = await host.replica("other", ReplicaPhase.EXITED)
    assert gone.exit is not None
    assert gone.exit.code == 0


async def _killed(host: AgentHost, replica_id: str) -> tuple[float, float]:
    """Seconds from the SIGKILL of a replica's worker to its holder's stamp, and to the agent's own."""
    victim = await host.replica(replica_id, ReplicaPhase.REGISTERED)
    assert victim.pid is not None
    waiting = asyncio.create_task(host.replica(replica_id, ReplicaPhase.EXITED))
    await asyncio.sleep(0)
    killed_at = time.time()
    os.kill(victim.pid, signal.SIGKILL)
    exited = await waiting
    assert exited.exit is not None
    assert exited.exit.code == -signal.SIGKILL
    return exited.exit.at - killed_at, exited.since - killed_at


async def test_restores_at_once_are_capped(make_host: MakeHost, tmp_path: Path, criu: Path) -> None:
    host = make_host(max_concurrent_restores=1, criu=criu_that(tmp_path, criu, "restore", "sleep 0.2"))
    host.start()
    snapshot = await host.captured()
    orders = [await host.order(OrderKind.RESTORE, name, snapshot_id=snapshot) for name in ("one", "two")]
    waited = []
    for order in orders:
        outcome = await host.outcome(order)
        assert outcome.status is OrderStatus.DONE, outcome
        waited.append(next(phase.seconds for phase in outcome.phases if phase.name == "queue"))
    assert min(waited) < 0.1
    assert max(waited) > 0.2


async def test_a_worker_without_a_capture_order_goes_on_by_itself(make_host: MakeHost) -> None:
    host = make_host(release_after_s=0.2)
    host.start()
    outcome = await host.outcome(await host.order(OrderKind.COLD_START, "lonely", capture=True))
    assert outcome.status is OrderStatus.DONE
    assert next(phase.seconds for phase in outcome.phases if phase.name == "hold") >= 0.2


async def test_a_worker_that_dies_while_it_boots_fails_its_order_with_its_last_words(make_host: MakeHost) -> None:
    host = make_host()
    host.spec = toy_spec(flaw="die_at_boot")
    host.start()
    outcome = await host.outcome(await host.order(OrderKind.COLD_START, "stillborn"))
    assert outcome.status is OrderStatus.FAILED
    assert outcome.reason == Reason.WORKER_EXITED
    assert "status 3" in outcome.message
    assert "no weights" in outcome.message
    kept = host.runtime_dir / "logs" / f"failed-{POOL}.log"
    assert outcome.message.endswith(f"; its log is kept: {kept}")
    assert "the engine found no weights" in kept.read_text()
    assert left_behind(host.runtime_dir) == []


async def test_the_log_of_a_worker_that_never_registers_outlives_its_house(make_host: MakeHost) -> None:
    host = make_host()
    host.spec = toy_spec(flaw="never_register", boot_timeout_s=1)
    host.start()
    kept = host.runtime_dir / "logs" / f"failed-{POOL}.log"
    cancelled = await host.order(OrderKind.COLD_START, "unwanted")
    await host.replica("unwanted", ReplicaPhase.RESUMING)
    await host.outcome(await host.order(OrderKind.CANCEL, "unwanted"))
    assert (await host.outcome(cancelled)).status is OrderStatus.CANCELLED
    assert not kept.exists(), "it did not fail"
    outcome = await host.outcome(await host.order(OrderKind.COLD_START, "mute"))
    assert outcome.reason == Reason.PHASE_TIMED_OUT
    assert f"; its log is kept: {kept}. Raise" in outcome.message
    assert kept.read_text() == "boot\n"


async def test_a_worker_that_crashes_while_it_serves_leaves_its_log(make_host: MakeHost) -> None:
    host = make_host()
    host.start()
    await host.outcome(await host.order(OrderKind.COLD_START, "victim"))
    victim = await host.replica("victim", ReplicaPhase.REGISTERED)
    assert victim.pid is not None
    os.kill(victim.pid, signal.SIGKILL)
    exited = (await host.replica("victim", ReplicaPhase.EXITED)).exit
    assert exited is not None
    kept = host.runtime_dir / "logs" / f"failed-{POOL}.log"
    assert exited.message == f"ended by signal 9; its log is kept: {kept}"
    assert "registered" in kept.read_text()


async def test_a_worker_that_crashes_while_no_agent_runs_leaves_its_log_to_the_next(make_host: MakeHost) -> None:
    host = make_host()
    host.start()
    await host.outcome(await host.order(OrderKind.COLD_START, "victim"))
    victim = await host.replica("victim", ReplicaPhase.REGISTERED)
    assert victim.pid is not None
    await host.stop(signal.SIGKILL)
    os.kill(victim.pid, signal.SIGKILL)
    await wait_pid(victim.pid)
    host.start()
    exited = (await host.replica("victim", ReplicaPhase.EXITED)).exit
    assert exited is not None
    kept = host.runtime_dir / "logs" / f"failed-{POOL}.log"
    assert exited.message == f"ended by signal 9; its log is kept: {kept}"
    assert "registered" in kept.read_text()


async def test_an_order_below_the_fence_is_not_carried_out(make_host: MakeHost) -> None:
    host = make_host()
    host.fence = 7
    host.start()
    await host.publish()
    await host.until(lambda r: r.fence == 7)
    host.fence = 6
    stale = await host.order(OrderKind.COLD_START, "usurper")
    await host.withdraw(stale)
    host.fence = 7
    done = await host.outcome(await host.order(OrderKind.COLD_START, "rightful"))
    assert done.status is OrderStatus.DONE
    reported = await host.until(lambda r: r.replicas)
    assert [replica.replica_id for replica in reported.replicas] == ["rightful"]
    assert all(outcome.order_id != stale for outcome in reported.outcomes)


async def test_cancel_ends_a_start_and_leaves_nothing(make_host: MakeHost) -> None:
    host = make_host()
    host.spec = toy_spec(flaw="never_register")
    host.start()
    start = await host.order(OrderKind.COLD_START, "unwanted")
    await host.replica("unwanted", ReplicaPhase.RESUMING)
    cancel = await host.outcome(await host.order(OrderKind.CANCEL, "unwanted"))
    assert cancel.status is OrderStatus.DONE
    assert (await host.outcome(start)).status is OrderStatus.CANCELLED
    assert left_behind(host.runtime_dir) == []


async def test_a_deadline_that_passes_kills_what_was_begun(make_host: MakeHost) -> None:
    host = make_host()
    host.spec = toy_spec(flaw="never_register")
    host.start()
    outcome = await host.outcome(await host.order(OrderKind.COLD_START, "late", within_s=1.5))
    assert outcome.reason == Reason.DEADLINE_EXCEEDED
    assert left_behind(host.runtime_dir) == []


async def test_a_snapshot_stays_until_the_worker_restored_from_it_has_registered(make_host: MakeHost) -> None:
    host = make_host()
    host.spec = toy_spec(flaw="never_register")
    host.start()
    await host.order(OrderKind.COLD_START, "source", capture=True)
    await host.replica("source", ReplicaPhase.READY_FOR_SNAPSHOT)
    captured = await host.outcome(await host.order(OrderKind.CAPTURE, "source"))
    assert captured.snapshot_id is not None, captured
    restoring = await host.order(OrderKind.RESTORE, "clone", snapshot_id=captured.snapshot_id)
    await host.replica("clone", ReplicaPhase.RESUMING)
    store = SnapshotStore(host.store_dir)
    with pytest.raises(SnapshotError) as refused:
        store.remove(captured.snapshot_id)
    assert refused.value.reason is Reason.SNAPSHOT_IN_USE
    await host.outcome(await host.order(OrderKind.KILL, "clone"))
    assert (await host.outcome(restoring)).status is not OrderStatus.DONE
    store.remove(captured.snapshot_id)
