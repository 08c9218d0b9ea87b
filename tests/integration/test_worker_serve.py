"""``worker_hooks.serve`` with the example worker and with an engine that uses every slot."""

import signal
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from support.dynamo_world import (
    REPOSITORY,
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
from support.worker_house import Street, release, state_of, wait_for

Worker = Callable[..., subprocess.Popen[bytes]]

EVERY_SLOT = """
import os, random, sys, socket
import numpy
import worker_hooks
from multiprocessing import get_context
from worker_hooks.identity import ChildLink, follow

def child(end):
    random.seed(1)
    thread = follow(end, lambda context: print("child", os.environ.get("WHO"), random.random(), flush=True))
    thread.join()

class Engine:
    def __init__(self):
        self.link = ChildLink("child")
        get_context("fork").Process(target=child, args=(self.link.child_end,), daemon=True).start()
        self.steps = []
        host, port = os.environ["OPEN"].split(":")
        self.connection = socket.create_connection((host, int(port)))

    def quiesce(self):
        self.connection.close()
        self.steps.append("quiesce")

    async def resume(self):
        self.steps.append("resume")

    async def self_test(self):
        assert self.steps == ["quiesce", "resume"], self.steps
        if os.environ.get("FLAW"):
            raise ValueError("logits are " + os.environ["FLAW"])
        print("numbers", random.random(), numpy.random.random(), flush=True)

    async def generate(self, request, context):
        yield {"token_ids": [1001], "finish_reason": "length"}

random.seed(1)
numpy.random.seed(1)
worker_hooks.serve(Engine, model_path=sys.argv[1], model_name=sys.argv[2])
"""


@pytest.fixture
def name(request: pytest.FixtureRequest) -> str:
    return f"s{abs(hash(request.node.nodeid)) % 10**9}"


@pytest.fixture
def control(tmp_path: Path) -> Path:
    return tmp_path / "control"


@pytest.fixture(params=VERSIONS)
def dynamo(request: pytest.FixtureRequest) -> str:
    version: str = request.param
    return version


@pytest.fixture
def start(dynamo: str, etcd_url: str, nats_url: str, control: Path, name: str, tmp_path: Path) -> Iterator[Worker]:
    started: list[subprocess.Popen[bytes]] = []

    def start(*command: str, **variables: str) -> subprocess.Popen[bytes]:
        variables.setdefault("DYNAMO_SNAPSHOT_STATE_DIR", str(control))
        env = {**inherited(), **environment(etcd_url, nats_url, name), **differences(dynamo), **variables}
        with (tmp_path / "worker.log").open("ab") as log:
            worker = subprocess.Popen(
                [str(python_of(dynamo)), *command], stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=env
            )
        started.append(worker)
        return worker

    yield start
    for worker in started:
        worker.terminate()  # in order: a killed worker's children would live on
    for worker in started:
        try:
            worker.wait(20)
        except subprocess.TimeoutExpired:
            worker.kill()
            worker.wait()


def _state(control: Path, wanted: str) -> dict[str, object]:
    wait_for(lambda: state_of(control).get("state") in (wanted, "FAILED"), wanted)
    state = state_of(control)
    assert state["state"] == wanted, state
    return state


def test_the_example_serves_and_drains(
    start: Worker, control: Path, tiny_model: Path, name: str, etcd_url: str, frontend_url: str, dynamo: str
) -> None:
    source = (REPOSITORY / "examples" / "echo_worker.py").read_text()
    body = source.split('"""', 2)[2]
    assert len([line for line in body.splitlines() if line.strip()]) < 15
    worker = start(str(REPOSITORY / "examples" / "echo_worker.py"), str(tiny_model))
    _state(control, "REGISTERED")
    if dynamo == VERSIONS[0]:
        wait_for(lambda: "echo" in models(frontend_url), "the model at the frontend")
        status, answer = ask(frontend_url, "echo")
        assert status == 200
        assert answer["choices"][0]["message"]["content"]
    worker.send_signal(signal.SIGTERM)
    assert worker.wait(20) == 0
    assert state_of(control)["state"] == "STOPPED"
    assert instances(etcd_url, name) == {}


def test_a_revoked_lease_ends_it_in_order(start: Worker, control: Path, tiny_model: Path, etcd_url: str) -> None:
    worker = start(str(REPOSITORY / "examples" / "echo_worker.py"), str(tiny_model))
    evidence = _state(control, "REGISTERED")["evidence"]
    assert isinstance(evidence, dict)
    revoke(etcd_url, int(evidence["instance_id"]))
    assert worker.wait(20) == 1
    assert state_of(control)["reason"] == "lease_lost"


def test_a_failed_self_test_is_never_seen(
    start: Worker, control: Path, tiny_model: Path, name: str, etcd_url: str
) -> None:
    address = etcd_url.removeprefix("http://")
    worker = start("-c", EVERY_SLOT, str(tiny_model), name, FLAW="NaN", OPEN=address, SNAPSHOT_CONTROL_DIR=str(control))
    _state(control, "READY_FOR_SNAPSHOT")
    release(control, "next", {})
    assert worker.wait(20) == 1
    state = state_of(control)
    assert (state["reason"], state["message"]) == ("self_test_failed", "ValueError: logits are NaN")
    assert instances(etcd_url, name) == {}
    assert keys(etcd_url, f"v1/mdc/{name}/") == {}


def test_a_factory_that_fails_is_named(start: Worker, control: Path, tiny_model: Path, name: str) -> None:
    worker = start("-c", EVERY_SLOT, str(tiny_model), name, OPEN="127.0.0.1:1")
    assert worker.wait(20) == 1
    state = state_of(control)
    assert state["reason"] == "boot_failed"
    assert "ConnectionRefusedError" in state["message"]


def test_clones_and_their_children_draw_different_numbers(
    criu: Path, etcd_url: str, nats_url: str, tiny_model: Path, name: str, tmp_path: Path
) -> None:
    street = Street(tmp_path)
    try:
        source = street.house("source")
        variables = environment(
            etcd_url, nats_url, name, OPEN=etcd_url.removeprefix("http://"), PYTHONPATH=str(REPOSITORY),
            DYNAMO_SNAPSHOT_STATE_DIR=str(street.control), SNAPSHOT_CONTROL_DIR=str(street.control),
        )  # fmt: skip
        source.start([str(python_of(VERSIONS[0])), "-c", EVERY_SLOT, str(tiny_model), name], variables)
        _state(source.control, "READY_FOR_SNAPSHOT")
        wait_for((source.control / "ready-for-snapshot").exists, "ready-for-snapshot")
        source.dump(criu, tmp_path / "images")
        houses = [street.house("first"), street.house("second"), source]
        for clone in houses[:2]:
            clone.restore(criu, tmp_path / "images")
        for index, house in enumerate(houses):
            release(house.control, f"life-{index}", {"WHO": f"clone-{index}"})
        for house in houses:
            _state(house.control, "REGISTERED")
        numbers = [line.split() for house in houses for line in house.log.read_text().splitlines() if "numbers" in line]
        assert len({each[1] for each in numbers}) == len({each[2] for each in numbers}) == 3
        children = [line.split() for house in houses for line in house.log.read_text().splitlines() if "child" in line]
        assert [each[1] for each in children] == ["clone-0", "clone-1", "clone-2"]
        assert len({each[2] for each in children}) == 3
        assert len(instances(etcd_url, name)) == 3
    finally:
        street.close()


def test_the_same_incarnation_goes_on_where_no_capture_was_made(
    start: Worker, control: Path, tiny_model: Path, name: str, etcd_url: str
) -> None:
    address = etcd_url.removeprefix("http://")
    start(
        "-c", EVERY_SLOT, str(tiny_model), name, OPEN=address, SNAPSHOT_CONTROL_DIR=str(control),
        DYNAMO_SNAPSHOT_INCARNATION="only",
    )  # fmt: skip
    _state(control, "READY_FOR_SNAPSHOT")
    release(control, "only", {})
    history = _state(control, "REGISTERED")["history"]
    assert isinstance(history, list)
    assert [each for each, _ in history][3:] == ["READY_FOR_SNAPSHOT", "RESUMING", "SELF_TESTING", "REGISTERED"]
