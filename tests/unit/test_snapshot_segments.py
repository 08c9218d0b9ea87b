"""Weight segments: digested once for all snapshots, looked at before a restore, removed when nobody names them."""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec
import pytest
from support.snapshots import CAPTURE

from dynamo_snapshot.errors import SnapshotError
from dynamo_snapshot.model import Reason
from dynamo_snapshot.snapshots import segments as segments_module
from dynamo_snapshot.snapshots.manifest import WeightSegment
from dynamo_snapshot.snapshots.segments import UNNAMED_FOR_S
from dynamo_snapshot.snapshots.store import SnapshotStore
from worker_hooks.weights.segment import SegmentStore, digest_file


@pytest.fixture
def store(tmp_path: Path) -> SnapshotStore:
    return SnapshotStore(tmp_path / "store")


def written(store: SnapshotStore, size: int = (17 << 20) + 5) -> WeightSegment:
    """What a worker does at quiesce: random bytes under their digest."""
    scratch = store.root.parent / "scratch"
    scratch.write_bytes(os.urandom(size))
    digest = digest_file(scratch)
    with SegmentStore(store.segments.folder).writing(digest, size) as descriptor:
        os.pwrite(descriptor, scratch.read_bytes(), 0)
    return WeightSegment(address=1 << 40, size=size, device=0, tag="weights", digest=digest)


def publish(store: SnapshotStore, *weights: WeightSegment) -> str:
    with store.stage("decode") as staging:
        (staging.path / "pages-1.img").write_bytes(b"pages")
        return staging.publish(msgspec.structs.replace(CAPTURE, weights=weights)).id


def refusal(check: Callable[..., object], *arguments: object) -> SnapshotError:
    with pytest.raises(SnapshotError) as refused:
        check(*arguments)
    return refused.value


def change(store: SnapshotStore, segment: WeightSegment) -> None:
    path = store.segments.folder / segment.digest
    path.chmod(0o644)
    with path.open("r+b") as file:
        file.seek(segment.size - 1)
        byte = file.read(1)[0]
        file.seek(segment.size - 1)
        file.write(bytes([byte ^ 1]))


def test_two_captures_that_name_the_same_weights_are_published_at_once(store: SnapshotStore) -> None:
    weights = [written(store, 4096) for _ in range(40)]
    with ThreadPoolExecutor(4) as pool:
        published = list(pool.map(lambda _: publish(store, *weights), range(4)))
    assert sorted(snapshot.id for snapshot in store.list()) == sorted(published)


def test_a_segment_is_digested_once_however_many_snapshots_name_it(
    store: SnapshotStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    digested: list[str] = []
    digest_files = segments_module.digest_files

    def counted(folder: Path, sizes: dict[str, int], progress: object = None) -> object:
        digested.extend(sizes)
        return digest_files(folder, sizes)

    monkeypatch.setattr(segments_module, "digest_files", counted)
    segment = written(store)
    ids = [publish(store, segment, segment), publish(store, segment)]
    assert digested == [segment.digest]
    assert [store.check_unchanged(name).weights_bytes for name in ids] == [2 * segment.size, segment.size]
    store.verify(ids[0])
    assert digested == [segment.digest] * 2


def test_a_segment_that_is_missing_or_wrong_publishes_nothing(store: SnapshotStore) -> None:
    segment = written(store)
    change(store, segment)
    assert refusal(publish, store, segment).reason is Reason.WEIGHTS_CORRUPT
    missing = msgspec.structs.replace(segment, digest="0" * 64)
    assert refusal(publish, store, missing).reason is Reason.WEIGHTS_CORRUPT
    assert refusal(store.segments.require, [missing]).reason is Reason.WEIGHTS_CORRUPT
    assert store.list() == []


def test_a_segment_that_was_changed_or_truncated_is_seen_without_reading_it(store: SnapshotStore) -> None:
    segment = written(store)
    snapshot = publish(store, segment)
    change(store, segment)
    assert refusal(store.check_unchanged, snapshot).reason is Reason.SNAPSHOT_CHANGED
    assert store.list()[0].reason == Reason.SNAPSHOT_CHANGED
    assert refusal(store.verify, snapshot).reason is Reason.WEIGHTS_CORRUPT
    os.truncate(store.segments.folder / segment.digest, 5)
    assert refusal(store.check_unchanged, snapshot).reason is Reason.WEIGHTS_CORRUPT


def test_a_segment_that_only_was_touched_is_admitted_again(store: SnapshotStore) -> None:
    segment = written(store)
    snapshot = publish(store, segment)
    os.utime(store.segments.folder / segment.digest)
    assert refusal(store.check_unchanged, snapshot).reason is Reason.SNAPSHOT_CHANGED
    store.admit(snapshot)
    assert store.check_unchanged(snapshot).capture.weights == (segment,)


def aged(store: SnapshotStore, segment: WeightSegment) -> WeightSegment:
    past = os.stat(store.segments.folder / segment.digest).st_mtime - UNNAMED_FOR_S - 1
    os.utime(store.segments.folder / segment.digest, (past, past))
    return segment


def test_only_what_no_snapshot_names_goes_and_not_at_once(store: SnapshotStore) -> None:
    named, shared, unnamed = (aged(store, written(store, 1 << 20)) for _ in range(3))
    young = written(store, 1 << 20)
    first, second = publish(store, named, shared), publish(store, shared)
    assert store.collect_segments() == [unnamed.digest]
    store.remove(first)
    assert store.collect_segments() == [named.digest]
    assert {path.name for path in store.segments.folder.iterdir()} == {shared.digest, young.digest}
    assert store.check_unchanged(second).capture.weights == (shared,)
    assert not (store.root / ".node" / "segments" / named.digest).exists()


def test_nothing_goes_while_a_capture_is_staged_or_a_manifest_is_not_read(store: SnapshotStore) -> None:
    unnamed = aged(store, written(store, 1 << 20))
    with store.stage("decode"):
        assert store.collect_segments() == []
    snapshot = publish(store)
    (store.images(snapshot).parent / "manifest.json").write_bytes(b"{")
    assert store.collect_segments() == []
    store.remove(snapshot)
    assert store.collect_segments() == [unnamed.digest]
