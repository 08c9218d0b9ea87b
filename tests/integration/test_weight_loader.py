"""The loader as a process of its own, on host memory: it fills, hands over, refuses, gives up, and may be killed."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest
from support.weights import detached, digests

from dynamo_snapshot.agent.loader.client import ReplicaLoad, WeightLoader
from dynamo_snapshot.agent.loader.process import MemoryKind, Settings
from dynamo_snapshot.agent.loader.run import Reading
from dynamo_snapshot.errors import SnapshotError
from dynamo_snapshot.model import Reason
from worker_hooks.weights.arena import Attached, attach
from worker_hooks.weights.handover import SOCKET
from worker_hooks.weights.host_memory import GRANULARITY, HostMemory
from worker_hooks.weights.pump import Pump
from worker_hooks.weights.segment import Segment, SegmentStore

SIZES = [8 * GRANULARITY, 9 * GRANULARITY]
ROOM = 40 * GRANULARITY


@pytest.fixture
def memory() -> HostMemory:
    return HostMemory()


@pytest.fixture
def store(tmp_path: Path) -> SegmentStore:
    return SegmentStore(tmp_path / "segments")


@pytest.fixture
def segments(memory: HostMemory, store: SegmentStore, tmp_path: Path) -> list[Segment]:
    return detached(memory, store, SIZES, tmp_path / "scratch")


@pytest.fixture
def house(tmp_path: Path) -> Path:
    # A path that no socket address holds as it is.
    folder = tmp_path / ("house" + "x" * 100)
    folder.mkdir()
    return folder


Start = Callable[..., WeightLoader]


@pytest.fixture
async def start(tmp_path: Path) -> AsyncIterator[Start]:
    made: list[WeightLoader] = []

    def make(reading: Reading = Reading.AUTO, pinned: int = 0) -> WeightLoader:
        settings = Settings(
            memory=MemoryKind.HOST,
            lanes=2,
            buffers=2,
            reading=reading,
            host_bytes=ROOM,
            pinned_segment_bytes=pinned,
        )
        made.append(WeightLoader("GPU-none", tmp_path / "loader.log", settings))
        return made[-1]

    yield make
    for loader in made:
        await loader.close()


async def take(memory: HostMemory, segments: list[Segment], store: SegmentStore, house: Path) -> Attached:
    """What a restored worker does."""
    return await asyncio.to_thread(
        attach, memory, segments, store, house / SOCKET, lambda: Pump(memory, lanes=2, buffers=2), 10
    )


@pytest.mark.parametrize("reading", list(Reading))
async def test_what_it_loads_is_what_was_kept(
    start: Start, memory: HostMemory, segments: list[Segment], store: SegmentStore, house: Path, reading: Reading
) -> None:
    loader = start(reading)
    await loader.load("r1", house, segments, store)
    loaded = await loader.finished("r1")
    assert loaded.bytes == sum(segment.size for segment in segments)
    assert loaded.direct is (reading is Reading.DIRECT)
    assert await take(memory, segments, store, house) == Attached(by_loader=2)
    assert digests(memory, segments) == [segment.digest for segment in segments]


async def test_handed_over_it_holds_nothing(
    start: Start, memory: HostMemory, segments: list[Segment], store: SegmentStore, house: Path
) -> None:
    loader = start()
    before = await loader.ready()
    await loader.load("r1", house, segments, store)
    during = await loader.ready()
    assert (during.loads, during.free_bytes) == (("r1",), before.free_bytes - sum(SIZES))
    await take(memory, segments, store, house)
    await loader.cancel("r1")
    assert await loader.ready() == before
    assert not (house / SOCKET).exists()


async def test_a_cancelled_load_leaves_nothing(
    start: Start, segments: list[Segment], store: SegmentStore, house: Path
) -> None:
    loader = start()
    before = await loader.ready()
    await loader.load("r1", house, segments, store)
    await loader.cancel("r1")
    await loader.cancel("r1")
    assert await loader.ready() == before
    assert not (house / SOCKET).exists()
    await loader.load("r1", house, segments, store)
    await loader.finished("r1")


async def test_two_loads_at_once(
    start: Start, memory: HostMemory, segments: list[Segment], store: SegmentStore, tmp_path: Path
) -> None:
    loader = start()
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        await loader.load(name, tmp_path / name, segments, store)
    assert set((await loader.ready()).loads) == {"a", "b"}
    assert await take(memory, segments, store, tmp_path / "b") == Attached(by_loader=2)
    await loader.finished("a")


async def test_no_room_is_refused_at_once(
    start: Start, segments: list[Segment], store: SegmentStore, house: Path
) -> None:
    loader = start()
    before = await loader.ready()
    with pytest.raises(SnapshotError) as refused:
        await loader.load("r1", house, segments * 3, store)
    assert refused.value.reason is Reason.GPU_OUT_OF_MEMORY
    assert await loader.ready() == before
    assert not (house / SOCKET).exists()


async def test_a_truncated_segment_is_refused_at_once(
    start: Start, segments: list[Segment], store: SegmentStore, house: Path
) -> None:
    path = store.path(segments[1].digest)
    path.chmod(0o644)
    os.truncate(path, 4096)
    loader = start()
    before = await loader.ready()
    with pytest.raises(SnapshotError, match="has 4096 bytes") as refused:
        await loader.load("r1", house, segments, store)
    assert refused.value.reason is Reason.WEIGHTS_CORRUPT
    assert await loader.ready() == before


async def test_a_name_in_use_is_refused(
    start: Start, segments: list[Segment], store: SegmentStore, house: Path, tmp_path: Path
) -> None:
    loader = start()
    await loader.load("r1", house, segments, store)
    with pytest.raises(SnapshotError, match="under way"):
        await loader.load("r1", tmp_path, segments, store)
    with pytest.raises(SnapshotError, match="no load named r2"):
        await loader.finished("r2")


async def test_a_killed_loader_has_a_reason_and_the_worker_loads_by_itself(
    start: Start, memory: HostMemory, segments: list[Segment], store: SegmentStore, house: Path
) -> None:
    loader = start()
    await loader.load("r1", house, segments, store)
    waiting = asyncio.create_task(loader.finished("never"))
    with pytest.raises(SnapshotError, match="no load named"):
        await waiting
    assert loader.pid is not None
    os.kill(loader.pid, signal.SIGKILL)
    attached = await take(memory, segments, store, house)
    assert attached.by_loader == 0
    assert attached.why.startswith("loader_died")
    assert digests(memory, segments) == [segment.digest for segment in segments]
    assert (await loader.ready()).loads == ()


@pytest.mark.parametrize("log_is_there", [True, False])
async def test_requests_under_way_die_with_it(
    start: Start, segments: list[Segment], store: SegmentStore, house: Path, tmp_path: Path, log_is_there: bool
) -> None:
    loader = start()
    await loader.ready()
    assert loader.pid is not None
    if not log_is_there:
        (tmp_path / "loader.log").unlink()
    os.kill(loader.pid, signal.SIGSTOP)
    loading = asyncio.create_task(loader.load("r1", house, segments, store))
    await asyncio.sleep(0)
    os.kill(loader.pid, signal.SIGKILL)
    with pytest.raises(SnapshotError, match="ended with -9") as died:
        await loading
    assert died.value.reason is Reason.LOADER_DIED


async def test_prefetched_segments_are_in_the_page_cache(
    start: Start, segments: list[Segment], store: SegmentStore
) -> None:
    loader = start()
    size = sum(segment.size for segment in segments)
    for segment in segments:
        descriptor = os.open(store.path(segment.digest), os.O_RDONLY)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)
    first = await loader.prefetch(segments, store)
    second = await loader.prefetch(segments, store)
    assert first.cached_bytes < size
    assert (second.bytes, second.cached_bytes) == (size, size)


async def test_pinned_segments_need_no_file(
    start: Start, memory: HostMemory, segments: list[Segment], store: SegmentStore, house: Path
) -> None:
    loader = start(pinned=sum(SIZES))
    before = (await loader.ready()).pinned_bytes
    await loader.prefetch(segments, store, pin=True)
    assert (await loader.ready()).pinned_bytes == before + sum(SIZES)
    for segment in segments:
        store.path(segment.digest).unlink()
    await loader.load("r1", house, segments, store)
    assert (await loader.finished("r1")).pinned_bytes == sum(SIZES)
    assert await take(memory, segments, store, house) == Attached(by_loader=2)
    assert digests(memory, segments) == [segment.digest for segment in segments]


async def test_pinned_memory_is_bounded_and_the_longest_unused_goes(
    start: Start, segments: list[Segment], store: SegmentStore
) -> None:
    first, second = segments
    loader = start(pinned=second.size)
    before = (await loader.ready()).pinned_bytes
    await loader.prefetch([first], store, pin=True)
    assert (await loader.ready()).pinned_bytes == before + first.size
    await loader.prefetch([second], store, pin=True)
    assert (await loader.ready()).pinned_bytes == before + second.size


async def begun(load: ReplicaLoad, loader: WeightLoader) -> asyncio.Task[None]:
    """Returns once the loader has been asked, whatever becomes of that."""
    beginning = asyncio.create_task(load.begin())
    async with asyncio.timeout(10):
        while "requests=1" not in repr(loader):  # noqa: ASYNC110  a task brings it about
            await asyncio.sleep(0)
    return beginning


async def test_a_loader_that_dies_at_any_moment_does_not_fail_the_restore(
    start: Start, memory: HostMemory, segments: list[Segment], store: SegmentStore, house: Path
) -> None:
    loader = start()
    await loader.ready()
    assert loader.pid is not None
    os.kill(loader.pid, signal.SIGSTOP)
    load = ReplicaLoad(loader, "r1", house, segments, store)
    beginning = await begun(load, loader)
    os.kill(loader.pid, signal.SIGKILL)
    await beginning
    assert "loader_died" in load.lost
    assert await load.finished() is None

    again = ReplicaLoad(loader, "r2", house, segments, store)
    await again.begin()
    assert loader.pid is not None
    os.kill(loader.pid, signal.SIGKILL)
    assert await again.finished() is None
    assert "loader_died" in again.lost
    await again.give_up()
    assert loader.pid is None, "nothing is held by a loader that would have to be started for it"
    assert (house / SOCKET).exists(), "a killed loader leaves its socket"
    third = ReplicaLoad(loader, "r2", house, segments, store)
    await third.begin()
    assert third.lost == ""
    assert loader.pid is not None
    os.kill(loader.pid, signal.SIGKILL)
    assert (await take(memory, segments, store, house)).by_loader == 0
    assert digests(memory, segments) == [segment.digest for segment in segments]


async def test_what_the_worker_could_not_do_better_fails_the_restore(
    start: Start, segments: list[Segment], store: SegmentStore, house: Path
) -> None:
    with pytest.raises(SnapshotError) as refused:
        await ReplicaLoad(start(), "r1", house, segments * 3, store).begin()
    assert refused.value.reason is Reason.GPU_OUT_OF_MEMORY
    store.path(segments[0].digest).unlink()
    with pytest.raises(SnapshotError) as corrupt:
        await ReplicaLoad(start(), "r1", house, segments, store).begin()
    assert corrupt.value.reason is Reason.WEIGHTS_CORRUPT


async def test_a_load_whose_order_ends_while_memory_is_made_leaves_nothing(
    start: Start, segments: list[Segment], store: SegmentStore, house: Path
) -> None:
    loader = start()
    before = await loader.ready()
    assert loader.pid is not None
    os.kill(loader.pid, signal.SIGSTOP)
    load = ReplicaLoad(loader, "r1", house, segments, store)
    beginning = await begun(load, loader)
    beginning.cancel()
    await asyncio.wait({beginning})
    giving_up = asyncio.create_task(load.give_up())
    os.kill(loader.pid, signal.SIGCONT)
    await giving_up
    assert await loader.ready() == before


async def test_a_load_can_be_given_up_while_its_loader_is_being_ended(
    start: Start, segments: list[Segment], store: SegmentStore, house: Path
) -> None:
    loader = start()
    await loader.ready()
    assert loader.pid is not None
    os.kill(loader.pid, signal.SIGSTOP)
    load = ReplicaLoad(loader, "r1", house, segments, store)
    await begun(load, loader)
    giving_up, closing = asyncio.create_task(load.give_up()), asyncio.create_task(loader.close())
    await asyncio.wait({closing}, timeout=0.05)
    os.kill(loader.pid, signal.SIGCONT)
    await asyncio.gather(giving_up, closing)
    assert loader.pid is None


async def test_a_load_given_up_leaves_nothing(
    start: Start, segments: list[Segment], store: SegmentStore, house: Path
) -> None:
    loader = start()
    before = await loader.ready()
    load = ReplicaLoad(loader, "r1", house, segments, store)
    await load.begin()
    assert (await load.finished()) is not None
    await load.give_up()
    await load.give_up()
    assert await loader.ready() == before
