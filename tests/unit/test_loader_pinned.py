"""Pinned segments: within their bound, the longest unused first, and never from under a copy."""

from __future__ import annotations

from pathlib import Path

import pytest

from dynamo_snapshot.agent.loader.pinned import PinnedSegments
from dynamo_snapshot.agent.loader.wire import SegmentBytes
from worker_hooks.reasons import HookError
from worker_hooks.weights.host_memory import HostMemory
from worker_hooks.weights.pump import Pump

SIZE = 4096


@pytest.fixture
def pinned() -> PinnedSegments:
    memory = HostMemory()
    return PinnedSegments(memory, Pump(memory, lanes=1, buffers=1), capacity=2 * SIZE)


@pytest.fixture
def segments(tmp_path: Path) -> list[SegmentBytes]:
    made = []
    for name in "abc":
        (tmp_path / name).write_bytes(name.encode() * SIZE)
        made.append(SegmentBytes(path=str(tmp_path / name), size=SIZE, digest=name))
    return made


def held(pinned: PinnedSegments) -> set[str]:
    with pinned.borrowed(["a", "b", "c"]) as found:
        return set(found)


def test_what_is_pinned_is_what_the_file_holds(pinned: PinnedSegments, segments: list[SegmentBytes]) -> None:
    pinned.fill(segments[:1])
    with pinned.borrowed(["a", "b"]) as found:
        assert {digest: bytes(each.pinned.view) for digest, each in found.items()} == {"a": b"a" * SIZE}


def test_the_longest_unused_goes_first(pinned: PinnedSegments, segments: list[SegmentBytes]) -> None:
    pinned.fill(segments[:2])
    with pinned.borrowed(["a"]):
        pass
    pinned.fill(segments[2:])
    assert held(pinned) == {"a", "c"}
    assert pinned.bytes == 2 * SIZE


def test_what_is_in_use_stays(pinned: PinnedSegments, segments: list[SegmentBytes]) -> None:
    pinned.fill(segments[:2])
    with pinned.borrowed(["a"]), pinned.borrowed(["a", "b"]):
        pinned.fill(segments[2:])
        assert pinned.bytes == 2 * SIZE
    assert held(pinned) == {"a", "b"}
    pinned.fill(segments[2:])
    assert "c" in held(pinned)


def test_what_cannot_be_read_is_not_pinned(pinned: PinnedSegments, segments: list[SegmentBytes]) -> None:
    Path(segments[0].path).unlink()
    with pytest.raises(HookError, match="is missing"):
        pinned.fill(segments[:1])
    assert pinned.bytes == 0


def test_what_is_larger_than_the_bound_is_left_out(pinned: PinnedSegments, tmp_path: Path) -> None:
    (tmp_path / "large").write_bytes(bytes(3 * SIZE))
    pinned.fill([SegmentBytes(path=str(tmp_path / "large"), size=3 * SIZE, digest="large")])
    assert pinned.bytes == 0


def test_closed_it_holds_nothing(pinned: PinnedSegments, segments: list[SegmentBytes]) -> None:
    pinned.fill(segments[:2])
    pinned.close()
    assert pinned.bytes == 0
