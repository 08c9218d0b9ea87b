"""Dynamo's mocker under the hooks, with real etcd, NATS, frontend and CRIU."""

import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from support.dynamo_world import (
    VERSIONS,
    Load,
    ask,
    differences,
    environment,
    inherited,
    instances,
    keys,
    models,
    python_of,
    revoke,
)
from support.worker_house import Street, release, state_of, wait_for, write_control

from worker_hooks.guard import scan

Worker = Callable[..., subprocess.Popen[bytes]]
both_releases = pytest.mark.parametrize("dynamo", VERSIONS)


def _command(model: Path, name: str, *more: str, dynamo: str = VERSIONS[0]) -> list[str]:
    return [str(python_of(dynamo)), "-m", "worker_hooks.worker", "run", "--",
            "python", "-m", "dynamo.mocker", "--model-path", str(model), "--model-name", name, *more]  # fmt: skip


@pytest.fixture
def control(tmp_path: Path) -> Path:
    return tmp_path / "control"


@pytest.fixture
def name(request: pytest.FixtureRequest) -> str:
    """A model and namespace of the test's own."""
    return f"m{abs(hash(request.node.nodeid)) % 10**9}"


@pytest.fixture
def dynamo() -> str:
    """Tests that also run with another release of Dynamo parametrize this."""
    return VERSIONS[0]


@pytest.fixture
def start(
    dynamo: str, etcd_url: str, nats_url: str, tiny_model: Path, control: Path, name: str, tmp_path: Path
) -> Iterator[Worker]:
    started: list[subprocess.Popen[bytes]] = []

    def start(*arguments: str, **variables: str) -> subprocess.Popen[bytes]:
        variables.setdefault("DYNAMO_SNAPSHOT_STATE_DIR", str(control))
        env = {**inherited(), **environment(etcd_url, nats_url, name), **differences(dynamo), **variables}
        with (tmp_path / "worker.log").open("ab") as log:
            worker = subprocess.Popen(
                _command(tiny_model, name, *arguments, dynamo=dynamo),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=env,
            )
        started.append(worker)
        return worker

    yield start
    for worker in started:
        worker.kill()
        worker.wait()


def _in_state(control: Path, *states: str, timeout: float = 30) -> dict[str, Any]:
    found = wait_for(lambda: state_of(control).get("state") in (*states, "FAILED"), f"state {states}", timeout)
    assert found
    state = state_of(control)
    assert state["state"] in states, state
    return state


@pytest.fixture
def street(tmp_path: Path) -> Iterator[Street]:
    street = Street(tmp_path)
    yield street
    street.close()


def test_clones_are_new_and_serve_and_the_source_lives_on(
    street: Street,
    criu: Path,
    etcd_url: str,
    nats_url: str,
    frontend_url: str,
    tiny_model: Path,
    name: str,
    tmp_path: Path,
) -> None:
    source = street.house("source")
    variables = environment(
        "http://127.0.0.1:1", "nats://127.0.0.1:1", "elsewhere", MOCKER_RESIDENT_MIB="40", MOCKER_BOOT_SECONDS="0.2",
        DYNAMO_SNAPSHOT_STATE_DIR=str(street.control), SNAPSHOT_CONTROL_DIR=str(street.control),
        DYN_SNAPSHOT_CONTROL_DIR=str(street.control),
    )  # fmt: skip
    source.start(_command(tiny_model, name), variables)
    wait_for((source.control / "ready-for-snapshot").exists, "ready-for-snapshot")
    assert state_of(source.control)["state"] == "READY_FOR_SNAPSHOT"
    assert source.worker is not None
    assert scan(source.worker) == []
    source.dump(criu, tmp_path / "images")
    clones = [street.house("first"), street.house("second")]
    for clone in clones:
        clone.restore(criu, tmp_path / "images")
    assert instances(etcd_url, name) == {}
    assert keys(etcd_url, "v1/mdc/" + name) == {}

    houses = [*clones, source]
    context = {"ETCD_ENDPOINTS": etcd_url, "NATS_SERVER": nats_url, "DYN_NAMESPACE": name}
    released = [release(house.control, f"life-{index}", context) for index, house in enumerate(houses)]
    states = [_in_state(house.control, "REGISTERED") for house in houses]

    for index, (house, state) in enumerate(zip(houses, states, strict=True)):
        assert state["incarnation"] == f"life-{index}"
        assert [each for each, _ in state["history"]] == [
            "BOOTING", "ENGINE_READY", "QUIESCING", "READY_FOR_SNAPSHOT",
            "RESTORED", "IDENTITY_APPLIED", "RESUMING", "SELF_TESTING", "REGISTERED",
        ]  # fmt: skip
        assert state["self_test_at"] > released[index]
        assert (house.control / "restore-complete").exists(), "the kubelet reads it too"
        assert not (house.control / "ready-for-snapshot").exists()
    for evidence in ("first_random", "instance_id"):
        assert len({state["evidence"][evidence] for state in states}) == 3
    assert len({state["evidence"]["resident_digest"] for state in states}) == 1
    found = instances(etcd_url, name)
    assert {str(each) for each in found} == {state["evidence"]["instance_id"] for state in states}

    wait_for(lambda: name in models(frontend_url), "the model at the frontend")
    answered: dict[int, int] = {}
    for _ in range(30):
        status, body = ask(frontend_url, name)
        assert status == 200
        worker = body["nvext"]["worker_id"]["decode_worker_id"]
        answered[worker] = answered.get(worker, 0) + 1
    assert set(answered) == set(found)


def test_a_cold_start_registers_after_its_self_test_and_drains_without_loss(
    start: Worker, control: Path, etcd_url: str, frontend_url: str, name: str
) -> None:
    steady = start(DYNAMO_SNAPSHOT_STATE_DIR=str(control.with_name("steady")), MOCKER_RESIDENT_MIB="8")
    _in_state(control.with_name("steady"), "REGISTERED")
    leaving = start(MOCKER_RESIDENT_MIB="8", MOCKER_BOOT_SECONDS="1")
    _in_state(control, "BOOTING")
    time.sleep(0.5)
    assert len(instances(etcd_url, name)) == 1
    state = _in_state(control, "REGISTERED")
    assert [each for each, _ in state["history"]] == ["BOOTING", "ENGINE_READY", "SELF_TESTING", "REGISTERED"]
    wait_for(lambda: name in models(frontend_url), "the model at the frontend")
    load = Load(frontend_url, name, concurrency=8, max_tokens=64)
    time.sleep(1.5)
    leaving.send_signal(signal.SIGTERM)
    _in_state(control, "DRAINING", "STOPPED")
    wait_for(lambda: len(instances(etcd_url, name)) == 1, "out of discovery", 1)
    assert leaving.wait(20) == 0
    assert state_of(control)["state"] == "STOPPED"
    time.sleep(0.5)
    load.stop()
    assert len(load.statuses) > 20
    assert set(load.statuses) == {200}
    steady.send_signal(signal.SIGTERM)
    assert steady.wait(20) == 0
    assert instances(etcd_url, name) == {}


def test_requests_in_flight_are_bounded_in_time_at_a_drain(
    start: Worker, control: Path, frontend_url: str, name: str
) -> None:
    worker = start("--speedup-ratio", "0.05", DYNAMO_SNAPSHOT_DRAIN_TIMEOUT_S="1")
    _in_state(control, "REGISTERED")
    wait_for(lambda: name in models(frontend_url), "the model at the frontend")
    load = Load(frontend_url, name, concurrency=1, max_tokens=2000)
    time.sleep(0.7)
    asked_at = time.monotonic()
    worker.send_signal(signal.SIGTERM)
    assert worker.wait(20) == 1
    assert time.monotonic() - asked_at < 5
    assert state_of(control)["reason"] == "drain_timed_out"
    load._stopped = True


@both_releases
def test_a_worker_stopped_beyond_its_lease_leaves_in_order(
    start: Worker, control: Path, etcd_url: str, name: str
) -> None:
    worker = start(ETCD_LEASE_TTL="3")
    _in_state(control, "REGISTERED")
    os.kill(worker.pid, signal.SIGSTOP)
    wait_for(lambda: not instances(etcd_url, name), "the lease's end", 15)
    os.kill(worker.pid, signal.SIGCONT)
    assert worker.wait(10) == 1
    state = state_of(control)
    assert (state["state"], state["reason"]) == ("FAILED", "lease_lost")
    assert instances(etcd_url, name) == {}


@both_releases
def test_a_revoked_lease_ends_the_worker(start: Worker, control: Path, etcd_url: str, name: str) -> None:
    worker = start()
    instance = int(_in_state(control, "REGISTERED")["evidence"]["instance_id"])
    revoke(etcd_url, instance)
    assert worker.wait(10) == 1
    assert state_of(control)["reason"] == "lease_lost"


def test_etcd_that_does_not_answer_is_named(start: Worker, control: Path) -> None:
    worker = start(ETCD_ENDPOINTS="http://127.0.0.1:9", ETCD_STARTUP_CONNECT_TIMEOUT_SECONDS="1")
    assert worker.wait(30) == 1
    state = state_of(control)
    assert state["reason"] == "server_unreachable"
    assert "127.0.0.1:9" in state["message"]


@both_releases
def test_the_control_run_registers_before_boot_and_self_test(
    start: Worker, control: Path, etcd_url: str, name: str
) -> None:
    start(DYNAMO_SNAPSHOT_GATE="off", MOCKER_BOOT_SECONDS="1.5", MOCKER_RESIDENT_MIB="8")
    wait_for(lambda: instances(etcd_url, name), "early registration")
    seen_at = time.time()
    assert state_of(control)["state"] == "BOOTING"
    state = _in_state(control, "REGISTERED")
    assert state["self_test_at"] - seen_at > 0.8
    assert state["evidence"]["gate"] == "off"


def test_several_mockers_in_one_process_come_and_go_together(
    start: Worker, control: Path, etcd_url: str, name: str
) -> None:
    worker = start("--num-workers", "2")
    _in_state(control, "REGISTERED")
    assert len(instances(etcd_url, name)) == 2
    worker.send_signal(signal.SIGTERM)
    assert worker.wait(20) == 0
    assert instances(etcd_url, name) == {}


@both_releases
def test_sigterm_before_registration_stops_at_once(start: Worker, control: Path, etcd_url: str, name: str) -> None:
    worker = start(MOCKER_BOOT_SECONDS="30")
    _in_state(control, "BOOTING")
    time.sleep(2)
    worker.send_signal(signal.SIGTERM)
    assert worker.wait(5) == 0
    assert state_of(control)["state"] == "STOPPED"
    assert instances(etcd_url, name) == {}


@both_releases
def test_damaged_memory_never_reaches_discovery(start: Worker, control: Path, etcd_url: str, name: str) -> None:
    worker = start(MOCKER_RESIDENT_MIB="160", SNAPSHOT_CONTROL_DIR=str(control))
    wait_for((control / "ready-for-snapshot").exists, "ready-for-snapshot")
    _damage(worker.pid)
    release(control, "damaged", {})
    assert worker.wait(10) == 1
    assert state_of(control)["reason"] == "self_test_failed"
    assert instances(etcd_url, name) == {}


def _damage(pid: int) -> None:
    """Flips one byte in the middle of the largest mapping: the resident memory, whatever it was merged with."""
    mappings = [
        tuple(int(each, 16) for each in line.split()[0].split("-"))
        for line in Path(f"/proc/{pid}/maps").read_text().splitlines()
        if " rw-p " in line and len(line.split()) == 5
    ]
    low, high = max(mappings, key=lambda each: each[1] - each[0])
    with open(f"/proc/{pid}/mem", "r+b", buffering=0) as memory:
        memory.seek((low + high) // 2)
        byte = memory.read(1)[0]
        memory.seek((low + high) // 2)
        memory.write(bytes([byte ^ 1]))


@pytest.mark.parametrize(
    ("context", "reason"),
    [
        (None, "restore_context_missing"),
        ("[]", "restore_context_corrupt"),
        ('{"env": {', "restore_context_corrupt"),
        ('{"env": {"A": 1}}', "restore_context_corrupt"),
        ('{"env": {}, "incarnation": "another"}', "incarnation_mismatch"),
    ],
)
def test_a_bad_restore_context_fails_with_its_reason(
    start: Worker, control: Path, etcd_url: str, name: str, context: str | None, reason: str
) -> None:
    worker = start(SNAPSHOT_CONTROL_DIR=str(control))
    wait_for((control / "ready-for-snapshot").exists, "ready-for-snapshot")
    if context is not None:
        write_control(control, "restore-context.json", context)
    write_control(control, "restore-complete", "incarnation=one\n")
    assert worker.wait(10) == 1
    assert state_of(control)["reason"] == reason
    assert instances(etcd_url, name) == {}
