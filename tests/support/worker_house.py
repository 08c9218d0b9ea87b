"""A house for one worker: fresh pid and mount namespaces, its replica's folder bound at one fixed path."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

CONTROL = "control"
FIRST_PID = 1000
"""A cold worker's inner pid lies above: below, pids stay free for what a restore itself runs."""


def wait_for(condition: Callable[[], object], what: str, timeout: float = 30) -> Any:
    """Returns the first true value of ``condition``; fails naming ``what`` when there is none in time."""
    deadline = time.monotonic() + timeout
    while time.monotonic() < deadline:
        if value := condition():
            return value
        time.sleep(0.005)
    pytest.fail(f"{what}: not within {timeout:g} s")


def state_of(control: Path) -> dict[str, Any]:
    """What the worker says of itself; empty while it has said nothing."""
    try:
        content: dict[str, Any] = json.loads((control / "worker-state.json").read_text())
    except FileNotFoundError:
        return {}
    return content


def release(control: Path, incarnation: str, env: Mapping[str, str | None], *, park: bool = False) -> float:
    """Does what an agent does, and returns when."""
    # A port of its own: clones that look for one at the same time may find the same.
    own = {"DYN_TCP_RPC_PORT": str(_port()), **env}
    write_control(control, "restore-context.json", json.dumps({"env": own, "incarnation": incarnation, "park": park}))
    write_control(control, "restore-complete", f"incarnation={incarnation}\n")
    return time.time()


_ports = itertools.cycle(random.sample(range(10_000, 20_000), 10_000))
"""Below those that connections are given, and beside those that agents give."""


def _port() -> int:
    """A port nobody listens on."""
    for port in _ports:
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
    raise AssertionError("unreachable")


def wake(control: Path, incarnation: str) -> float:
    """Likewise for a parked worker."""
    write_control(control, "wake", f"incarnation={incarnation}\n")
    return time.time()


def write_control(control: Path, name: str, content: str) -> None:
    (control / f".{name}").write_text(content)
    (control / f".{name}").rename(control / name)


class House:
    """Made by :class:`Street`; every process in it dies with it."""

    def __init__(self, folder: Path, mount_point: Path) -> None:
        self.folder = folder
        self.mount_point = mount_point
        self.control = folder / CONTROL
        self.log = folder / "logs" / "worker.log"
        self.control.mkdir(parents=True)
        self.log.parent.mkdir()
        script = 'mount --bind "$1" "$2" && echo && exec sleep infinity'
        self._unshare = subprocess.Popen(
            ["unshare", "--fork", "--pid", "--mount", "--propagation", "private", "--mount-proc", "--kill-child",
             "sh", "-c", script, "sh", str(folder), str(mount_point)],
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, start_new_session=True,
        )  # fmt: skip
        assert self._unshare.stdout is not None
        assert self._unshare.stdout.read(1) == b"\n", "the house could not be made"
        self.init = int(Path(f"/proc/{self._unshare.pid}/task/{self._unshare.pid}/children").read_text().split()[0])
        self.worker: int | None = None
        """The worker's root process, by host pid."""

    def run(self, command: Sequence[str], **options: Any) -> subprocess.Popen[bytes]:
        entered = ["nsenter", f"--target={self.init}", "--mount", "--pid", "--", *command]
        return subprocess.Popen(entered, stdin=subprocess.DEVNULL, start_new_session=True, **options)

    def start(self, command: Sequence[str], env: Mapping[str, str]) -> None:
        log = self.mount_point / "logs" / "worker.log"
        # Standard streams are opened inside: a file opened outside could not be captured.
        script = 'echo "$1" >/proc/sys/kernel/ns_last_pid; exec </dev/null >>"$2" 2>&1; shift 2; setsid -w "$@"'
        self._started = self.run(
            ["sh", "-c", script, "sh", str(FIRST_PID), str(log), *command], env={**os.environ, **env}
        )
        self.worker = wait_for(lambda: self._find(self._started.pid), "the worker's process")

    def dump(self, criu: Path, images: Path) -> None:
        images.mkdir(exist_ok=True)
        assert self.worker is not None
        inner = Path(f"/proc/{self.worker}/status").read_text().split("NSpid:")[1].split()[1]
        done = self.run([str(criu), "dump", "--tree", inner, "--leave-running", "--images-dir", str(images),
                         "-v4", "--log-file", "dump.log", "--link-remap"])  # fmt: skip
        assert done.wait(60) == 0, (images / "dump.log").read_text()[-3000:]

    def restore(self, criu: Path, images: Path) -> None:
        baked = str(self.mount_point / "logs" / "worker.log")
        script = 'log="$1"; shift; exec "$@" 9>>"$log"'
        done = self.run(["sh", "-c", script, "sh", baked, str(criu), "restore", "--restore-detached",
                         "--images-dir", str(images), "--work-dir", str(self.folder), "-v4", "--log-file",
                         "restore.log", "--pidfile", str(self.folder / "pid"),
                         "--inherit-fd", f"fd[9]:{baked.lstrip('/')}", "--link-remap"])  # fmt: skip
        assert done.wait(60) == 0, (self.folder / "restore.log").read_text()[-3000:]
        inner = (self.folder / "pid").read_text().strip()
        self.worker = wait_for(lambda: self._by_inner_pid(inner), "the restored process")

    def close(self) -> None:
        if self._unshare.poll() is None:
            os.kill(self.init, signal.SIGKILL)
            self._unshare.wait(10)

    def _find(self, entered: int) -> int | None:
        """The worker, once it leads a session: the last of nsenter, sh, setsid, worker."""
        try:
            pid = entered
            while children := Path(f"/proc/{pid}/task/{pid}/children").read_text().split():
                pid = int(children[0])
            inner = Path(f"/proc/{pid}/status").read_text().split("NSsid:")[1].split("\n")[0].split()
            return pid if len(inner) > 1 and int(inner[-1]) > FIRST_PID else None
        except (FileNotFoundError, ProcessLookupError):
            return None

    def _by_inner_pid(self, inner: str) -> int | None:
        namespace = os.readlink(f"/proc/{self.init}/ns/pid")
        for entry in Path("/proc").iterdir():
            try:
                if entry.name.isdigit() and os.readlink(entry / "ns" / "pid") == namespace:
                    status = (entry / "status").read_text().split("NSpid:")[1].split("\n")[0].split()
                    if status[-1] == inner:
                        return int(entry.name)
            except OSError:  # not ours to look at, or gone
                continue
        return None


class Street:
    """Houses that share one fixed mount point, as the replicas of one host do."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.mount_point = folder / "house"
        self.mount_point.mkdir()
        self._houses: list[House] = []

    @property
    def control(self) -> Path:
        """The control directory's path as every worker here knows it."""
        return self.mount_point / CONTROL

    def house(self, name: str) -> House:
        house = House(self._folder / "replicas" / name, self.mount_point)
        self._houses.append(house)
        return house

    def close(self) -> None:
        for house in self._houses:
            house.close()


PYTHON = sys.executable
