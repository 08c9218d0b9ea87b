"""Segments: their list, their digest, and a store that publishes them whole or not at all."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dynamo_snapshot.model import Reason
from worker_hooks.reasons import HookError, HookReason
from worker_hooks.weights.segment import (
    LEAF,
    Segment,
    SegmentStore,
    combine,
    decode_segments,
    digest_file,
    encode_segments,
    leaf_offsets,
)
from worker_hooks.weights.torch_arena import lay_out

segments = st.builds(
    Segment,
    address=st.integers(0, 2**56),
    size=st.integers(1, 2**40),
    device=st.integers(0, 15),
    tag=st.sampled_from(["weights", "kv_cache"]),
    digest=st.binary(min_size=32, max_size=32).map(bytes.hex),
)


@given(st.lists(segments))
def test_a_list_survives(listed: list[Segment]) -> None:
    assert decode_segments(encode_segments(listed)) == listed


@pytest.mark.parametrize("data", [b"", b"[]", b'{"version": 2}', b'{"version": 1, "segments": [{"size": 1}]}'])
def test_a_list_that_is_none_is_refused(data: bytes) -> None:
    with pytest.raises(HookError) as refused:
        decode_segments(data)
    assert refused.value.reason is HookReason.WEIGHTS_CORRUPT


@pytest.mark.parametrize("size", [1, LEAF, LEAF + 1])
def test_the_digest_is_made_of_the_leaves(tmp_path: Path, size: int) -> None:
    data = os.urandom(size)
    (tmp_path / "file").write_bytes(data)
    leaves = [hashlib.sha256(data[at : at + LEAF]).digest() for at in leaf_offsets(size)]
    assert digest_file(tmp_path / "file") == combine(leaves)


def test_a_segment_appears_whole_or_not_at_all(tmp_path: Path) -> None:
    store = SegmentStore(tmp_path / "segments")

    def give_up() -> None:
        with store.writing("d" * 64, 4096) as descriptor:
            os.pwrite(descriptor, b"half", 0)
            raise RuntimeError("given up")

    with pytest.raises(RuntimeError, match="given up"):
        give_up()
    assert os.listdir(store.folder) == []
    with store.writing("d" * 64, 4096) as descriptor:
        assert not store.holds("d" * 64, 4096)
        os.pwrite(descriptor, bytes(4096), 0)
    assert store.holds("d" * 64, 4096)
    assert os.listdir(store.folder) == ["d" * 64]


def test_of_two_that_write_the_same_segment_the_first_one_stays(tmp_path: Path) -> None:
    store = SegmentStore(tmp_path)
    with store.writing("d" * 64, 4096) as first:
        with store.writing("d" * 64, 4096) as second:
            os.pwrite(second, b"2" * 4096, 0)
        published = store.path("d" * 64).stat()
        os.pwrite(first, b"1" * 4096, 0)
    assert store.path("d" * 64).stat() == published, "nothing of it changed, not even a time stamp"
    assert [path.name for path in tmp_path.iterdir()] == ["d" * 64]


def test_a_segment_has_one_name_from_the_moment_it_can_be_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever is killed then leaves nothing whose removal would change the file: a snapshot would not be restored."""

    def killed(*arguments: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "unlink", killed)
    store = SegmentStore(tmp_path)
    with store.writing("d" * 64, 4096):
        pass
    assert store.path("d" * 64).stat().st_nlink == 1
    assert os.listdir(tmp_path) == ["d" * 64]


@pytest.mark.parametrize("atomic", [True, False])
def test_a_segment_of_another_size_is_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, atomic: bool) -> None:
    if not atomic:  # as on a file system that cannot tell
        monkeypatch.setattr("worker_hooks.weights.segment._renamed", lambda staged, path: False)
    store = SegmentStore(tmp_path)
    store.path("d" * 64).write_bytes(b"truncated")
    with store.writing("d" * 64, 4096) as descriptor:
        os.pwrite(descriptor, b"1" * 4096, 0)
    assert store.path("d" * 64).read_bytes() == b"1" * 4096
    assert [path.name for path in tmp_path.iterdir()] == ["d" * 64]


def test_a_truncated_segment_is_refused(tmp_path: Path) -> None:
    store = SegmentStore(tmp_path)
    segment = Segment(address=0, size=4096, device=0, tag="weights", digest="e" * 64)
    with pytest.raises(HookError, match="is missing"):
        store.check(segment)
    store.path(segment.digest).write_bytes(bytes(4095))
    with pytest.raises(HookError, match="has 4095 bytes instead of 4096") as refused:
        store.check(segment)
    assert refused.value.reason is HookReason.WEIGHTS_CORRUPT


@given(st.lists(st.integers(1, 5000)))
def test_blocks_are_aligned_in_order_and_apart(sizes: list[int]) -> None:
    offsets, end = lay_out(sizes, 512)
    assert all(offset % 512 == 0 for offset in offsets)
    ends = [offset + size for offset, size in zip(offsets, sizes, strict=True)]
    assert all(stop <= start for stop, start in zip(ends, offsets[1:], strict=False))
    assert end >= (ends[-1] if ends else 0)
    assert end < sum(sizes) + 512 * len(sizes) + 1


@pytest.mark.parametrize(
    "reason",
    [
        HookReason.CUDA_MISSING,
        HookReason.GPU_OUT_OF_MEMORY,
        HookReason.LOADER_DIED,
        HookReason.WEIGHTS_CORRUPT,
        HookReason.WEIGHTS_LOAD_FAILED,
    ],
)
def test_the_agent_knows_the_reasons_of_weights(reason: HookReason) -> None:
    assert Reason(reason)
