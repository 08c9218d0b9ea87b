"""An arena's memory is given up and comes back at its address, byte for byte, or it says why not."""

from __future__ import annotations

import os
import threading
from contextlib import suppress
from pathlib import Path

import pytest
from support.weights import detached, digests

from worker_hooks.reasons import HookError, HookReason
from worker_hooks.weights import handover
from worker_hooks.weights.arena import Attached, attach, detach, keep
from worker_hooks.weights.host_memory import GRANULARITY, HostMemory
from worker_hooks.weights.pump import CHUNK, Pump, SegmentFile, Transfer
from worker_hooks.weights.segment import Segment, SegmentStore, digest_file

SIZES = [GRANULARITY, CHUNK + GRANULARITY, 3 * GRANULARITY]


@pytest.fixture
def memory() -> HostMemory:
    return HostMemory()


@pytest.fixture
def store(tmp_path: Path) -> SegmentStore:
    return SegmentStore(tmp_path / "segments")


@pytest.fixture
def segments(memory: HostMemory, store: SegmentStore, tmp_path: Path) -> list[Segment]:
    return detached(memory, store, SIZES, tmp_path / "scratch")


def bring_back(
    memory: HostMemory, segments: list[Segment], store: SegmentStore, loader: Path | None = None, timeout_s: float = 5
) -> Attached:
    return attach(memory, segments, store, loader, lambda: Pump(memory, lanes=3, buffers=2), timeout_s)


class Server:
    """A loader as the handover sees one: serves one connection with what the test wants."""

    def __init__(self, path: Path) -> None:
        self._listener = handover.listen(path)

    def hand_over(self, memory: HostMemory, segments: list[Segment], store: SegmentStore, stop_after: int = 99) -> None:
        def run() -> None:
            connection, _ = self._listener.accept()
            # A worker that was handed the wrong bytes hangs up.
            with connection, self._listener, suppress(BrokenPipeError):
                for index, segment in enumerate(segments[:stop_after]):
                    handle = memory.create(segment.size)
                    os.pwrite(handle, store.path(segment.digest).read_bytes(), 0)
                    descriptor = memory.export(handle)
                    handover.send(connection, index, segment.digest, segment.size, descriptor)
                    os.close(descriptor)
                    memory.release(handle)

        self.thread = threading.Thread(target=run)
        self.thread.start()

    def fail(self, failure: HookError) -> None:
        def run() -> None:
            connection, _ = self._listener.accept()
            with connection, self._listener:
                handover.send_failure(connection, failure)

        self.thread = threading.Thread(target=run)
        self.thread.start()


def test_detached_segments_hold_no_memory(memory: HostMemory, segments: list[Segment]) -> None:
    assert memory.free_bytes() == HostMemory().free_bytes()


def test_the_store_has_what_the_device_had(store: SegmentStore, segments: list[Segment]) -> None:
    for segment in segments:
        assert digest_file(store.path(segment.digest)) == segment.digest


def test_without_a_loader_the_worker_loads(memory: HostMemory, segments: list[Segment], store: SegmentStore) -> None:
    assert bring_back(memory, segments, store) == Attached(by_loader=0)
    assert digests(memory, segments) == [segment.digest for segment in segments]


def test_known_bytes_are_not_written_again(memory: HostMemory, segments: list[Segment], store: SegmentStore) -> None:
    bring_back(memory, segments, store)
    inodes = {path.name: path.stat().st_ino for path in store.folder.iterdir()}
    pump = Pump(memory, lanes=2, buffers=2)
    again = [keep(memory, pump, store, segment.address, segment.size, "weights") for segment in segments]
    pump.close()
    detach(memory, again)
    assert again == segments
    assert {path.name: path.stat().st_ino for path in store.folder.iterdir()} == inodes


def test_a_loader_hands_them_over(
    memory: HostMemory, segments: list[Segment], store: SegmentStore, tmp_path: Path
) -> None:
    path = tmp_path / handover.SOCKET
    server = Server(path)
    server.hand_over(memory, segments, store)
    assert bring_back(memory, segments, store, path) == Attached(by_loader=3)
    server.thread.join()
    assert digests(memory, segments) == [segment.digest for segment in segments]


@pytest.mark.parametrize("after", [0, 1, 2])
def test_a_loader_that_dies_leaves_the_rest_to_the_worker(
    memory: HostMemory, segments: list[Segment], store: SegmentStore, tmp_path: Path, after: int
) -> None:
    path = tmp_path / handover.SOCKET
    server = Server(path)
    server.hand_over(memory, segments, store, stop_after=after)
    attached = bring_back(memory, segments, store, path)
    server.thread.join()
    assert attached.by_loader == after
    assert attached.why.startswith(HookReason.LOADER_DIED)
    assert digests(memory, segments) == [segment.digest for segment in segments]


def test_no_loader_at_all_is_a_dead_loader(
    memory: HostMemory, segments: list[Segment], store: SegmentStore, tmp_path: Path
) -> None:
    assert bring_back(memory, segments, store, tmp_path / "nobody").why.startswith(HookReason.LOADER_DIED)


def test_a_silent_loader_is_waited_for_only_so_long(
    memory: HostMemory, segments: list[Segment], store: SegmentStore, tmp_path: Path
) -> None:
    path = tmp_path / handover.SOCKET
    with handover.listen(path):
        attached = bring_back(memory, segments, store, path, timeout_s=0.05)
    assert attached.by_loader == 0
    assert "fell silent" in attached.why


def test_a_loader_without_room_leaves_it_to_the_worker(
    memory: HostMemory, segments: list[Segment], store: SegmentStore, tmp_path: Path
) -> None:
    path = tmp_path / handover.SOCKET
    Server(path).fail(HookError(HookReason.WEIGHTS_LOAD_FAILED, "an error of reading"))
    assert bring_back(memory, segments, store, path).why == "weights_load_failed: an error of reading"


def test_other_bytes_than_those_due_are_refused(
    memory: HostMemory, segments: list[Segment], store: SegmentStore, tmp_path: Path
) -> None:
    path = tmp_path / handover.SOCKET
    server = Server(path)
    server.hand_over(memory, segments[::-1], store)
    with pytest.raises(HookError, match="was due") as refused:
        bring_back(memory, segments, store, path)
    server.thread.join()
    assert refused.value.reason is HookReason.WEIGHTS_CORRUPT


def test_a_truncated_segment_is_refused_before_memory_is_made(
    memory: HostMemory, segments: list[Segment], store: SegmentStore
) -> None:
    path = store.path(segments[1].digest)
    path.chmod(0o644)
    os.truncate(path, segments[1].size - 1)
    before = memory.free_bytes()
    with pytest.raises(HookError, match="instead of") as refused:
        bring_back(memory, segments, store)
    assert refused.value.reason is HookReason.WEIGHTS_CORRUPT
    assert memory.free_bytes() == before


def test_a_file_that_shrinks_while_it_is_read_is_noticed(
    memory: HostMemory, segments: list[Segment], store: SegmentStore
) -> None:
    segment = segments[1]
    file = SegmentFile(store.path(segment.digest), segment.size)
    store.path(segment.digest).chmod(0o644)
    os.truncate(store.path(segment.digest), GRANULARITY)
    pump = Pump(memory, lanes=2, buffers=2)
    handle = memory.create(segment.size)
    memory.map(segment.address, segment.size, handle)
    with pytest.raises(HookError, match="ends at byte") as noticed:
        pump.load([Transfer(file, segment.address)])
    assert noticed.value.reason is HookReason.WEIGHTS_CORRUPT
    pump.close()


def test_no_more_lanes_take_part_than_allowed(
    memory: HostMemory, segments: list[Segment], store: SegmentStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Shown by the lanes that enter, for whichever is quicker takes the chunks."""
    segment = segments[1]
    memory.map(segment.address, segment.size, memory.create(segment.size))
    pump = Pump(memory, lanes=3, buffers=1)
    entered: list[int] = []
    kind = type(memory.lane(1, 1))
    enter = kind.enter
    monkeypatch.setattr(kind, "enter", lambda lane: (entered.append(id(lane)), enter(lane)))
    pump.load([Transfer(SegmentFile(store.path(segment.digest), segment.size), segment.address)], lanes=2)
    assert len(entered) == 2
    assert pump.digest(segment.address, segment.size) == segment.digest
    pump.close()


def test_a_pump_without_lanes_says_so_and_does_not_call_nothing_a_load(
    memory: HostMemory, segments: list[Segment], store: SegmentStore
) -> None:
    segment = segments[1]
    memory.map(segment.address, segment.size, memory.create(segment.size))
    pump = Pump(memory, lanes=2, buffers=1)
    transfer = Transfer(SegmentFile(store.path(segment.digest), segment.size), segment.address)
    with pytest.raises(HookError, match="no lane"):
        pump.load([transfer], lanes=0)
    pump.close()
    for use in (lambda: pump.load([transfer]), lambda: pump.digest(segment.address, segment.size)):
        with pytest.raises(HookError, match="no lane") as refused:
            use()
        assert refused.value.reason is HookReason.WEIGHTS_LOAD_FAILED


def test_a_cancelled_load_ends(memory: HostMemory, segments: list[Segment], store: SegmentStore) -> None:
    cancelled = threading.Event()
    cancelled.set()
    segment = segments[1]
    pump = Pump(memory, lanes=2, buffers=2)
    with pytest.raises(HookError, match="cancelled"):
        pump.load([Transfer(SegmentFile(store.path(segment.digest), segment.size), segment.address)], cancelled)
    pump.close()


def test_direct_reading_gives_the_same_bytes(memory: HostMemory, segments: list[Segment], store: SegmentStore) -> None:
    segment = segments[1]
    handle = memory.create(segment.size)
    memory.map(segment.address, segment.size, handle)
    pump = Pump(memory, lanes=2, buffers=2)
    file = SegmentFile(store.path(segment.digest), segment.size, direct=True)
    pump.load([Transfer(file, segment.address)])
    assert pump.digest(segment.address, segment.size) == segment.digest
    pump.close()
