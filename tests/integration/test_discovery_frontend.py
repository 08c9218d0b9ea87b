"""What Dynamo's own frontend makes of a worker that was revoked: it waits for the one that replaces it."""

from __future__ import annotations

import asyncio
import subprocess
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from support.dynamo_world import (
    VERSIONS,
    ask,
    differences,
    environment,
    frontend_command,
    inherited,
    instances,
    keys,
    models,
    python_of,
)
from support.worker_house import release, state_of, wait_for

from dynamo_snapshot.discovery.etcd import EtcdDiscovery

NAMESPACE = "dynamo"
LEASE_S = 10
"""A fleet's own setting."""
Start = Callable[..., subprocess.Popen[bytes]]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    started: list[subprocess.Popen[bytes]] = []

    def start(name: str, command: Sequence[str], variables: dict[str, str]) -> subprocess.Popen[bytes]:
        with (tmp_path / f"{name}.log").open("ab") as log:
            process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=variables)
        started.append(process)
        return process

    yield start
    for process in reversed(started):
        process.kill()
        process.wait()


def _registered(control: Path) -> int:
    wait_for(lambda: state_of(control).get("state") in ("REGISTERED", "FAILED"), "REGISTERED")
    state = state_of(control)
    assert state["state"] == "REGISTERED", state
    return int(state["evidence"]["instance_id"])


@pytest.mark.parametrize("dynamo", VERSIONS)
def test_the_model_of_a_revoked_worker_is_known_until_another_serves_it(
    dynamo: str, start: Start, etcd_server: Any, nats_url: str, tiny_model: Path, free_port: Any, tmp_path: Path
) -> None:
    etcd, python, port = etcd_server.url, str(python_of(dynamo)), free_port()
    frontend, model = f"http://127.0.0.1:{port}", str(tiny_model)  # Dynamo 1.4.2 takes a mocker's name for its folder
    lease = {"ETCD_LEASE_TTL": str(LEASE_S)}
    variables = {**inherited(), **environment(etcd, nats_url, NAMESPACE, **lease), **differences(dynamo)}
    start("frontend", [*frontend_command(python, port, {}), "--router-mode", "kv"], variables)
    mocker = [python, "-m", "worker_hooks.worker", "run", "--",
              "python", "-m", "dynamo.mocker", "--model-path", model, "--model-name", model]  # fmt: skip
    first, second = tmp_path / "first", tmp_path / "second"
    worker = start("first", mocker, {**variables, "DYNAMO_SNAPSHOT_STATE_DIR": str(first)})
    held = {"DYNAMO_SNAPSHOT_STATE_DIR": str(second), "SNAPSHOT_CONTROL_DIR": str(second)}
    start("second", mocker, {**variables, **held})
    dead = _registered(first)
    wait_for((second / "ready-for-snapshot").exists, "ready-for-snapshot")
    wait_for(lambda: ask(frontend, model)[0] == 200, "an answer")

    worker.kill()
    worker.wait()
    asyncio.run(EtcdDiscovery(etcd, NAMESPACE).revoke(dead))
    assert instances(etcd, NAMESPACE) == {}
    cards = keys(etcd, "v1/mdc/")
    assert [each["lease"] for each in cards.values()] == [dead]
    wait_for(lambda: models(frontend) == [], "an end of what served")
    assert ask(frontend, model)[0] == 503, "it asks for another try"

    release(second, "next", {})
    answers: list[int] = []
    while 200 not in answers and len(answers) < 1000:
        answers.append(ask(frontend, model)[0])
    assert answers[-1] == 200
    assert set(answers) <= {503, 200}, "never 404: nothing was forgotten"
    _registered(second)
    while cards.keys() <= keys(etcd, "v1/mdc/").keys():
        assert ask(frontend, model)[0] == 200
    assert [ask(frontend, model)[0] for _ in range(20)] == [200] * 20, "nor with the dead worker's card"
