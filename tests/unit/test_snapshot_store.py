"""Staging, publishing, admitting, using and removing, on a real file system."""

from __future__ import annotations

import os
import shutil
import time
from pathlib import Path

import pytest
from support.snapshots import CAPTURE, PARTS

from dynamo_snapshot.errors import SnapshotError
from dynamo_snapshot.model import Reason
from dynamo_snapshot.snapshots import integrity
from dynamo_snapshot.snapshots import staging as staging_module
from dynamo_snapshot.snapshots.compatibility import compatibility_key
from dynamo_snapshot.snapshots.store import SnapshotStore, pool_of

FILES = {"inventory.img": b"i" * 100, "pages-1.img": os.urandom(20 << 20), "deep/er/core-1.img": b"", "stats": b"s"}


@pytest.fixture
def store(tmp_path: Path) -> SnapshotStore:
    return SnapshotStore(tmp_path / "store")


def publish(store: SnapshotStore, files: dict[str, bytes] = FILES, pool: str = "decode") -> str:
    with store.stage(pool) as staging:
        for path, data in files.items():
            (staging.path / path).parent.mkdir(parents=True, exist_ok=True)
            (staging.path / path).write_bytes(data)
        return staging.publish(CAPTURE).id


def refused(reason: Reason, *words: str) -> pytest.RaisesExc[SnapshotError]:
    return pytest.RaisesExc(
        SnapshotError, check=lambda error: error.reason is reason and all(word in str(error) for word in words)
    )


def test_published_snapshot_is_whole_admitted_and_selectable(store: SnapshotStore) -> None:
    snapshot_id = publish(store)
    [summary] = store.list()
    assert (summary.id, summary.admitted, summary.reason) == (snapshot_id, True, None)
    assert summary.compatibility_key == compatibility_key(PARTS)
    assert summary.size_bytes == sum(map(len, FILES.values()))
    manifest = store.check_unchanged(snapshot_id)
    assert {entry.path: entry.size for entry in manifest.files} == {path: len(data) for path, data in FILES.items()}
    assert manifest.capture == CAPTURE
    assert store.verify(snapshot_id) == manifest
    assert store.sweep() == []


def test_nothing_is_selectable_before_publish_nor_after_discard(store: SnapshotStore) -> None:
    with store.stage("decode") as staging:
        (staging.path / "pages-1.img").write_bytes(b"pages")
        staging.sync()
        assert store.list() == []
        with refused(Reason.SNAPSHOT_MISSING, staging.id):
            store.manifest(staging.id)
    assert list((store.root / ".staging").iterdir()) == []


def test_two_captures_of_one_pool_are_two_snapshots(store: SnapshotStore) -> None:
    first, second = publish(store), publish(store)
    assert {summary.id for summary in store.list()} == {first, second}


def test_newest_is_listed_first(tmp_path: Path) -> None:
    now = 1_700_000_000.0
    store = SnapshotStore(tmp_path, clock=lambda: now)
    old = publish(store, {"a": b"a"})
    now += 10
    new = publish(store, {"a": b"a"})
    assert [summary.id for summary in store.list()] == [new, old]


@pytest.mark.parametrize("path", ["pages-1.img", "stats"])
def test_truncated_file_is_refused_by_name(store: SnapshotStore, path: str) -> None:
    snapshot_id = publish(store)
    os.truncate(store.images(snapshot_id) / path, 0)
    for check in (store.check_unchanged, store.verify, store.admit):
        with refused(Reason.SNAPSHOT_CORRUPT, path, "truncated"):
            check(snapshot_id)
    assert store.list()[0].reason == Reason.SNAPSHOT_CORRUPT


def test_missing_file_is_refused_by_name(store: SnapshotStore) -> None:
    snapshot_id = publish(store)
    (store.images(snapshot_id) / "deep/er/core-1.img").unlink()
    for check in (store.check_unchanged, store.verify, store.admit):
        with refused(Reason.SNAPSHOT_CORRUPT, "core-1.img", "missing"):
            check(snapshot_id)


def test_changed_content_of_equal_size_is_refused_by_name(store: SnapshotStore) -> None:
    snapshot_id = publish(store)
    with (store.images(snapshot_id) / "pages-1.img").open("r+b") as file:
        file.seek(18 << 20)
        file.write(b"x" * 16)
    with refused(Reason.SNAPSHOT_CHANGED, "pages-1.img", "mtime"):
        store.check_unchanged(snapshot_id)
    with refused(Reason.SNAPSHOT_CORRUPT, "pages-1.img", "other content"):
        store.verify(snapshot_id)
    with refused(Reason.SNAPSHOT_CORRUPT, "pages-1.img"):
        store.admit(snapshot_id)


def test_change_that_hides_its_time_is_seen_by_ctime(store: SnapshotStore) -> None:
    snapshot_id = publish(store)
    path = store.images(snapshot_id) / "stats"
    before = path.stat()
    path.write_bytes(b"t")
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    with refused(Reason.SNAPSHOT_CHANGED, "stats", "ctime"):
        store.check_unchanged(snapshot_id)


def test_replaced_file_is_seen_and_admitted_again_when_its_content_is_right(store: SnapshotStore) -> None:
    snapshot_id = publish(store)
    path = store.images(snapshot_id) / "stats"
    path.with_name("new").write_bytes(FILES["stats"])
    path.with_name("new").rename(path)
    with refused(Reason.SNAPSHOT_CHANGED, "stats", "inode"):
        store.check_unchanged(snapshot_id)
    store.admit(snapshot_id)
    store.check_unchanged(snapshot_id)


def test_added_file_is_refused_by_name(store: SnapshotStore) -> None:
    snapshot_id = publish(store)
    (store.images(snapshot_id) / "restore.log").write_text("x")
    with refused(Reason.SNAPSHOT_CHANGED, "restore.log", "added"):
        store.check_unchanged(snapshot_id)
    with refused(Reason.SNAPSHOT_CORRUPT, "restore.log", "not in the manifest"):
        store.verify(snapshot_id)


def test_changed_manifest_is_refused(store: SnapshotStore) -> None:
    snapshot_id = publish(store)
    manifest = store.images(snapshot_id).parent / "manifest.json"
    data = manifest.read_bytes()
    manifest.write_bytes(data.replace(b'"source_pid": 300', b'"source_pid": 301'))
    with refused(Reason.SNAPSHOT_CHANGED, "manifest.json"):
        store.check_unchanged(snapshot_id)


def test_snapshot_of_another_node_has_to_be_admitted(store: SnapshotStore) -> None:
    snapshot_id = publish(store)
    (store.root / ".node" / "admitted" / f"{snapshot_id}.json").unlink()
    [summary] = store.list()
    assert (summary.admitted, summary.reason) == (False, None)
    with refused(Reason.SNAPSHOT_CHANGED, "not been admitted"):
        store.check_unchanged(snapshot_id)
    store.admit(snapshot_id)
    assert store.list()[0].admitted


def test_check_reads_no_content_and_takes_milliseconds(store: SnapshotStore) -> None:
    snapshot_id = publish(store, {f"file-{number}.img": b"x" * 4096 for number in range(60)})
    times = []
    for _ in range(20):
        start = time.perf_counter()
        store.check_unchanged(snapshot_id)
        times.append(time.perf_counter() - start)
    assert sorted(times)[10] < 0.010


def test_link_in_the_images_is_refused(store: SnapshotStore) -> None:
    with store.stage("decode") as staging:
        (staging.path / "parent").symlink_to("/etc/hostname")
        with refused(Reason.SNAPSHOT_CORRUPT, "parent", "not a regular file"):
            staging.publish(CAPTURE)
    assert store.list() == []


def test_file_written_during_the_digest_is_refused(store: SnapshotStore) -> None:
    with store.stage("decode") as staging:
        (staging.path / "pages-1.img").write_bytes(b"x" * (20 << 20))

        def write_meanwhile(_: int) -> None:
            os.utime(staging.path / "pages-1.img")

        with refused(Reason.SNAPSHOT_CORRUPT, "pages-1.img", "while it was digested"):
            staging.publish(CAPTURE, write_meanwhile)
    assert store.list() == []


def test_full_disk_is_named_and_publishes_nothing(store: SnapshotStore, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(path: Path, data: bytes) -> None:
        raise OSError(28, os.strerror(28))

    monkeypatch.setattr(staging_module, "write_synced", full)
    with store.stage("decode") as staging:
        (staging.path / "a").write_bytes(b"a")
        with refused(Reason.DISK_FULL, str(store.root)):
            staging.publish(CAPTURE)
    assert store.list() == []


def test_used_snapshot_cannot_be_removed_and_nested_use_counts(store: SnapshotStore) -> None:
    snapshot_id = publish(store)
    assert not store.in_use(snapshot_id)
    with store.use(snapshot_id) as images, store.use(snapshot_id):
        assert images == store.images(snapshot_id)
        assert store.in_use(snapshot_id)
        with refused(Reason.SNAPSHOT_IN_USE, snapshot_id):
            store.remove(snapshot_id)
    assert not store.in_use(snapshot_id)
    store.remove(snapshot_id)
    assert store.list() == []
    assert [path for path in store.root.rglob("*") if snapshot_id in path.name] == []


@pytest.mark.parametrize("snapshot_id", ["decode-never-made", "../../etc", ".staging", ""])
def test_unknown_snapshot_is_named(store: SnapshotStore, snapshot_id: str) -> None:
    publish(store)
    for act in (store.manifest, store.check_unchanged, store.verify, store.admit, store.remove):
        with refused(Reason.SNAPSHOT_MISSING, repr(snapshot_id)):
            act(snapshot_id)
    with refused(Reason.SNAPSHOT_MISSING), store.use(snapshot_id):
        pass


def test_empty_store_has_nothing_and_is_not_made_by_looking(store: SnapshotStore) -> None:
    assert store.list() == []
    assert store.sweep() == []
    assert not store.root.exists()


def test_sweep_takes_what_a_crash_left_and_nothing_else(store: SnapshotStore) -> None:
    snapshot_id = publish(store)
    live = store.stage("decode")
    stale = store.root / ".staging" / "decode-stale"
    (stale / "images").mkdir(parents=True)
    half = store.root / ".removed" / "decode-half"
    half.mkdir()
    (half / "pages-1.img").write_bytes(b"x")
    orphan = store.root / ".node" / "admitted" / "decode-gone.json"
    orphan.write_text("{}")
    swept = store.sweep()
    assert len(swept) == 3
    assert not stale.exists()
    assert not half.exists()
    assert not orphan.exists()
    assert live.path.is_dir()
    store.check_unchanged(snapshot_id)
    live.discard()
    assert store.sweep() == []


def test_unreadable_manifest_is_listed_with_its_reason(store: SnapshotStore) -> None:
    broken, newer = publish(store), publish(store)
    (store.images(broken).parent / "manifest.json").write_bytes(b"{}")
    manifest = store.images(newer).parent / "manifest.json"
    manifest.write_bytes(manifest.read_bytes().replace(b'"schema_version": 2', b'"schema_version": 3'))
    reasons = {summary.id: summary.reason for summary in store.list()}
    assert reasons == {broken: Reason.SNAPSHOT_CORRUPT, newer: Reason.SNAPSHOT_INCOMPATIBLE}
    with refused(Reason.SNAPSHOT_INCOMPATIBLE, "schema 3", "Upgrade"):
        store.manifest(newer)
    store.remove(broken)


def test_one_that_is_removed_while_the_list_is_made_is_not_called_corrupt(
    store: SnapshotStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    gone, stays = publish(store), publish(store)
    check = integrity.check_unchanged

    def remove_and_check(folder: Path, admission: integrity.Admission) -> None:
        if admission.snapshot_id == gone:
            store.remove(gone)
        check(folder, admission)

    monkeypatch.setattr(integrity, "check_unchanged", remove_and_check)
    assert [(summary.id, summary.reason) for summary in store.list()] == [(stays, None)]


def test_images_are_private_and_read_only(store: SnapshotStore) -> None:
    snapshot_id = publish(store)
    assert store.root.stat().st_mode & 0o077 == 0
    assert store.images(snapshot_id).stat().st_mode & 0o077 == 0
    assert (store.images(snapshot_id) / "pages-1.img").stat().st_mode & 0o777 == 0o400


def test_after_a_reboot_renumbered_files_are_to_be_admitted_again(
    store: SnapshotStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    snapshot_id, cut = publish(store), publish(store)
    os.utime(store.images(snapshot_id) / "stats")  # stands for a device number that a reboot changed
    os.truncate(store.images(cut) / "pages-1.img", 1)
    states = {summary.id: (summary.admitted, summary.reason) for summary in store.list()}
    assert states == {snapshot_id: (False, "snapshot_changed"), cut: (False, "snapshot_corrupt")}
    monkeypatch.setattr(integrity, "boot_id", lambda: "another boot")
    states = {summary.id: (summary.admitted, summary.reason) for summary in store.list()}
    assert states == {snapshot_id: (False, None), cut: (False, "snapshot_corrupt")}
    with refused(Reason.SNAPSHOT_CHANGED, "stats"):
        store.check_unchanged(snapshot_id)
    store.admit(snapshot_id)
    assert store.check_unchanged(snapshot_id).id == snapshot_id


def test_id_names_its_pool(store: SnapshotStore) -> None:
    assert pool_of(publish(store, {"a": b"a"}, "a-pool")) == "a-pool"


def test_a_staging_that_cannot_be_made_or_removed_holds_no_lock(
    store: SnapshotStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    staging = store.stage("decode")
    with monkeypatch.context() as patched:
        patched.setattr(shutil, "rmtree", full)
        with pytest.raises(OSError, match="No space"):
            staging.discard()
    assert store.sweep() == [f".removed/{staging.id}"]
    before = len(os.listdir("/proc/self/fd"))
    with monkeypatch.context() as patched:
        patched.setattr(store._layout, "create", lambda: None)
        patched.setattr(Path, "mkdir", full)
        with pytest.raises(OSError, match="No space"):
            store.stage("decode")
    assert len(os.listdir("/proc/self/fd")) == before
    assert os.listdir(store.root / ".staging") == []


def test_a_snapshot_that_is_removed_while_it_is_listed_is_left_out(
    store: SnapshotStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept, removed = publish(store), publish(store)
    check = integrity.check_unchanged

    def too_late(folder: Path, admission: integrity.Admission) -> None:
        if admission.snapshot_id == removed:
            raise FileNotFoundError(2, "No such file or directory", str(folder))
        check(folder, admission)

    monkeypatch.setattr(integrity, "check_unchanged", too_late)
    assert [summary.id for summary in store.list()] == [kept]


def test_a_use_that_comes_too_late_leaves_no_lock_file(store: SnapshotStore, monkeypatch: pytest.MonkeyPatch) -> None:
    with store.stage("decode") as staging:
        snapshot_id = staging.publish(CAPTURE).id
    create = type(store._layout).create

    def removed_meanwhile(layout: object) -> None:
        create(store._layout)
        monkeypatch.undo()
        store.remove(snapshot_id)

    monkeypatch.setattr(type(store._layout), "create", removed_meanwhile)
    with pytest.raises(SnapshotError) as caught, store.use(snapshot_id):
        pass
    assert caught.value.reason is Reason.SNAPSHOT_MISSING
    assert store.sweep() == []


def test_a_folder_that_is_no_snapshot_is_neither_listed_nor_removed(store: SnapshotStore) -> None:
    snapshot_id = publish(store)
    for name in ("mydata", "decode-2026", f"{snapshot_id}-old"):
        (store.root / name).mkdir()
        (store.root / name / "thesis.txt").write_text("years of work")
        with refused(Reason.SNAPSHOT_MISSING, name):
            store.remove(name)
        assert (store.root / name / "thesis.txt").exists()
    assert [summary.id for summary in store.list()] == [snapshot_id]
