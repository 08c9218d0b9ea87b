"""A small fleet on this host, through the command a person types: up, served, ended, and nothing left."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from dynamo_snapshot.agent.mounts import mount_points
from dynamo_snapshot.local import leftovers
from dynamo_snapshot.local.etcd import Etcd
from dynamo_snapshot.local.keys import dynamo_prefixes
from dynamo_snapshot.local.processes import LEARNT
from dynamo_snapshot.local.tiny_model import write_tiny_model

UP_S = 90.0


@pytest.fixture
def fleet_file(tmp_path: Path, free_port: Callable[[], int]) -> Path:
    """A fleet of mocker workers without boot, in a folder of its own."""
    write_tiny_model(tmp_path / "model")
    command = ["dynamo-snapshot-worker", "run", "--", "python", "-m", "dynamo.mocker"]
    command += ["--model-path", "{model_path}", "--model-name", "{model_name}"]
    fleet = {
        "name": "small",
        "model": {"name": "tiny", "path": "model"},
        "pools": {"decode": {"worker": {"command": command}, "max_replicas": 2}},
        "agent": {"runtime_dir": str(tmp_path / "run"), "store_dir": str(tmp_path / "snapshots")},
        "frontend": {"port": free_port()},
    }
    path = tmp_path / "fleet.yaml"
    path.write_text(yaml.safe_dump(fleet))
    return path


def change(fleet_file: Path, **fields: object) -> None:
    fleet_file.write_text(yaml.safe_dump(yaml.safe_load(fleet_file.read_text()) | fields))


class Up:
    """A running `dynamo-snapshot up`."""

    def __init__(self, fleet_file: Path) -> None:
        self.fleet = yaml.safe_load(fleet_file.read_text())
        self.runtime_dir = Path(self.fleet["agent"]["runtime_dir"])
        self.output = fleet_file.with_name(f"up-{time.monotonic_ns()}.log")
        with self.output.open("wb") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "dynamo_snapshot.cli.main", "up", str(fleet_file), "--plain"],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )

    def until(self, condition: Callable[[], bool], what: str, timeout_s: float = UP_S) -> None:
        deadline = time.monotonic() + timeout_s
        while not condition():
            assert self.process.poll() is None, f"up ended before {what}:\n{self.output.read_text()}"
            assert time.monotonic() < deadline, f"not in time: {what}\n{self.output.read_text()}"
            time.sleep(0.1)

    def answers(self) -> bool:
        body = {"model": "tiny", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 4}
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.fleet['frontend']['port']}/v1/chat/completions",
            data=json.dumps(body).encode(),
            headers={"content-type": "application/json"},
        )
        try:
            with urllib.request.urlopen(request, timeout=5) as answer:
                return bool(answer.status == 200)
        except OSError:
            return False

    def status(self) -> dict[str, Any]:
        done = subprocess.run(
            [
                sys.executable,
                "-m",
                "dynamo_snapshot.cli.main",
                "status",
                "--runtime-dir",
                str(self.runtime_dir),
                "--json",
            ],
            capture_output=True,
            text=True,
            check=True,
            timeout=60,
        )
        found: dict[str, Any] = json.loads(done.stdout)
        return found


@pytest.fixture
def start_up(fleet_file: Path) -> Iterator[Callable[[], Up]]:
    """Returns a function that runs `up`; what still runs at the end is ended."""
    started: list[Up] = []

    def start() -> Up:
        started.append(Up(fleet_file))
        return started[-1]

    yield start
    for up in started:
        if up.process.poll() is None:
            up.process.send_signal(signal.SIGTERM)
            try:
                up.process.wait(60)
            except subprocess.TimeoutExpired:
                up.process.kill()


def test_up_serves_and_ctrl_c_leaves_nothing(
    start_up: Callable[[], Up], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    monkeypatch.setenv("TMPDIR", str(temporary))
    up = start_up()
    up.until(up.answers, "the first answer")
    shown = up.status()
    assert [replica["state"] for replica in shown["fleet"]["replicas"]] == ["serving"]
    up.process.send_signal(signal.SIGINT)
    assert up.process.wait(60) == 0, up.output.read_text()
    assert "nothing left behind" in up.output.read_text()
    assert leftovers.processes(up.runtime_dir) == []
    assert mount_points(up.runtime_dir) == []
    assert {path.name for path in up.runtime_dir.iterdir()} - {LEARNT} == {"logs"}
    assert list(temporary.iterdir()) == []


def test_the_next_up_cleans_up_after_one_that_was_killed(start_up: Callable[[], Up]) -> None:
    first = start_up()
    first.until(first.answers, "the first answer")
    os.kill(first.process.pid, signal.SIGKILL)
    first.process.wait()
    orphans = leftovers.processes(first.runtime_dir)
    assert orphans, "the replicas' houses outlive a killed supervisor"
    second = start_up()
    second.until(second.answers, "an answer of the second fleet")
    assert not set(orphans) & set(leftovers.processes(second.runtime_dir))
    assert "removed what an earlier fleet left" in second.output.read_text()
    second.process.send_signal(signal.SIGTERM)
    assert second.process.wait(60) == 0, second.output.read_text()


def test_a_fleet_whose_up_was_killed_is_gone_for_status_at_once(start_up: Callable[[], Up]) -> None:
    up = start_up()
    up.until(up.answers, "the first answer")
    os.kill(up.process.pid, signal.SIGKILL)
    up.process.wait()
    command = [sys.executable, "-m", "dynamo_snapshot.cli.main", "status", "--runtime-dir", str(up.runtime_dir)]
    for options in ([], ["--json"]):
        done = subprocess.run([*command, *options], capture_output=True, text=True, timeout=60)
        assert done.returncode == 1
        assert done.stdout == ""
        assert f"is gone: process {up.process.pid}, which ran it, ended without taking it down" in done.stderr
        assert "processes of its replicas are left [process_died]" in done.stderr
    asyncio.run(leftovers.remove(up.runtime_dir))


def test_the_end_of_who_reads_takes_the_fleet_down(fleet_file: Path) -> None:
    """As in `up fleet.yaml | head -1`."""
    command = [sys.executable, "-m", "dynamo_snapshot.cli.main", "up", str(fleet_file)]
    up = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert up.stdout is not None
    assert up.stderr is not None
    assert "etcd is up" in up.stdout.readline()
    up.stdout.close()
    assert up.stderr.read() == ""
    assert up.wait(60) == 0
    runtime_dir = Path(yaml.safe_load(fleet_file.read_text())["agent"]["runtime_dir"])
    assert leftovers.count(runtime_dir) == []
    assert {path.name for path in runtime_dir.iterdir()} - {LEARNT} == {"logs"}


def test_a_second_up_in_the_same_folder_is_refused(start_up: Callable[[], Up]) -> None:
    first = start_up()
    first.until(lambda: "etcd is up" in first.output.read_text(), "etcd")
    second = start_up()
    assert second.process.wait(60) == 1
    assert f"already runs in {first.runtime_dir}, under process {first.process.pid}" in second.output.read_text()


def test_a_port_in_use_is_one_sentence_and_nothing_starts(start_up: Callable[[], Up], fleet_file: Path) -> None:
    port = yaml.safe_load(fleet_file.read_text())["frontend"]["port"]
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", port))
        taken.listen()
        up = start_up()
        assert up.process.wait(60) == 1
    text = up.output.read_text()
    assert f"127.0.0.1:{port}, which the frontend needs, cannot be used" in text
    assert "Traceback" not in text
    assert not (up.runtime_dir / "logs").exists(), "nothing was started"


def test_servers_that_do_not_answer_are_waited_for_aloud(start_up: Callable[[], Up], fleet_file: Path) -> None:
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        change(fleet_file, servers={"etcd": f"http://127.0.0.1:{silent.getsockname()[1]}"})
        up = start_up()
        up.until(lambda: "s left" in up.output.read_text(), "the countdown", 30)
        up.process.send_signal(signal.SIGINT)
        assert up.process.wait(30) == 0


def test_controller_and_agent_tell_prometheus_where_they_are_asked_to(
    start_up: Callable[[], Up], fleet_file: Path, free_port: Callable[[], int]
) -> None:
    ports = {"agent_port": free_port(), "controller_port": free_port()}
    change(fleet_file, metrics=ports)
    up = start_up()

    def told(part: str, line: str) -> bool:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{ports[part]}/metrics", timeout=5) as answer:
                return line in answer.read().decode().splitlines()
        except OSError:
            return False

    up.until(lambda: told("controller_port", 'dynamo_snapshot_replicas{pool="decode",state="serving"} 1.0'), "serving")
    assert told("controller_port", 'dynamo_snapshot_pool_target{pool="decode",role="decode"} 1.0')
    assert told("agent_port", 'dynamo_snapshot_node_replicas{phase="registered",pool="decode"} 1.0')
    done = 'dynamo_snapshot_orders_total{kind="cold_start",outcome="done",pool="decode",reason=""} 1.0'
    up.until(lambda: told("agent_port", done), "the cold start's end")


def test_a_port_for_metrics_that_is_taken_is_refused_before_anything_starts(
    start_up: Callable[[], Up], fleet_file: Path
) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        change(fleet_file, metrics={"agent_port": port})
        up = start_up()
        assert up.process.wait(60) == 1
    text = up.output.read_text()
    assert f"127.0.0.1:{port}, which the agent, for its metrics, needs, cannot be used" in text
    assert "choose another metrics.agent_port in fleet.yaml" in text


async def test_no_key_stays_in_an_etcd_that_goes_on(
    start_up: Callable[[], Up], fleet_file: Path, etcd_url: str, nats_url: str
) -> None:
    namespace = f"up-{time.time_ns()}"
    change(fleet_file, servers={"etcd": etcd_url, "nats": nats_url}, namespace=namespace, lease_ttl_s=2)
    etcd = Etcd(etcd_url)
    foreign = f"v1/instances/{namespace}/frontend/of-somebody-else"
    await etcd.put_all({foreign: "{}"})
    up = start_up()
    await asyncio.to_thread(up.until, up.answers, "the first answer")
    assert len(await etcd.keys(f"v1/instances/{namespace}/backend/generate/")) == 1
    up.process.send_signal(signal.SIGINT)
    assert await asyncio.to_thread(up.process.wait, 60) == 0, up.output.read_text()
    prefixes = (*dynamo_prefixes(namespace), f"dynamo_snapshot/{namespace}/")
    assert [key.name for prefix in prefixes for key in await etcd.keys(prefix)] == [foreign]
