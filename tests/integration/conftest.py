"""Real servers on loopback, one of each for a whole run, and the CRIU that the set-up installed."""

from __future__ import annotations

import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, closing, contextmanager
from http.client import HTTPConnection, HTTPException
from pathlib import Path

import pytest
from support.agent_host import AgentHost, MakeHost
from support.guarded_nats import GuardedNats

from dynamo_snapshot.agent.criu.command import find
from dynamo_snapshot.agent.teardown import teardown
from dynamo_snapshot.errors import SnapshotError
from dynamo_snapshot.local.servers import server_program


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _answers(port: int, health: str) -> bool:
    try:
        if health:
            with closing(HTTPConnection("127.0.0.1", port, timeout=1)) as connection:
                connection.request("GET", health)
                return connection.getresponse().status == 200
        with socket.create_connection(("127.0.0.1", port), timeout=1):
            return True
    except (OSError, HTTPException):
        return False


# etcd accepts before it has noted that it is its cluster's only member; one that is ended before then
# never elects a leader again.
ETCD_HEALTH = "/health"


@contextmanager
def running(command: list[str], port: int, log: Path, health: str = "") -> Iterator[subprocess.Popen[bytes]]:
    """Runs ``command`` until the block ends, entered once ``port`` on loopback accepts and ``health`` answers 200."""
    with log.open("ab") as output:
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=output, stderr=output)
    try:
        deadline = time.monotonic() + 30
        while True:
            if _answers(port, health):
                break
            if process.poll() is not None or time.monotonic() > deadline:
                pytest.fail(f"{command[0]} did not come up:\n{log.read_text()[-2000:]}")
            time.sleep(0.02)
        yield process
    finally:
        process.terminate()
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def etcd_command(data_dir: Path, port: int, peer_port: int) -> list[str]:
    """The command line of a one-member etcd on loopback."""
    client, peer = f"http://127.0.0.1:{port}", f"http://127.0.0.1:{peer_port}"
    return [
        str(server_program("etcd")), "--name", "default", "--data-dir", str(data_dir), "--log-level", "error",
        "--listen-client-urls", client, "--advertise-client-urls", client,
        "--listen-peer-urls", peer, "--initial-advertise-peer-urls", peer, "--initial-cluster", f"default={peer}",
    ]  # fmt: skip


@pytest.fixture
def start_etcd(tmp_path: Path) -> Iterator[Callable[[], tuple[str, subprocess.Popen[bytes]]]]:
    """Returns a function that starts an etcd of the test's own: (URL, process)."""
    with ExitStack() as stack:
        count = 0

        def start() -> tuple[str, subprocess.Popen[bytes]]:
            nonlocal count
            count += 1
            port = _free_port()
            command = etcd_command(tmp_path / f"etcd-{count}", port, _free_port())
            return f"http://127.0.0.1:{port}", stack.enter_context(
                running(command, port, tmp_path / "etcd.log", ETCD_HEALTH)
            )

        yield start


class EtcdServer:
    """An etcd that a test may stop and start again: same port, same data."""

    def __init__(self, folder: Path) -> None:
        self._port = _free_port()
        self._command = etcd_command(folder / "etcd-data", self._port, _free_port())
        self._log = folder / "etcd.log"
        self._running: ExitStack | None = None
        self.url = f"http://127.0.0.1:{self._port}"

    def start(self) -> None:
        self._running = ExitStack()
        self._running.enter_context(running(self._command, self._port, self._log, ETCD_HEALTH))

    def stop(self) -> None:
        if self._running is not None:
            self._running.close()
            self._running = None


@pytest.fixture
def etcd_server(tmp_path: Path) -> Iterator[EtcdServer]:
    """A running etcd of the test's own."""
    server = EtcdServer(tmp_path)
    server.start()
    yield server
    server.stop()


@pytest.fixture(scope="session")
def etcd_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A shared etcd: tests keep to namespaces of their own."""
    folder = tmp_path_factory.mktemp("etcd")
    port = _free_port()
    with running(etcd_command(folder / "data", port, _free_port()), port, folder / "etcd.log", ETCD_HEALTH):
        yield f"http://127.0.0.1:{port}"


@pytest.fixture(scope="session")
def nats_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A shared nats-server with JetStream."""
    folder = tmp_path_factory.mktemp("nats")
    port = _free_port()
    program = str(server_program("nats-server"))
    command = [program, "-a", "127.0.0.1", "-p", str(port), "-js", "-sd", str(folder / "data")]
    with running(command, port, folder / "nats.log"):
        yield f"nats://127.0.0.1:{port}"


@pytest.fixture
def nats_on(tmp_path: Path) -> Callable[[int], AbstractContextManager[object]]:
    """Returns a function that runs a nats-server of the test's own on a port for as long as its block lasts."""

    def run(port: int) -> AbstractContextManager[object]:
        command = [str(server_program("nats-server")), "-a", "127.0.0.1", "-p", str(port)]
        return running(command, port, tmp_path / "nats.log")

    return run


@pytest.fixture
def guarded_nats(tmp_path: Path) -> Iterator[GuardedNats]:
    """See :class:`GuardedNats`."""
    port = _free_port()
    server = GuardedNats(tmp_path, port)
    command = [str(server_program("nats-server")), "-c", str(server.config)]
    with running(command, port, tmp_path / "nats.log") as started:
        server.process = started
        yield server


@pytest.fixture(scope="session")
def criu() -> Path:
    """The CRIU under test: the one that an agent would take here."""
    try:
        return find(None)
    except SnapshotError as error:
        pytest.fail(f"{error}: run `make setup`")


@pytest.fixture
async def make_host(tmp_path: Path, free_port: Callable[[], int], criu: Path) -> AsyncIterator[MakeHost]:
    """Returns a function that makes a host with a node agent; afterwards nothing of it may be left."""
    hosts: list[AgentHost] = []

    def make(**agent: object) -> AgentHost:
        folder = tmp_path / f"host-{len(hosts)}"
        folder.mkdir()
        hosts.append(AgentHost(folder, free_port(), **{"criu": str(criu), **agent}))
        return hosts[-1]

    yield make
    for host in hosts:
        if host.is_running():
            await host.stop()
        assert await teardown(host.runtime_dir) == []


@pytest.fixture(scope="session")
def frontend_url(etcd_url: str, nats_url: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A shared frontend without request migration: tests keep to model names of their own."""
    from support.dynamo_world import environment, frontend_command

    port = _free_port()
    log = tmp_path_factory.mktemp("frontend") / "frontend.log"
    with running(frontend_command(sys.executable, port, environment(etcd_url, nats_url, "dynamo")), port, log):
        yield f"http://127.0.0.1:{port}"


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The bundled model folder."""
    from dynamo_snapshot.local.tiny_model import write_tiny_model

    return write_tiny_model(tmp_path_factory.mktemp("tiny-model"))
