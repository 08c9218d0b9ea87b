"""One store, several processes, real signals and real CRIU images."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from support.snapshots import CAPTURE

from dynamo_snapshot.errors import SnapshotError
from dynamo_snapshot.snapshots.store import SnapshotStore

PAGES = os.urandom(20 << 20)


@pytest.fixture
def store(tmp_path: Path) -> SnapshotStore:
    return SnapshotStore(tmp_path / "store")


def publish(store: SnapshotStore) -> str:
    with store.stage("decode") as staging:
        (staging.path / "pages-1.img").write_bytes(PAGES)
        (staging.path / "inventory.img").write_bytes(b"inventory")
        return staging.publish(CAPTURE).id


def cli(store: SnapshotStore, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "dynamo_snapshot.cli.main", "snapshots", *arguments, "--store", str(store.root)]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


@contextmanager
def python(program: str, *arguments: str) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-c", program, *arguments]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    with process:
        try:
            yield process
        finally:
            process.kill()


USES = """
import sys
from pathlib import Path
from dynamo_snapshot.snapshots.store import SnapshotStore
with SnapshotStore(Path(sys.argv[1])).use(sys.argv[2]):
    print("using", flush=True)
    sys.stdin.read()
"""


def test_snapshot_used_by_another_process_cannot_be_removed_until_that_ends(store: SnapshotStore) -> None:
    snapshot_id = publish(store)
    with python(USES, str(store.root), snapshot_id) as user:
        assert user.stdout
        assert user.stdout.readline() == "using\n"
        refused = cli(store, "rm", snapshot_id)
        assert refused.returncode == 1
        assert "[snapshot_in_use]" in refused.stderr
        assert "in use" in cli(store, "ls").stdout
        store.check_unchanged(snapshot_id)
        user.send_signal(signal.SIGKILL)
        user.wait()
    removed = cli(store, "rm", snapshot_id)
    assert (removed.returncode, removed.stdout) == (0, f"removed {snapshot_id}\n")
    assert store.list() == []


def test_program_started_during_use_does_not_hold_the_snapshot(store: SnapshotStore) -> None:
    snapshot_id = publish(store)
    with store.use(snapshot_id):
        sleeper = subprocess.Popen(["sleep", "60"], close_fds=False)
    try:
        assert not store.in_use(snapshot_id)
    finally:
        sleeper.kill()
        sleeper.wait()


# Publishes and kills itself with signal 9 in the middle of the named step.
PUBLISHES = """
import os, signal, sys
from pathlib import Path
sys.path.insert(0, sys.argv[1])
from support.snapshots import CAPTURE
from dynamo_snapshot.snapshots import staging as module
from dynamo_snapshot.snapshots.store import SnapshotStore

def die(*_, **__):
    os.kill(os.getpid(), signal.SIGKILL)

store = SnapshotStore(Path(sys.argv[2]))
staging = store.stage("decode")
(staging.path / "pages-1.img").write_bytes(os.urandom(20 << 20))
step = sys.argv[3]
if step == "dump":
    die()
if step == "after rename":
    real = module.sync_path
    module.sync_path = lambda path: die() if path == store.root else real(path)
elif step != "digest":
    setattr(module, step, die)
staging.publish(CAPTURE, die if step == "digest" else None)
"""


@pytest.mark.parametrize("step", ["dump", "sync_tree", "digest", "write_synced", "replace_synced", "after rename"])
def test_kill_during_publish_leaves_a_whole_snapshot_or_none(step: str, store: SnapshotStore) -> None:
    older = publish(store)
    with python(PUBLISHES, str(Path(__file__).parents[1]), str(store.root), step) as publisher:
        assert publisher.wait(60) == -signal.SIGKILL
    new = [summary.id for summary in store.list() if summary.id != older]
    assert len(new) == (1 if step == "after rename" else 0)
    for snapshot_id in new:
        store.check_unchanged(snapshot_id)
        store.verify(snapshot_id)
    store.sweep()
    assert list((store.root / ".staging").iterdir()) == []
    assert list((store.root / ".removed").iterdir()) == []
    assert len(list((store.root / ".node/admitted").iterdir())) == 1 + len(new)
    store.check_unchanged(older)


def test_sweep_of_one_process_leaves_the_staging_of_another(store: SnapshotStore) -> None:
    program = """
import sys
from pathlib import Path
from dynamo_snapshot.snapshots.store import SnapshotStore
staging = SnapshotStore(Path(sys.argv[1])).stage("decode")
print(staging.path, flush=True)
sys.stdin.read()
"""
    with python(program, str(store.root)) as stager:
        assert stager.stdout
        path = Path(stager.stdout.readline().strip())
        assert store.sweep() == []
        assert path.is_dir()
        stager.send_signal(signal.SIGKILL)
        stager.wait()
    assert len(store.sweep()) == 1
    assert not path.exists()


USES_ALL = """
import sys
from pathlib import Path
from dynamo_snapshot.errors import SnapshotError
from dynamo_snapshot.snapshots.store import SnapshotStore
store = SnapshotStore(Path(sys.argv[1]))
used = 0
sys.stdin.readline()
while ids := [summary.id for summary in store.list()]:
    for snapshot_id in ids:
        try:
            with store.use(snapshot_id) as images:
                for _ in range(20):
                    assert (images / "inventory.img").read_bytes() == b"inventory", "removed while in use"
                used += 1
        except SnapshotError as error:
            assert error.reason == "snapshot_missing", error
print(used)
"""


def test_users_and_a_remover_racing_never_meet(store: SnapshotStore) -> None:
    for _ in range(30):
        with store.stage("decode") as staging:
            (staging.path / "inventory.img").write_bytes(b"inventory")
            staging.publish(CAPTURE)
    with python(USES_ALL, str(store.root)) as one, python(USES_ALL, str(store.root)) as two:
        for process in (one, two):
            assert process.stdin
            process.stdin.write("go\n")
            process.stdin.flush()
        deadline = time.monotonic() + 60
        while ids := [summary.id for summary in store.list()]:
            assert time.monotonic() < deadline
            for snapshot_id in ids:
                try:
                    store.remove(snapshot_id)
                except SnapshotError as error:
                    if error.reason != "snapshot_in_use":
                        raise
        assert [process.wait(60) for process in (one, two)] == [0, 0]
    assert store.sweep() == []


def test_truncated_and_touched_snapshots_are_refused_by_name_on_the_command_line(store: SnapshotStore) -> None:
    cut, touched, whole = publish(store), publish(store), publish(store)
    os.truncate(store.images(cut) / "pages-1.img", 1000)
    os.utime(store.images(touched) / "inventory.img")
    start = time.perf_counter()
    for snapshot_id, reason, name in ((cut, "corrupt", "pages-1.img"), (touched, "changed", "inventory.img")):
        with pytest.raises(SnapshotError, match=name) as caught:
            store.check_unchanged(snapshot_id)
        assert caught.value.reason == f"snapshot_{reason}"
    assert time.perf_counter() - start < 0.5
    verified = cli(store, "verify", "--all")
    assert verified.returncode == 1
    assert f"{cut}: pages-1.img is truncated: 1000 of {len(PAGES)} bytes" in verified.stdout
    assert verified.stdout.count("ok ") == 2
    assert f"Remove it with `dynamo-snapshot snapshots rm {cut} --store {store.root}`" in verified.stdout
    (store.root / cut / "manifest.json").unlink()
    for command, snapshot_id, remedy in (("show", cut, f"rm {cut}"), ("rm", "none", "ls")):
        refused = cli(store, command, snapshot_id)
        assert refused.returncode == 1
        assert f"`dynamo-snapshot snapshots {remedy} --store {store.root}`" in refused.stderr
    # Its content was right, so it is admitted anew.
    store.check_unchanged(touched)
    store.check_unchanged(whole)


SOURCE = """
import os, sys, time
memory = os.urandom(8 << 20)
open(sys.argv[1] + ".tmp", "w").close()
os.rename(sys.argv[1] + ".tmp", sys.argv[1])
while not os.path.exists(sys.argv[2]):
    time.sleep(0.005)
"""


def test_restoring_real_images_does_not_change_them(store: SnapshotStore, criu: Path, tmp_path: Path) -> None:
    ready, end, work = tmp_path / "ready", tmp_path / "end", tmp_path / "work"
    work.mkdir()
    source = subprocess.Popen(
        [sys.executable, "-I", "-S", "-c", SOURCE, str(ready), str(end)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    staging = store.stage("decode")
    try:
        deadline = time.monotonic() + 10
        while not ready.exists():
            assert time.monotonic() < deadline
            time.sleep(0.005)
        dump = [criu, "dump", "-t", str(source.pid), "-D", staging.path, "-W", work, "-o", "dump.log", "-v4"]
        subprocess.run(dump, check=True, timeout=60)
    finally:
        source.kill()
        source.wait()
    snapshot_id = staging.publish(CAPTURE).id
    end.touch()
    for _ in range(2):
        with store.use(snapshot_id) as images:
            store.check_unchanged(snapshot_id)
            restore = [criu, "restore", "-D", images, "-W", work, "-o", "restore.log", "-v4"]
            subprocess.run(
                ["unshare", "--pid", "--fork", "--mount-proc", "--kill-child", *restore], check=True, timeout=60
            )
    store.check_unchanged(snapshot_id)
    store.verify(snapshot_id)
    assert store.manifest(snapshot_id).size_bytes > 8 << 20
