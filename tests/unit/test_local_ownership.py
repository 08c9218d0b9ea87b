"""Who runs the fleet of a folder, and who did and was killed."""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from dynamo_snapshot.agent.entry import LOCK
from dynamo_snapshot.errors import SnapshotError
from dynamo_snapshot.local import ownership
from dynamo_snapshot.model import Reason

KILLED = """
import os, signal, sys
from pathlib import Path
from dynamo_snapshot.local import ownership
owned = ownership.take(Path(sys.argv[1]))
os.kill(os.getpid(), signal.SIGKILL)
"""


def killed_owner(folder: Path) -> int:
    with subprocess.Popen([sys.executable, "-c", KILLED, str(folder)]) as process:
        process.wait(30)
    return process.pid


def test_an_owner_that_was_killed_is_a_deserter_until_the_next_one_has_taken_the_folder_down(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    assert ownership.deserter(folder) is None, "there was never one"
    assert ownership.deserter(folder) is None
    pid = killed_owner(folder)
    assert ownership.deserter(folder) == pid
    owned = ownership.take(folder)
    assert ownership.deserter(folder) is None, "one runs"
    owned.give_up()
    assert ownership.deserter(folder) is None, "it was taken down"


def test_an_agent_that_runs_by_itself_in_the_folder_is_no_deserters(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    pid = killed_owner(folder)
    path = folder / LOCK
    path.parent.mkdir()
    with path.open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert ownership.deserter(folder) is None
    assert ownership.deserter(folder) == pid


def test_a_second_owner_is_refused_with_the_first_ones_process(tmp_path: Path) -> None:
    owned = ownership.take(tmp_path / "run")
    with pytest.raises(SnapshotError, match=f"already runs in {tmp_path}/run, under process {os.getpid()}") as refused:
        ownership.take(tmp_path / "run")
    assert refused.value.reason is Reason.RUNTIME_DIR_IN_USE
    owned.give_up()


def test_what_was_made_for_an_owner_and_is_empty_goes_with_it(tmp_path: Path) -> None:
    folder = tmp_path / "made" / "run"
    ownership.take(folder).give_up()
    assert list(tmp_path.iterdir()) == []
    owned = ownership.take(folder)
    (folder / "logs").mkdir()
    owned.give_up()
    assert folder.is_dir(), "logs stay"
    (folder / "logs").rmdir()
    ownership.take(folder).give_up()
    assert folder.is_dir(), "it was there before"


def test_a_folder_with_other_files_is_no_fleets(tmp_path: Path) -> None:
    """What runs a fleet empties its folder."""
    folder = tmp_path / "home"
    folder.mkdir()
    (folder / "precious").touch()
    for _ in range(2):
        with pytest.raises(SnapshotError, match=f"{folder} has other files in it") as refused:
            ownership.take(folder)
        assert refused.value.reason is Reason.CONFIGURATION_INVALID
    assert [path.name for path in tmp_path.iterdir()] == ["home"]
    (folder / LOCK).parent.mkdir()
    (folder / LOCK).touch()
    ownership.take(folder).give_up()


def test_what_a_fleet_keeps_does_not_keep_the_next_one_out(tmp_path: Path) -> None:
    (tmp_path / "run" / "logs").mkdir(parents=True)
    (tmp_path / "run" / "learnt.json").touch()
    ownership.take(tmp_path / "run").give_up()


def test_who_waited_for_a_lock_that_was_removed_takes_the_one_that_is_there(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    first = ownership.take(folder)
    threading.Timer(0.05, first.give_up).start()
    second = ownership.take(folder)
    with pytest.raises(SnapshotError, match="already runs"):
        ownership.take(folder)
    second.give_up()


def test_who_only_looks_keeps_nobody_out(tmp_path: Path) -> None:
    """A look holds the lock for an instant, in which an owner may come."""
    lock = (tmp_path / ".run.lock").open("a")
    fcntl.flock(lock, fcntl.LOCK_SH)
    threading.Timer(0.05, lock.close).start()
    ownership.take(tmp_path / "run").give_up()
