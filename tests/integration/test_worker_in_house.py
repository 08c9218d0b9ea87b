"""The mocker under the hooks in the agent's own houses: what the two sides promise each other holds."""

import asyncio
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from support.dynamo_world import environment, inherited, instances
from support.watching import wait_until

from dynamo_snapshot.agent.criu.command import Criu
from dynamo_snapshot.agent.house import LOG_INSIDE, HostHouses, House
from dynamo_snapshot.agent.teardown import teardown
from worker_hooks import holder
from worker_hooks.guard import scan


@pytest.fixture
async def houses(tmp_path: Path) -> AsyncIterator[HostHouses]:
    yield HostHouses(tmp_path / "run")
    assert await teardown(tmp_path / "run") == []


async def _in_state(house: House, wanted: str) -> None:
    def reached() -> bool | None:
        state = house.control.state()
        assert state is None or state.state != "FAILED", state
        return True if state is not None and state.state == wanted else None

    async with asyncio.timeout(30):
        await wait_until(house.control.path, reached)


async def test_captured_and_restored_in_the_agents_houses(
    houses: HostHouses, criu: Path, etcd_url: str, nats_url: str, tiny_model: Path, tmp_path: Path
) -> None:
    source = await houses.make("source", None)
    inside = f"{holder.HOUSE}/{holder.CONTROL}"
    variables = {
        **inherited(),
        **environment(etcd_url, nats_url, "houses", MOCKER_RESIDENT_MIB="20"),
        "DYNAMO_SNAPSHOT_STATE_DIR": inside,
        "SNAPSHOT_CONTROL_DIR": inside,
        "DYN_SNAPSHOT_CONTROL_DIR": inside,
    }
    command = [sys.executable, "-m", "worker_hooks.worker", "run", "--",
               "python", "-m", "dynamo.mocker", "--model-path", str(tiny_model), "--model-name", "houses"]  # fmt: skip
    inner = await source.holder.start(command, variables, "/", LOG_INSIDE)
    await _in_state(source, "READY_FOR_SNAPSHOT")
    async with asyncio.timeout(10):
        await wait_until(source.control.path, lambda: source.control.is_ready_for_snapshot() or None)
    pid = source.host_pid(inner)
    assert pid is not None
    assert scan(pid) == []
    images = tmp_path / "images"
    images.mkdir()
    program = Criu.locate(criu)
    await program.dump(source, inner, images)
    clones = [await houses.make(name, None) for name in ("first", "second")]
    await asyncio.gather(*(program.restore(clone, images, LOG_INSIDE) for clone in clones))
    assert instances(etcd_url, "houses") == {}
    for index, house in enumerate((source, *clones)):
        house.control.release(f"life-{index}", {})
    await asyncio.gather(*(_in_state(house, "REGISTERED") for house in (source, *clones)))
    states = [house.control.state() for house in (source, *clones)]
    assert {state.incarnation for state in states if state} == {"life-0", "life-1", "life-2"}
    assert len({state.evidence["first_random"] for state in states if state}) == 3
    assert len(instances(etcd_url, "houses")) == 3
