"""What a fleet could leave behind is found, told apart from everything else, and removed. Needs root."""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest

from dynamo_snapshot.agent.house import MOUNT_POINT, HostHouses
from dynamo_snapshot.local import leftovers
from dynamo_snapshot.local.processes import RUNTIME_DIR_TAG
from worker_hooks.holder import SOCKET


@pytest.fixture
def runtime_dir(tmp_path: Path) -> Path:
    folder = tmp_path / "run"
    folder.mkdir()
    return folder


@pytest.fixture
def server(runtime_dir: Path) -> Iterator[subprocess.Popen[str]]:
    """A process that bears the fleet's mark, listens on TCP and has a socket in the runtime folder."""
    program = textwrap.dedent(
        f"""
        import socket, time
        tcp = socket.create_server(("127.0.0.1", 0))
        unix = socket.socket(socket.AF_UNIX)
        unix.bind({str(runtime_dir / "its.sock")!r})
        print(tcp.getsockname()[1], flush=True)
        time.sleep(600)
        """
    )
    process = subprocess.Popen(
        [sys.executable, "-c", program],
        env={**os.environ, RUNTIME_DIR_TAG: str(runtime_dir)},
        stdout=subprocess.PIPE,
        text=True,
    )
    yield process
    process.kill()
    process.wait()


def mount(folder: Path) -> None:
    folder.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "tmpfs", str(folder)], check=True)


async def test_each_kind_is_found_and_removed(runtime_dir: Path, server: subprocess.Popen[str]) -> None:
    assert server.stdout is not None
    port = server.stdout.readline().strip()
    mount(runtime_dir / "mounted")
    houses = HostHouses(runtime_dir)
    await houses.make("r1", None)
    found = leftovers.count(runtime_dir)
    kinds = {leftover.kind for leftover in found}
    assert {"process", "namespace", "mount", "socket", "file"} <= kinds
    whats = [leftover.what for leftover in found]
    assert f"TCP port {port}" in whats
    assert str(runtime_dir / "its.sock") in whats
    assert any(what.startswith(f"{server.pid} ") for what in whats)

    reaping = asyncio.create_task(asyncio.to_thread(server.wait))
    await leftovers.remove(runtime_dir)
    await reaping
    assert leftovers.count(runtime_dir) == []
    assert os.listdir(runtime_dir) == []


async def test_what_bears_another_mark_is_left_alone(runtime_dir: Path, server: subprocess.Popen[str]) -> None:
    other = runtime_dir.with_name("run-2")
    other.mkdir()
    with socket.socket(socket.AF_UNIX) as unix:
        unix.bind(str(runtime_dir.with_name("run-20.sock")))
        assert leftovers.count(other) == []
        assert await leftovers.remove(other) == []
    assert server.poll() is None


async def test_a_house_of_another_fleet_is_no_leftover_of_the_one_around_the_mount_point(runtime_dir: Path) -> None:
    houses = HostHouses(runtime_dir)
    house = await houses.make("r1", None)
    bound = str(MOUNT_POINT / SOCKET)
    assert bound in leftovers.sockets(MOUNT_POINT)
    found = leftovers.count(MOUNT_POINT.parent)
    assert bound not in [leftover.what for leftover in found]
    assert not any(leftover.what.startswith(f"{house.holder.pid} ") for leftover in found)
    await leftovers.remove(runtime_dir)


async def test_logs_stay(runtime_dir: Path) -> None:
    (runtime_dir / "logs").mkdir()
    (runtime_dir / "bus").mkdir()
    await leftovers.remove(runtime_dir)
    assert os.listdir(runtime_dir) == ["logs"]
