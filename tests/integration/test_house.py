"""Houses on a real host: what is private, what is shared, and that nothing stays."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from support.watching import wait_until

from dynamo_snapshot.agent.criu.command import Criu
from dynamo_snapshot.agent.house import LOG_INSIDE, MARK, MOUNT_POINT, STANDBY, HostHouses, House, remove_mount_point
from dynamo_snapshot.agent.process import children, inner_pid, marked_processes, wait_pid
from dynamo_snapshot.agent.teardown import left_behind, teardown
from dynamo_snapshot.errors import SnapshotError
from dynamo_snapshot.model import Reason
from worker_hooks import holder


@pytest.fixture
async def houses(tmp_path: Path) -> AsyncIterator[HostHouses]:
    # A long path on purpose: a socket's own name may have 107 bytes.
    runtime_dir = tmp_path / ("a-long-name" * 12)
    yield HostHouses(runtime_dir)
    assert await teardown(runtime_dir) == []


def read(path: str) -> str:
    return Path(path).read_text()


def said(house: House) -> str | None:
    state = house.control.state()
    return state.state if state else None


async def run_in(house: House, script: str) -> str:
    """Runs a worker that is a shell script to its end; returns what it wrote."""
    await house.holder.start(["/bin/sh", "-c", script], {"PATH": os.environ["PATH"]}, "/", LOG_INSIDE)
    async with asyncio.timeout(10):
        await asyncio.shield(house.holder.exited)
    return house.log.read_text()


async def test_two_houses_see_the_same_paths_and_nothing_of_each_other(houses: HostHouses) -> None:
    one, two = await asyncio.gather(houses.make("one", None), houses.make("two", None))
    script = (
        f"echo $$ >{holder.HOUSE}/control/me; echo x >/dev/shm/mine; ls /dev/shm; ls {holder.HOUSE}/control;"
        " ls -d /proc/[0-9]* | wc -l; readlink /proc/self/ns/mnt"
    )
    first, second = (text.splitlines() for text in await asyncio.gather(run_in(one, script), run_in(two, script)))
    assert first[:2] == second[:2] == ["mine", "me"]
    assert int(first[2]) < 6, "only its own processes"
    assert first[3] != second[3]
    assert (one.path / "control/me").read_text().strip() == str(holder.FIRST_WORKER_PID)
    assert str(MOUNT_POINT) not in read("/proc/self/mountinfo")
    if one.cgroup:
        assert one.cgroup != two.cgroup


async def test_a_worker_is_found_by_its_hosts_number(houses: HostHouses) -> None:
    house = await houses.make("one", None)
    inner = await house.holder.start(["/bin/sleep", "60"], {}, "/", LOG_INSIDE)
    pid = house.host_pid(inner)
    assert pid is not None
    assert inner_pid(pid) == inner
    assert children(house.holder.pid) == [pid]
    assert house.host_pid(inner + 1) is None
    os.kill(pid, signal.SIGSEGV)
    assert (await house.holder.exited).code == -signal.SIGSEGV
    await house.holder.lost
    assert houses.exit_of("one") is not None


async def test_removal_ends_everything_even_what_ignores_signals(houses: HostHouses) -> None:
    house = await houses.make("one", None)
    script = f"trap '' TERM INT HUP; setsid sh -c 'trap \"\" TERM; {MARK}=x sleep 600' & sleep 600"
    await house.holder.start(["/bin/sh", "-c", script], {"PATH": os.environ["PATH"]}, "/", LOG_INSIDE)
    visitor = await asyncio.create_subprocess_exec(*house.command("sleep", "600"), env=house.environment())
    await houses.remove("one")
    async with asyncio.timeout(5):
        assert await visitor.wait() != 0
    assert not house.path.exists()
    assert house.cgroup is None or not house.cgroup.exists()
    assert marked_processes(MARK, str(house.path)) == []
    await houses.remove("one")  # there is nothing to do


async def test_a_house_is_found_again_by_another_agent(houses: HostHouses) -> None:
    made = await houses.make("one", None)
    await made.holder.start(["/bin/sleep", "60"], {}, "/", LOG_INSIDE)
    found = await houses.find("one")
    assert found is not None
    assert found.holder.pid == made.holder.pid
    assert await found.holder.worker() == holder.FIRST_WORKER_PID
    await found.holder.signal(signal.SIGTERM)
    assert (await made.holder.exited).code == (await found.holder.exited).code == -signal.SIGTERM
    await made.holder.lost
    assert await houses.find("one") is None
    assert await houses.find("absent") is None


async def test_the_mount_point_stays_while_any_house_uses_it(houses: HostHouses) -> None:
    house = await houses.make("one", None)
    remove_mount_point()
    assert MOUNT_POINT.is_dir(), "its removal would unmount it in every house"
    assert "control" in await run_in(house, f"ls {holder.HOUSE}")


async def test_what_is_left_behind_is_named(houses: HostHouses) -> None:
    house = await houses.make("one", None)
    left = left_behind(house.path.parents[1])
    assert f"process {house.holder.pid}" in left
    assert f"file {house.path / 'holder.sock'}" in left
    assert house.cgroup is None or f"cgroup {house.cgroup}" in left


async def test_teardown_lets_workers_finish_when_asked_to(houses: HostHouses) -> None:
    house = await houses.make("one", None)
    (house.path / "control/worker-state.json").write_text('{"state": "REGISTERED", "since": 0}')
    up = f"{holder.HOUSE}/control/up"
    drained = house.path.parents[2] / "drained"
    script = f"trap 'echo done >{drained}; exit 0' TERM; echo >{up}; while :; do sleep 0.01; done"
    await house.holder.start(["/bin/sh", "-c", script], {"PATH": os.environ["PATH"]}, "/", LOG_INSIDE)
    await wait_until(house.control.path, lambda: (house.control.path / "up").exists() or None)
    assert await teardown(house.path.parents[1], drain_timeout_s=5) == []
    assert drained.read_text() == "done\n"


async def test_a_house_that_cannot_be_made_says_why_and_leaves_nothing(
    houses: HostHouses, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "executable", "/no/such/python")
    with pytest.raises(SnapshotError, match="/no/such/python") as refused:
        await houses.make("one", None)
    assert refused.value.reason is Reason.HOLDER_FAILED
    assert houses.existing() == []


def test_without_privilege_there_is_one_clear_sentence(tmp_path: Path) -> None:
    script = (
        "import asyncio, sys; from pathlib import Path; from dynamo_snapshot.agent.house import HostHouses\n"
        "asyncio.run(HostHouses(Path(sys.argv[1])).make('one', None))"
    )
    ran = subprocess.run(
        ["capsh", "--drop=cap_sys_admin", "--", "-c", 'exec "$0" "$@"', sys.executable, "-c", script, str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=30,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
    )
    assert "not_privileged" in ran.stderr, ran.stderr
    assert "Run the agent as root" in ran.stderr
    assert HostHouses(tmp_path).existing() == []
    assert asyncio.run(teardown(tmp_path)) == []


@pytest.mark.parametrize("flaw", ["io_uring", "tcp"])
async def test_a_failed_dump_names_its_cause_and_the_source_runs_on(
    houses: HostHouses, criu: Path, tmp_path: Path, flaw: str
) -> None:
    toy = Path(__file__).parents[1] / "support" / "toy_worker.py"
    house = await houses.make("one", None)
    environment = {
        "PATH": os.environ["PATH"], "TOY_FLAW": flaw, "SNAPSHOT_CONTROL_DIR": "set", "DYN_TCP_RPC_PORT": "1",
        "DYNAMO_SNAPSHOT_STATE_DIR": f"{holder.HOUSE}/control",
    }  # fmt: skip
    pid = await house.holder.start([sys.executable, str(toy)], environment, "/", LOG_INSIDE)
    await wait_until(house.control.path, lambda: house.control.is_ready_for_snapshot() or None)
    images = tmp_path / "images"
    images.mkdir()
    with pytest.raises(SnapshotError, match="io_uring" if flaw == "io_uring" else "Connected TCP socket") as refused:
        await Criu.locate(criu).dump(house, pid, images)
    assert refused.value.reason is Reason.CRIU_DUMP_FAILED
    house.control.release("next", {})
    await wait_until(house.control.path, lambda: True if said(house) == "REGISTERED" else None)


async def test_a_child_that_ended_before_it_was_expected_is_still_the_workers_end(houses: HostHouses) -> None:
    house = await houses.make("one", None)
    # As CRIU leaves its worker: a process whose parent has ended becomes the holder's child.
    visitor = await asyncio.create_subprocess_exec(
        *house.command("sh", "-c", "sh -c 'sleep 0.05; exit 7' >/dev/null & echo $!"),
        env=house.environment(),
        stdout=asyncio.subprocess.PIPE,
    )
    output, _ = await visitor.communicate()
    stray = house.host_pid(int(output))
    if stray is not None:
        await wait_pid(stray)
    assert await house.holder.worker() is None  # answered after the holder has reaped what had ended by then
    await house.holder.expect(int(output))
    async with asyncio.timeout(5):
        assert (await house.holder.exited).code == 7


@pytest.fixture
async def ready_houses(tmp_path: Path) -> AsyncIterator[HostHouses]:
    """Keeps two houses ready, both made by now."""
    made = HostHouses(tmp_path / "run", standby=2)
    await made.begin()
    await two_ready(tmp_path / "run" / STANDBY)
    yield made
    await made.close()
    assert await teardown(tmp_path / "run") == []


async def two_ready(folder: Path) -> None:
    async with asyncio.timeout(10):
        while len(marks(folder)) < 2:  # noqa: ASYNC110  # the marks are in folders that are only being made
            await asyncio.sleep(0.01)


def marks(folder: Path) -> list[str]:
    """The houses that are complete in the folder of those made ahead."""
    return sorted(str(path) for path in folder.glob("*/mark"))


async def test_a_house_made_ahead_is_as_good_as_a_new_one(ready_houses: HostHouses, tmp_path: Path) -> None:
    before = marks(tmp_path / "run" / STANDBY)
    house = await ready_houses.make("one", None)
    assert len(set(marks(tmp_path / "run" / STANDBY)) & set(before)) == 1
    assert house.path == ready_houses.path("one")
    text = await run_in(house, f"echo x >{holder.HOUSE}/control/me; ls {holder.HOUSE}/control; ls /dev/shm")
    assert text.split() == ["me"]
    assert (house.path / "control/me").read_text() == "x\n"
    await house.holder.close()
    await ready_houses.remove("one")
    assert not house.path.exists()
    await two_ready(tmp_path / "run" / STANDBY)


async def test_a_folder_prepared_for_a_house_is_the_one_it_gets(ready_houses: HostHouses) -> None:
    for name in ("one", "two", "three"):  # the third is made when it is needed
        path = ready_houses.prepare(name)
        (path / "before").write_text(name)
        house = await ready_houses.make(name, None)
        assert (await run_in(house, f"cat {holder.HOUSE}/before")).strip() == name
        await house.holder.close()
    await ready_houses.remove(ready_houses.prepare("never made").name)
    for name in ("one", "two", "three"):
        await ready_houses.remove(name)
    assert ready_houses.existing() == []


async def test_a_house_whose_holder_ended_while_it_stood_by_is_not_used(
    ready_houses: HostHouses, tmp_path: Path
) -> None:
    for pid in marked_processes(MARK, f"{tmp_path / 'run' / STANDBY}/", prefix=True):
        if inner_pid(pid) == 1:
            os.kill(pid, signal.SIGKILL)
            await wait_pid(pid)
    await asyncio.sleep(0)
    house = await ready_houses.make("one", None)
    assert await house.holder.worker() is None
    await house.holder.close()


async def test_houses_made_ahead_by_an_agent_that_died_are_removed(ready_houses: HostHouses, tmp_path: Path) -> None:
    taken = await ready_houses.make("taken", None)
    await taken.holder.close()
    later = HostHouses(tmp_path / "run")
    await later.clear()
    assert not (tmp_path / "run" / STANDBY).exists()
    found = await later.find("taken")
    assert found is not None
    await found.holder.close()
    await later.remove("taken")
    assert marked_processes(MARK, str(tmp_path / "run"), prefix=True) == []


async def test_a_later_agent_s_houses_are_not_taken_for_those_of_living_replicas(
    ready_houses: HostHouses, tmp_path: Path
) -> None:
    taken = [await ready_houses.make(name, None) for name in ("one", "two")]
    later = HostHouses(tmp_path / "run", standby=2)
    await later.begin()
    await two_ready(tmp_path / "run" / STANDBY)
    await later.close()
    for house in taken:
        assert await house.holder.worker() is None, "its holder lives"
        await house.holder.close()
