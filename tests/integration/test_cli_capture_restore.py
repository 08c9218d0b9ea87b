"""`capture` and `restore` as a person uses them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from support.agent_host import PYTHON, TOY

from dynamo_snapshot.agent.direct_folder import abandoned
from dynamo_snapshot.agent.doctor.findings import Host
from dynamo_snapshot.agent.doctor.host_checks import check_leftovers
from dynamo_snapshot.agent.entry import hold_runtime_dir
from dynamo_snapshot.agent.house import MARK
from dynamo_snapshot.agent.process import marked_processes
from dynamo_snapshot.snapshots.store import SnapshotStore

CLI = [sys.executable, "-m", "dynamo_snapshot.cli.main"]


class Place:
    def __init__(self, folder: Path, criu: Path) -> None:
        self.store, self.runtime_dir = folder / "store", folder / "run"
        self.options = ["--store", str(self.store), "--runtime-dir", str(self.runtime_dir), "--criu", str(criu)]

    def capture(self, *options: str, command: tuple[str, ...] = (PYTHON, str(TOY))) -> list[str]:
        return [*CLI, "capture", *self.options, *options, "--", *command]

    def restore(self, *arguments: str) -> list[str]:
        return [*CLI, "restore", *self.options, *arguments]

    def is_clean(self) -> bool:
        return not self.runtime_dir.exists() and not marked_processes(MARK, f"{self.runtime_dir}/", prefix=True)


@pytest.fixture
def place(tmp_path: Path, criu: Path) -> Place:
    return Place(tmp_path, criu)


def test_capture_prints_an_id_that_restore_takes(place: Place) -> None:
    captured = subprocess.run(place.capture("--env", "TOY_BOOT_S=0.1"), capture_output=True, text=True, timeout=60)
    assert captured.returncode == 0, captured.stderr
    snapshot = captured.stdout.strip()
    assert [summary.id for summary in SnapshotStore(place.store).list()] == [snapshot]
    assert "ready for snapshot" in captured.stderr
    assert place.is_clean()

    environment = {**os.environ, "DYN_NAMESPACE": "elsewhere"}
    restoring = subprocess.Popen(place.restore(snapshot), stderr=subprocess.PIPE, text=True, env=environment)
    assert restoring.stderr is not None
    seen = []
    for line in restoring.stderr:
        seen.append(line.split(maxsplit=1)[1].strip())
        if "serving after" in line:
            restoring.send_signal(signal.SIGINT)
    assert restoring.wait(20) == 0
    assert seen[0] == "restoring"
    assert seen[-1] == "the worker ended with status 0"
    assert "draining" in seen
    assert place.is_clean()


def test_a_parked_worker_serves_when_it_is_woken_and_ctrl_c_ends_one_that_is_not(place: Place) -> None:
    captured = subprocess.run(place.capture(), capture_output=True, text=True, timeout=60)
    snapshot = captured.stdout.strip()
    for wakes in (True, False):
        parking = subprocess.Popen(place.restore(snapshot, "--park"), stderr=subprocess.PIPE, text=True)
        assert parking.stderr is not None
        seen = []
        for line in parking.stderr:
            seen.append(line.split(maxsplit=1)[1].strip())
            if "parked after" in line:
                assert f"`kill -USR1 {parking.pid}` wakes it" in line
                parking.send_signal(signal.SIGUSR1 if wakes else signal.SIGINT)
            if "serving after" in line:
                parking.send_signal(signal.SIGINT)
        assert parking.wait(20) == 0, seen
        assert any("serving after" in line for line in seen) == wakes
        assert seen[-1] == "the worker ended with status 0"
        assert place.is_clean()


def test_a_command_that_fails_is_one_sentence(place: Place) -> None:
    failed = subprocess.run(
        place.capture("--env", "TOY_FLAW=die_at_boot"), capture_output=True, text=True, timeout=60
    )  # fmt: skip
    assert failed.returncode == 1
    assert failed.stdout == ""
    assert "the engine found no weights" in failed.stderr
    assert "worker_exited" in failed.stderr
    assert "Traceback" not in failed.stderr
    absent = subprocess.run(place.capture(command=("/no/such/program",)), capture_output=True, text=True, timeout=60)
    assert absent.returncode == 1
    assert "/no/such/program" in absent.stderr
    unknown = subprocess.run(place.restore("nothing-20200101"), capture_output=True, text=True, timeout=60)
    assert unknown.returncode == 1
    assert "snapshot_missing" in unknown.stderr
    assert f"`dynamo-snapshot snapshots ls --store {place.store}` lists" in unknown.stderr
    assert place.is_clean()


@pytest.mark.parametrize(
    ("options", "named"),
    [
        (("--pool", "A/..b"), "A/..b"),
        (("--pool", ""), "--pool"),
        (("--pool", "worker\n"), "worker"),
        (("--boot-timeout", "-1"), "-1"),
        (("--boot-timeout", "nan"), "nan"),
        (("--model-path", "/nowhere"), "/nowhere"),
    ],
)
def test_what_cannot_be_captured_is_refused_before_a_worker_starts(
    place: Place, options: tuple[str, ...], named: str
) -> None:
    refused = subprocess.run(place.capture(*options), capture_output=True, text=True, timeout=60)
    assert refused.returncode == 2, refused.stderr
    assert named in refused.stderr
    assert "starting" not in refused.stderr
    assert not place.store.exists()


def test_ctrl_c_before_the_worker_is_ready_leaves_nothing(place: Place) -> None:
    capturing = subprocess.Popen(
        place.capture("--env", "TOY_BOOT_S=600"), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert capturing.stderr is not None
    assert "starting" in capturing.stderr.readline()
    capturing.send_signal(signal.SIGINT)
    output, errors = capturing.communicate(timeout=20)
    assert capturing.returncode == 130
    assert output == ""
    assert "interrupted: stopped before it was done" in errors
    assert place.is_clean()
    assert SnapshotStore(place.store).list() == []


def test_ctrl_c_once_the_images_are_on_disk_ends_with_the_snapshot(place: Place) -> None:
    capturing = subprocess.Popen(place.capture(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert capturing.stderr is not None
    for line in capturing.stderr:
        if "resuming" in line:  # the source is released, and publishing goes on beside it
            capturing.send_signal(signal.SIGINT)
            break
    output, errors = capturing.communicate(timeout=30)
    assert capturing.returncode == 0, errors
    assert [summary.id for summary in SnapshotStore(place.store).list()] == [output.strip()]
    assert place.is_clean()


def test_the_worker_of_a_killed_restore_is_removed_by_the_next_one(place: Place) -> None:
    captured = subprocess.run(place.capture(), capture_output=True, text=True, timeout=60)
    snapshot = captured.stdout.strip()
    killed = subprocess.Popen(place.restore(snapshot), stderr=subprocess.PIPE, text=True)
    assert killed.stderr is not None
    assert any("serving after" in line for line in killed.stderr)
    killed.kill()
    killed.wait()
    orphans = marked_processes(MARK, f"{place.runtime_dir}/", prefix=True)
    assert orphans, "the worker outlives its command"
    assert abandoned(place.runtime_dir.parent) == [place.runtime_dir]
    host = Host(
        store_dir=place.store,
        runtime_dir=place.runtime_dir.with_name("none"),
        minimum_free_bytes=0,
        direct_dir=place.runtime_dir.parent,
    )
    [finding] = check_leftovers(host)
    assert f"process {killed.pid}, a `capture` or `restore`, was killed and left 1 replica" in finding.seen

    following = subprocess.Popen(place.restore(snapshot), stderr=subprocess.PIPE, text=True)
    assert following.stderr is not None
    said = []
    for line in following.stderr:
        said.append(line)
        if "serving after" in line:
            assert not set(orphans) & set(marked_processes(MARK, f"{place.runtime_dir}/", prefix=True))
            following.send_signal(signal.SIGINT)
    assert following.wait(20) == 0
    assert f"removed what a command that was killed had left: replica worker of process {killed.pid}" in said[0]
    assert place.is_clean()


def test_a_folder_with_other_files_is_not_taken_as_runtime_folder(place: Place) -> None:
    place.runtime_dir.mkdir()
    (place.runtime_dir / "precious").touch()
    refused = subprocess.run(place.capture(), capture_output=True, text=True, timeout=60)
    assert refused.returncode == 2
    assert f"{place.runtime_dir} has other files in it" in refused.stderr
    assert [path.name for path in place.runtime_dir.iterdir()] == ["precious"]


def test_a_folder_in_use_is_refused_in_the_options_words(place: Place) -> None:
    lock = hold_runtime_dir(place.runtime_dir)
    refused = subprocess.run(place.capture(), capture_output=True, text=True, timeout=60)
    os.close(lock)
    assert refused.returncode == 1
    assert "[runtime_dir_in_use]" in refused.stderr
    assert "name another --runtime-dir." in refused.stderr
