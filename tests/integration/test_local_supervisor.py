"""Real processes: started, restarted, ended, and gone when the supervisor is."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from dynamo_snapshot.errors import SnapshotError
from dynamo_snapshot.local.etcd import Etcd
from dynamo_snapshot.local.servers import embedded_etcd, embedded_nats
from dynamo_snapshot.local.service import Service, ServiceState, ServiceStatus, http_ok
from dynamo_snapshot.local.supervisor import Supervisor
from dynamo_snapshot.model import Reason


def alive(pid: int) -> bool:
    """Whether ``pid`` runs: a zombie does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


async def until(condition: Callable[[], bool], timeout_s: float = 20) -> None:
    async with asyncio.timeout(timeout_s):
        while not condition():  # noqa: ASYNC110 - the thing waited for has no event
            await asyncio.sleep(0.02)


async def test_servers_start_answer_and_leave_nothing(tmp_path: Path) -> None:
    supervisor = Supervisor(tmp_path / "logs")
    etcd, nats = embedded_etcd(tmp_path / "etcd"), embedded_nats(tmp_path / "nats")
    try:
        await supervisor.start(etcd.service)
        await supervisor.start(nats.service)
        assert await Etcd(etcd.url).keys("") == []
        pids = [supervisor.pid("etcd"), supervisor.pid("nats")]
        assert all(pid is not None and alive(pid) for pid in pids)
    finally:
        await supervisor.stop_all()
    assert not any(pid is not None and alive(pid) for pid in pids)
    assert supervisor.status() == ()


async def test_a_watch_from_the_beginning_misses_nothing(tmp_path: Path, etcd_url: str) -> None:
    client = Etcd(etcd_url)
    prefix = f"watched-{time.time_ns()}/"
    await client.put_all({prefix + "a": "1"})
    await client.delete(prefix + "a")
    seen: list[tuple[str, bool]] = []
    async with asyncio.timeout(10):
        async for changes in client.watch(prefix):
            seen += [(change.key.name, change.deleted) for change in changes]
            if len(seen) >= 2:
                break
    assert seen == [(prefix + "a", False), (prefix + "a", True)]
    assert await client.keys(prefix) == []


async def test_a_killed_service_is_started_again(tmp_path: Path) -> None:
    changes: list[ServiceStatus] = []
    supervisor = Supervisor(tmp_path, changes.append)
    nats = embedded_nats(tmp_path / "nats")
    try:
        await supervisor.start(nats.service)
        first = supervisor.pid("nats")
        supervisor.kill("nats")
        await until(lambda: supervisor.status()[0].restarts == 1 and supervisor.status()[0].state is ServiceState.READY)
        assert supervisor.pid("nats") not in (None, first)
        assert any(change.state is ServiceState.RESTARTING and "SIGKILL" in change.detail for change in changes)
    finally:
        await supervisor.stop_all()


async def test_a_service_that_ends_again_and_again_is_told_with_its_log(tmp_path: Path) -> None:
    changes: list[ServiceStatus] = []
    supervisor = Supervisor(tmp_path, changes.append)
    try:
        await supervisor.start(Service(name="planner", command=(sys.executable, "-c", "raise SystemExit(3)")))
        await until(lambda: any("exited with status 3" in change.detail for change in changes))
        said = next(change.detail for change in changes if change.detail)
        assert said.endswith(f"again in 0.25 s; its log is {tmp_path}/planner.log")
    finally:
        await supervisor.stop_all()


async def test_a_service_that_cannot_be_started_again_is_tried_until_it_can(tmp_path: Path) -> None:
    changes: list[ServiceStatus] = []
    supervisor, log = Supervisor(tmp_path, changes.append), tmp_path / "sleeper.log"
    try:
        await supervisor.start(Service(name="sleeper", command=(sys.executable, "-c", "import time; time.sleep(600)")))
        log.unlink()
        log.mkdir()
        supervisor.kill("sleeper")
        await until(lambda: any("cannot be started" in change.detail for change in changes))
        await until(lambda: "again in" in changes[-1].detail)
        assert "cannot be started" in changes[-1].detail, "why is told as long as it is so"
        log.rmdir()
        await until(lambda: supervisor.status()[0].state is ServiceState.READY)
    finally:
        await supervisor.stop_all()


async def test_a_service_that_dies_before_it_is_ready_says_why(tmp_path: Path) -> None:
    supervisor = Supervisor(tmp_path)
    command = (sys.executable, "-c", "import sys; sys.exit('no model in /nowhere')")
    with pytest.raises(SnapshotError, match=r"frontend exited with status 1.*no model in /nowhere") as caught:
        await supervisor.start(Service(name="frontend", command=command, ready=http_ok("http://127.0.0.1:1/")))
    assert caught.value.reason is Reason.PROCESS_DIED


async def test_a_service_that_ignores_the_polite_signal_is_killed_with_its_group(tmp_path: Path) -> None:
    program = textwrap.dedent(
        """
        import signal, subprocess, sys, time
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        print(subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"]).pid, flush=True)
        time.sleep(600)
        """
    )
    supervisor = Supervisor(tmp_path)
    await supervisor.start(Service(name="stubborn", command=(sys.executable, "-c", program), stop_timeout_s=0.3))
    log = tmp_path / "stubborn.log"
    await until(lambda: log.exists() and log.read_text().endswith("\n"))
    child = int(log.read_text())
    assert alive(child)
    await supervisor.stop("stubborn")
    await until(lambda: not alive(child), 5)


def test_services_end_with_a_supervisor_that_is_killed(tmp_path: Path) -> None:
    program = textwrap.dedent(
        f"""
        import asyncio, sys
        from pathlib import Path
        from dynamo_snapshot.local.service import Service
        from dynamo_snapshot.local.supervisor import Supervisor

        async def main():
            supervisor = Supervisor(Path({str(tmp_path)!r}))
            command = (sys.executable, "-c", "import time; time.sleep(600)")
            await supervisor.start(Service(name="sleeper", command=command))
            print(supervisor.pid("sleeper"), flush=True)
            await asyncio.sleep(600)

        asyncio.run(main())
        """
    )
    supervisor = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    assert supervisor.stdout is not None
    sleeper = int(supervisor.stdout.readline())
    assert alive(sleeper)
    os.kill(supervisor.pid, signal.SIGKILL)
    supervisor.wait()
    deadline = time.monotonic() + 5
    while alive(sleeper):
        assert time.monotonic() < deadline
        time.sleep(0.02)
