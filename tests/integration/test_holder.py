"""The holder as pid 1 of a fresh pid namespace: with root's privileges, and with none."""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from worker_hooks import holder

SLEEPER = [sys.executable, "-I", "-S", "-c", "import time; print('up', flush=True); time.sleep(600)"]


class Talk:
    """One connection to a holder."""

    def __init__(self, house: Path) -> None:
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._socket.settimeout(10)
        self._socket.connect(str(house / holder.SOCKET))
        self._file = self._socket.makefile("rb")

    def send(self, text: bytes) -> None:
        self._socket.sendall(text)

    def ask(self, **request: object) -> dict[str, Any]:
        self.send(json.dumps(request).encode() + b"\n")
        return self.next()

    def next(self) -> dict[str, Any]:
        line = self._file.readline()
        return json.loads(line) if line else {}


class Started:
    def __init__(self, house: Path, process: subprocess.Popen[bytes]) -> None:
        self.house, self.process = house, process
        self.log = house / "worker.log"

    def talk(self) -> Talk:
        return Talk(self.house)

    def start(self, talk: Talk, command: list[str], **env: str) -> dict[str, Any]:
        return talk.ask(do="start", command=command, env={"PATH": "/usr/bin:/bin", **env}, cwd="/", log=str(self.log))


StartHolder = Callable[..., Started]


@pytest.fixture
def start_holder(short_dir: Path) -> Iterator[StartHolder]:
    processes: list[subprocess.Popen[bytes]] = []

    def start(*, privileged: bool = True, stderr: int | None = None) -> Started:
        house = short_dir / str(len(processes))
        house.mkdir(mode=0o777)
        house.chmod(0o777)
        who = [] if privileged else ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups", "--no-new-privs"]
        # The interpreter behind a venv may lie where only root may look: the holder is a plain script.
        command = ["unshare", "--fork", "--pid", "--mount-proc", "--kill-child", *who]
        python = sys.executable if privileged else "/usr/bin/python3"
        processes.append(
            subprocess.Popen(
                [*command, python, "-I", "-S", holder.__file__, "--house", str(house)],
                stdout=subprocess.PIPE,
                stderr=stderr,
            )
        )
        assert processes[-1].stdout is not None
        assert processes[-1].stdout.readline() == b"ready\n"
        return Started(house, processes[-1])

    yield start
    for process in processes:
        process.kill()
        process.wait()


@pytest.fixture
def short_dir() -> Iterator[Path]:
    """A folder whose path leaves room for a socket's name, reachable by anyone."""
    import tempfile

    with tempfile.TemporaryDirectory(prefix="holder-") as folder:
        Path(folder).chmod(0o755)
        yield Path(folder)


@pytest.mark.parametrize("privileged", [True, False])
def test_a_worker_is_started_high_followed_and_its_end_told_to_everyone(
    start_holder: StartHolder, privileged: bool
) -> None:
    started = start_holder(privileged=privileged)
    one, two = started.talk(), started.talk()
    assert one.ask(do="status") == {"answer": "status", "pid": None}
    pid = started.start(one, ["/usr/bin/python3", "-c", "import time; time.sleep(600)"])["pid"]
    assert holder.FIRST_WORKER_PID <= pid < holder.FIRST_WORKER_PID + 50
    assert two.ask(do="status") == {"answer": "status", "pid": pid}
    before = time.time()
    assert two.ask(do="signal", signal=int(signal.SIGKILL)) == {"answer": "signal", "sent": True}
    for talk in (one, two):
        event = talk.next()
        assert (event["event"], event["pid"], event["code"]) == ("exit", pid, -9)
        assert before <= event["at"] < time.time()
        assert talk.next() == {}, "the holder ends with its worker"
    assert json.loads((started.house / holder.EXIT_FILE).read_text())["code"] == -9
    assert started.process.wait(5) == 128 + 9


@pytest.mark.parametrize("code", [0, 3])
def test_an_exit_status_is_kept_for_an_agent_that_was_away(start_holder: StartHolder, code: int) -> None:
    started = start_holder()
    talk = started.talk()
    started.start(talk, ["/bin/sh", "-c", f"echo out; echo err >&2; exit {code}"])
    assert talk.next()["code"] == code
    assert started.process.wait(5) == code
    assert json.loads((started.house / holder.EXIT_FILE).read_text())["code"] == code
    assert started.log.read_text().splitlines() == ["out", "err"]


def test_what_a_worker_leaves_ends_with_its_house(start_holder: StartHolder) -> None:
    started = start_holder()
    talk = started.talk()
    started.start(talk, ["/bin/sh", "-c", "setsid sleep 600 & echo $! ; exit 0"], MARK=str(started.house))
    assert talk.next()["code"] == 0
    started.process.wait(5)
    mark = f"MARK={started.house}".encode()
    assert not [p for p in Path("/proc").glob("[0-9]*") if mark in _environment(p)]


def test_orphans_are_reaped_while_the_worker_lives(start_holder: StartHolder) -> None:
    started = start_holder()
    talk = started.talk()
    started.start(talk, ["/bin/sh", "-c", "for i in 1 2 3; do (true &) ; done; echo done; exec sleep 600"])
    deadline = time.monotonic() + 5
    while "done" not in (started.log.read_text() if started.log.exists() else ""):
        assert time.monotonic() < deadline
    inside = _children(_children(started.process.pid)[0])
    while len(inside) > 1 and time.monotonic() < deadline:
        inside = _children(_children(started.process.pid)[0])
    assert len(inside) == 1


def test_a_signal_to_pid_1_is_the_workers_drain(start_holder: StartHolder) -> None:
    started = start_holder()
    talk = started.talk()
    script = "trap 'echo drained; exit 0' TERM; echo up; while :; do sleep 0.01; done"
    started.start(talk, ["/bin/sh", "-c", script])
    while not (started.log.exists() and "up" in started.log.read_text()):
        time.sleep(0.005)
    os.kill(_children(started.process.pid)[0], signal.SIGTERM)
    assert talk.next()["code"] == 0
    assert "drained" in started.log.read_text()


def test_an_end_and_a_signal_to_pid_1_at_once_lose_nothing(start_holder: StartHolder) -> None:
    started = start_holder()
    talk = started.talk()
    started.start(talk, ["/bin/sleep", "600"])
    (pid_1,) = _children(started.process.pid)
    (worker,) = _children(pid_1)
    ended = os.pidfd_open(worker)
    os.kill(pid_1, signal.SIGSTOP)
    os.kill(worker, signal.SIGKILL)
    select.select([ended], [], [], 5)
    os.kill(pid_1, signal.SIGTERM)
    os.kill(pid_1, signal.SIGCONT)
    os.close(ended)
    assert talk.next()["code"] == -9
    assert json.loads((started.house / holder.EXIT_FILE).read_text())["code"] == -9


def test_an_end_that_cannot_be_written_down_is_told_all_the_same(start_holder: StartHolder) -> None:
    with open("/dev/full", "wb") as full:
        started = start_holder(stderr=full.fileno())
    (started.house / f"{holder.EXIT_FILE}.tmp").mkdir()
    talk = started.talk()
    started.start(talk, ["/bin/sh", "-c", "exit 3"])
    assert talk.next()["code"] == 3


@pytest.mark.parametrize("number", [999, -(10**30)])
def test_a_request_that_the_kernel_refuses_ends_no_worker(start_holder: StartHolder, number: int) -> None:
    started = start_holder()
    talk = started.talk()
    pid = started.start(talk, ["/bin/sleep", "600"])["pid"]
    assert "error" in talk.ask(do="signal", signal=number)
    assert talk.ask(do="status") == {"answer": "status", "pid": pid}


def test_a_standing_by_holder_ends_when_asked_to(start_holder: StartHolder) -> None:
    started = start_holder()
    os.kill(_children(started.process.pid)[0], signal.SIGTERM)
    assert started.process.wait(5) == 0
    started = start_holder()
    talk = started.talk()
    started.start(talk, ["/bin/sleep", "600"])
    talk.send(b'{"do": "end"}\n')
    assert talk.next() == {}
    assert started.process.wait(5) == 0


def test_what_cannot_be_done_is_answered_and_changes_nothing(start_holder: StartHolder) -> None:
    started = start_holder()
    talk = started.talk()
    for request, error in (
        (b"nonsense\n", "malformed"),
        (b"[1]\n", "malformed"),
        (b'{"do": "fly"}\n', "unknown request 'fly'"),
        (b'{"do": "start"}\n', "malformed"),
        (b'{"do": "start", "command": [], "env": {}, "log": "/x"}\n', "needs a command"),
        (b'{"do": "start", "command": ["nowhere"], "env": {"PATH": "/bin"}, "log": "/x"}\n', "nowhere is not an exec"),
        (b'{"do": "start", "command": ["/bin/true"], "env": {}, "log": "/no/such/x"}\n', "No such file"),
        (b'{"do": "signal", "signal": "TERM"}\n', "malformed"),
    ):
        talk.send(request)
        assert error in talk.next()["error"]
    assert talk.ask(do="signal", signal=15) == {"answer": "signal", "sent": False}
    assert "pid" in started.start(talk, SLEEPER)
    assert "already" in started.start(talk, SLEEPER)["error"]
    assert "already" in talk.ask(do="expect", pid=5)["error"]


def test_requests_may_come_in_pieces_and_clients_may_go(start_holder: StartHolder) -> None:
    started = start_holder()
    gone = started.talk()
    gone.send(b'{"do": "sta')
    gone._socket.close()
    gone._file.close()
    talk = started.talk()
    talk.send(b'{"do": "sta')
    time.sleep(0.02)
    talk.send(b'tus"}\n{"do": "status"}\n')
    assert talk.next() == talk.next() == {"answer": "status", "pid": None}


def test_a_worker_inherits_nothing_of_its_holder(start_holder: StartHolder) -> None:
    started = start_holder()
    talk = started.talk()
    script = "ls -l /proc/self/fd; echo session $(ps -o sid= -p $$) $$; env"
    started.start(talk, ["/bin/sh", "-c", script], ONLY="this")
    assert talk.next()["code"] == 0
    text = started.log.read_text()
    assert "socket:" not in text
    assert text.count(" -> ") <= 4  # three standard ones, and the listing's own
    assert "ONLY=this" in text
    assert "PYTHON" not in text
    sid, pid = next(line for line in text.splitlines() if line.startswith("session")).split()[1:]
    assert sid == pid


def _children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def _environment(process: Path) -> list[bytes]:
    try:
        return (process / "environ").read_bytes().split(b"\0")
    except OSError:
        return []
