"""``run --`` around a module that speaks Dynamo's protocol itself, on this year's Dynamo and on last year's."""

import json
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from support.dynamo_world import (
    VERSIONS,
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
from support.worker_house import release, state_of, wait_for, wake

from worker_hooks.guard import scan

Worker = Callable[..., subprocess.Popen[bytes]]


@pytest.fixture(params=VERSIONS)
def dynamo(request: pytest.FixtureRequest) -> str:
    version: str = request.param
    return version


@pytest.fixture
def control(tmp_path: Path) -> Path:
    return tmp_path / "control"


@pytest.fixture
def name(request: pytest.FixtureRequest) -> str:
    return f"p{abs(hash(request.node.nodeid)) % 10**9}"


@pytest.fixture
def log(tmp_path: Path) -> Path:
    return tmp_path / "worker.log"


@pytest.fixture
def start(
    dynamo: str, etcd_url: str, nats_url: str, tiny_model: Path, control: Path, name: str, log: Path
) -> Iterator[Worker]:
    started: list[subprocess.Popen[bytes]] = []

    def start(**variables: str) -> subprocess.Popen[bytes]:
        variables.setdefault("DYNAMO_SNAPSHOT_STATE_DIR", str(control))
        env = {**inherited(), **environment(etcd_url, nats_url, name), **differences(dynamo), **variables}
        command = [str(python_of(dynamo)), "-m", "worker_hooks.worker", "run", "--",
                   "python", "-m", "support.protocol_worker", str(tiny_model), name]  # fmt: skip
        with log.open("ab") as output:
            worker = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, env=env)
        started.append(worker)
        return worker

    yield start
    for worker in started:
        worker.kill()
        worker.wait()


def _registered(control: Path) -> dict[str, Any]:
    wait_for(lambda: state_of(control).get("state") in ("REGISTERED", "FAILED"), "REGISTERED")
    state = state_of(control)
    assert state["state"] == "REGISTERED", state
    return state


@pytest.mark.parametrize("order", ["card-first", "serve-first"])
def test_it_is_released_as_a_new_incarnation_and_registers_after_its_self_test(
    start: Worker, control: Path, etcd_url: str, name: str, log: Path, frontend_url: str, order: str, dynamo: str
) -> None:
    worker = start(
        SNAPSHOT_CONTROL_DIR=str(control), DYN_SNAPSHOT_CONTROL_DIR=str(control), ETCD_ENDPOINTS="http://127.0.0.1:1",
        ENGINE_ORDER=order,
    )  # fmt: skip
    wait_for((control / "ready-for-snapshot").exists, "ready-for-snapshot")
    assert instances(etcd_url, name) == {}
    released = release(control, "next", {"ETCD_ENDPOINTS": etcd_url})
    state = _registered(control)
    assert [each for each, _ in state["history"]][3:] == [
        "READY_FOR_SNAPSHOT", "RESTORED", "IDENTITY_APPLIED", "RESUMING", "SELF_TESTING", "REGISTERED",
    ]  # fmt: skip
    assert released < state["self_test_at"]
    assert "resumed=1" in log.read_text()
    assert (control / "restore-complete").exists()
    found = instances(etcd_url, name)
    assert [str(each) for each in found] == [state["evidence"]["instance_id"]]
    if dynamo == "1.6.1":  # the frontend's own version
        wait_for(lambda: name in models(frontend_url), "the model at the frontend")
        assert ask(frontend_url, name)[0] == 200
    assert wait_for(lambda: keys(etcd_url, f"v1/mdc/{name}/"), "the model card")
    worker.send_signal(signal.SIGTERM)
    assert worker.wait(20) == 0
    assert state_of(control)["state"] == "STOPPED"
    assert instances(etcd_url, name) == {}


def test_it_parks_without_a_runtime_and_is_woken(
    start: Worker, control: Path, etcd_url: str, name: str, log: Path
) -> None:
    worker = start(SNAPSHOT_CONTROL_DIR=str(control), DYN_SNAPSHOT_CONTROL_DIR=str(control))
    wait_for((control / "ready-for-snapshot").exists, "ready-for-snapshot")
    release(control, "next", {"ETCD_ENDPOINTS": etcd_url}, park=True)
    wait_for(lambda: state_of(control).get("state") == "PARKED", "PARKED")
    assert scan(worker.pid) == [], "no connection to the outside, no runtime thread"
    assert instances(etcd_url, name) == {}
    assert keys(etcd_url, f"v1/mdc/{name}/") == {}
    woken = wake(control, "next")
    state = _registered(control)
    assert [each for each, _ in state["history"]][4:] == [
        "RESTORED", "IDENTITY_APPLIED", "PARKED", "RESUMING", "SELF_TESTING", "REGISTERED",
    ]  # fmt: skip
    assert woken < state["self_test_at"]
    assert "resumed=1" in log.read_text()
    assert [str(each) for each in instances(etcd_url, name)] == [state["evidence"]["instance_id"]]


def test_a_parked_one_that_is_told_to_drain_ends_at_once(start: Worker, control: Path) -> None:
    worker = start(SNAPSHOT_CONTROL_DIR=str(control), DYN_SNAPSHOT_CONTROL_DIR=str(control))
    wait_for((control / "ready-for-snapshot").exists, "ready-for-snapshot")
    release(control, "next", {}, park=True)
    wait_for(lambda: state_of(control).get("state") == "PARKED", "PARKED")
    worker.send_signal(signal.SIGTERM)
    assert worker.wait(5) == 0
    assert state_of(control)["state"] == "STOPPED"


def test_a_cold_start_is_tested_first_too(start: Worker, control: Path, etcd_url: str, name: str) -> None:
    start()
    state = _registered(control)
    assert [each for each, _ in state["history"]] == ["BOOTING", "ENGINE_READY", "SELF_TESTING", "REGISTERED"]
    assert instances(etcd_url, name)


def test_an_engine_that_answers_wrongly_is_never_seen(start: Worker, control: Path, etcd_url: str, name: str) -> None:
    worker = start(ENGINE_FLAW="self_test")
    assert worker.wait(30) == 1
    state = state_of(control)
    assert state["reason"] == "self_test_failed"
    assert "wrong weights" in state["message"]
    assert instances(etcd_url, name) == {}
    assert keys(etcd_url, f"v1/mdc/{name}/") == {}


def test_an_outside_socket_is_named_and_the_worker_goes_on_without_a_capture(start: Worker, control: Path) -> None:
    start(ENGINE_FLAW="socket", SNAPSHOT_CONTROL_DIR=str(control), DYN_SNAPSHOT_CONTROL_DIR=str(control))
    wait_for(lambda: "capture_refused" in state_of(control).get("evidence", {}), "refusal")
    refusal = state_of(control)["evidence"]["capture_refused"]
    assert refusal.startswith("outside_socket: python")
    assert "tcp connection to 127.0.0.1:" in refusal
    assert not (control / "ready-for-snapshot").exists()


def test_a_lost_lease_ends_it_in_order(start: Worker, control: Path, etcd_url: str) -> None:
    worker = start()
    revoke(etcd_url, int(str(_registered(control)["evidence"]["instance_id"])))
    assert worker.wait(20) == 1
    assert state_of(control)["reason"] == "lease_lost"


def test_snapshot_complete_ends_the_source(start: Worker, control: Path) -> None:
    worker = start(SNAPSHOT_CONTROL_DIR=str(control), DYN_SNAPSHOT_CONTROL_DIR=str(control))
    wait_for((control / "ready-for-snapshot").exists, "ready-for-snapshot")
    (control / "snapshot-complete").touch()
    assert worker.wait(10) == 0
    assert state_of(control)["state"] == "STOPPED"


def test_files_of_an_earlier_incarnation_do_not_count(start: Worker, control: Path) -> None:
    control.mkdir()
    for stale in ("restore-complete", "snapshot-complete", "restore-context.json", "ready-for-snapshot"):
        (control / stale).write_text(json.dumps({"env": {}}))
    worker = start(SNAPSHOT_CONTROL_DIR=str(control), DYN_SNAPSHOT_CONTROL_DIR=str(control))
    wait_for(lambda: state_of(control).get("state") == "READY_FOR_SNAPSHOT", "READY_FOR_SNAPSHOT")
    time.sleep(0.3)
    assert state_of(control)["state"] == "READY_FOR_SNAPSHOT"
    assert not (control / "restore-complete").exists()
    assert worker.poll() is None


def test_missing_symbols_are_named_and_nothing_starts(dynamo: str, control: Path) -> None:
    env = {**inherited(), **differences(dynamo), "DYNAMO_SNAPSHOT_STATE_DIR": str(control)}
    command = [
        *(str(python_of(dynamo)), "-m", "worker_hooks.worker", "run"),
        *("--", "python", "-m", "dynamo.vllm", "--model", "x"),
    ]
    refused = subprocess.run(command, capture_output=True, text=True, env=env, timeout=60)
    assert refused.returncode == 2
    assert "no module named vllm" in refused.stderr
    assert "[symbols_missing]" in refused.stderr
    assert state_of(control)["reason"] == "symbols_missing"
