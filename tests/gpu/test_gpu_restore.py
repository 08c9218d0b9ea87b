"""The torch engine captured and restored with the agent's parts: bit-identical, however its weights come back."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import msgspec
import pytest
from gpu.rig import Captured, Rig, Stopwatch, rig
from gpu.subjects import SUBJECT, Conversation

from dynamo_snapshot.errors import SnapshotError
from dynamo_snapshot.model import Reason

GIB = 1 << 30


@pytest.fixture
async def node(tmp_path: Path, criu_path: Path) -> AsyncIterator[Rig]:
    async with rig(tmp_path / "node", criu_path) as made:
        yield made


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(30):
        while not condition():  # noqa: ASYNC110  # another process makes the file
            await asyncio.sleep(0.001)


async def captured(node: Rig, *, detached: bool = True, drop_zeros: bool = True) -> Captured:
    engine = ["--weights-gib", "1", *(["--segments", str(node.store.folder)] if detached else [])]
    house = await node.cold_start("source", *engine)
    found = await node.capture(house, node.folder / "images", drop_zeros=drop_zeros)
    await node.remove("source")
    return found


async def test_prefetched_weights_are_handed_over(node: Rig) -> None:
    snapshot = await captured(node)
    assert snapshot.image_bytes < GIB
    restored = await node.restore("r1", snapshot, prefetch=True)
    assert restored.evidence["weights"] == "by_loader=1"
    assert (await node.loader.ready()).loads == ()


async def test_without_a_loader_the_worker_loads(node: Rig) -> None:
    snapshot = await captured(node)
    restored = await node.restore("r1", snapshot, prefetch=False)
    assert restored.evidence["weights"] == "by_loader=0"


async def test_weights_in_the_image_come_back_too(node: Rig) -> None:
    snapshot = await captured(node, detached=False)
    assert snapshot.image_bytes > GIB
    restored = await node.restore("r1", snapshot, prefetch=False)
    assert "weights" not in restored.evidence


async def test_the_source_goes_on_after_its_capture(node: Rig) -> None:
    house = await node.cold_start("source", "--weights-gib", "1", "--segments", str(node.store.folder))
    await node.capture(house, node.folder / "images", drop_zeros=True)
    house.control.release("source-2", {})
    await node.until(house, lambda: (state := house.control.state()) and state.state == "REGISTERED", 30)


async def test_a_killed_loader_costs_time_and_nothing_else(node: Rig) -> None:
    snapshot = await captured(node)
    await node.loader.prefetch(snapshot.segments, node.store)
    pid = node.loader.pid
    assert pid is not None
    restoring = asyncio.create_task(node.restore("r1", snapshot, prefetch=True))
    await until((node.houses.path("r1") / "weights.sock").exists)
    os.kill(pid, signal.SIGKILL)
    restored = await restoring
    assert "loader_died" in restored.load_lost
    assert restored.evidence["weights"].startswith("by_loader=0 loader_died")


async def test_what_was_in_memory_in_a_file_and_on_the_gpu_comes_back(node: Rig, tmp_path: Path) -> None:
    talk = Conversation(tmp_path / "subject")
    talk.folder.mkdir()
    house = await node.start("source", str(SUBJECT), str(talk.folder), "64")
    await node.until(house, lambda: talk.begun, 60)
    tokens = talk.first()
    snapshot = await node.capture(house, node.folder / "images", drop_zeros=True)
    await node.remove("source")
    await node.bring_back(await node.make("r1"), snapshot, {}, Stopwatch())
    assert await asyncio.to_thread(talk.ask, "tokens") == tokens


async def test_a_gpu_without_room_is_refused_before_anything_is_made(node: Rig) -> None:
    snapshot = await captured(node)
    (device,) = snapshot.record.devices
    larger = msgspec.structs.replace(device, needed_bytes=device.total_bytes)
    snapshot.record = msgspec.structs.replace(snapshot.record, devices=(larger,))
    with pytest.raises(SnapshotError) as refused:
        await node.restore("r1", snapshot, prefetch=True)
    assert refused.value.reason is Reason.GPU_OUT_OF_MEMORY
    assert not node.houses.path("r1").exists()
    assert (await node.loader.ready()).loads == ()


async def test_a_truncated_segment_is_refused_before_criu(node: Rig) -> None:
    snapshot = await captured(node)
    path = node.store.path(snapshot.segments[0].digest)
    path.chmod(0o644)
    os.truncate(path, path.stat().st_size - 4096)
    before = await node.loader.ready()
    with pytest.raises(SnapshotError) as refused:
        await node.restore("r1", snapshot, prefetch=True)
    assert refused.value.reason is Reason.WEIGHTS_CORRUPT
    assert not (node.houses.path("r1") / "logs" / "criu-restore.log").exists()
    assert await node.loader.ready() == before


async def test_a_killed_helper_is_an_error_and_the_next_restore_works(node: Rig) -> None:
    snapshot = await captured(node)
    pid = node.driver.pid
    assert pid is not None
    os.kill(pid, signal.SIGSTOP)
    asking = asyncio.create_task(node.driver.inventory())
    await asyncio.sleep(0)
    os.kill(pid, signal.SIGKILL)
    with pytest.raises(SnapshotError) as died:
        await asking
    assert died.value.reason is Reason.CUDA_HELPER_DIED
    await node.restore("r1", snapshot, prefetch=True)
