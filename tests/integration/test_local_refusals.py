"""What keeps a fleet from running here is one clear sentence through the command a person types; nothing is started."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from dynamo_snapshot.errors import SnapshotError
from dynamo_snapshot.local import leftovers
from dynamo_snapshot.local.tiny_model import write_tiny_model
from dynamo_snapshot.local.up import wait_for_server
from dynamo_snapshot.model import Reason

OLD_CRIU = "#!/bin/sh\ncase $1 in --version) echo Version: 3.17.1 ;; *) exit 1 ;; esac\n"


@pytest.fixture
def fleet(tmp_path: Path, free_port: Callable[[], int]) -> dict[str, Any]:
    """A fleet that could run here."""
    write_tiny_model(tmp_path / "model")
    return {
        "model": {"name": "tiny", "path": "model"},
        "pools": {"decode": {"worker": {"command": ["dynamo-snapshot-worker", "run", "--", "python", "-m", "x"]}}},
        "agent": {"runtime_dir": str(tmp_path / "run"), "store_dir": str(tmp_path / "snapshots")},
        "frontend": {"port": free_port()},
    }


def refused(
    folder: Path, fleet: dict[str, Any], status: int, *, prefix: tuple[str, ...] = (), **environment: str
) -> str:
    """Runs `up` with ``fleet``; asserts that it ends so, with a sentence and a remedy, and that nothing ran."""
    path = folder / "fleet.yaml"
    path.write_text(yaml.safe_dump(fleet))
    done = subprocess.run(
        [*prefix, sys.executable, "-m", "dynamo_snapshot.cli.main", "up", str(path), "--plain"],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=60,
    )
    said = done.stdout + done.stderr
    assert done.returncode == status, said
    assert "Traceback" not in said
    assert done.stderr.count("error ") == 1, said
    assert "remedy " in done.stderr, said
    assert not (folder / "run").exists(), "nothing was started"
    assert not (folder / ".run.lock").exists()
    assert leftovers.count(folder / "run") == []
    assert not (folder / "snapshots").exists() or not any((folder / "snapshots").iterdir())
    return said


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"headroom_replicas": 8}, "planner: pools of role decode: headroom_replicas must be below max_replicas"),
        ({"miss_cost_s": float("inf")}, "planner.miss_cost_s: expected a finite number, not inf"),
    ],
)
def test_what_the_planner_would_refuse_at_its_start(
    tmp_path: Path, fleet: dict[str, Any], changes: dict[str, Any], said: str
) -> None:
    fleet["planner"] = changes
    assert said in refused(tmp_path, fleet, 2)


def test_no_criu(tmp_path: Path, fleet: dict[str, Any]) -> None:
    fleet["agent"]["criu"] = "/nowhere/criu"
    assert "/nowhere/criu is not an executable file [criu_missing]" in refused(tmp_path, fleet, 1)


def test_no_criu_where_the_environment_names_it(tmp_path: Path, fleet: dict[str, Any]) -> None:
    said = refused(tmp_path, fleet, 1, DYNAMO_SNAPSHOT_CRIU="/nowhere/criu")
    assert "/nowhere/criu is not an executable file [criu_missing]" in said


def test_old_criu(tmp_path: Path, fleet: dict[str, Any]) -> None:
    old = tmp_path / "criu"
    old.write_text(OLD_CRIU)
    old.chmod(0o755)
    fleet["agent"]["criu"] = str(old)
    said = refused(tmp_path, fleet, 1)
    assert f"{old} (3.17.1) cannot dump and restore a process here" in said
    assert "install-criu" in said


NO_ROOT = (
    *("setpriv", "--reuid", "1234", "--regid", "1234", "--clear-groups"),
    # Where Python itself lies in root's home.
    *("--inh-caps", "+dac_read_search", "--ambient-caps", "+dac_read_search"),
)


@pytest.fixture
def open_folder() -> Iterator[Path]:
    """A folder that every user may look into."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o755)
        yield Path(folder)


@pytest.mark.parametrize(
    "arguments",
    [
        ("up", "FLEET"),
        ("agent", "FLEET"),
        ("controller", "FLEET"),
        ("demo", "--plain"),
        ("capture", "--", "true"),
        ("restore", "any"),
    ],
    ids=lambda arguments: str(arguments[0]),
)
def test_what_needs_root_says_so_to_another_user(
    open_folder: Path, fleet: dict[str, Any], arguments: tuple[str, ...]
) -> None:
    fleet["agent"]["runtime_dir"] = str(open_folder / "run")
    (open_folder / "run").mkdir()
    temporary = open_folder / "tmp"
    temporary.mkdir()
    temporary.chmod(0o777)
    path = open_folder / "fleet.yaml"
    path.write_text(yaml.safe_dump(fleet | {"servers": {"etcd": "http://127.0.0.1:9", "nats": "nats://127.0.0.1:9"}}))
    done = subprocess.run(
        [*NO_ROOT, sys.executable, "-m", "dynamo_snapshot.cli.main"]
        + [str(path) if argument == "FLEET" else argument for argument in arguments],
        env={**os.environ, "TMPDIR": str(temporary)},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 1, done.stdout + done.stderr
    assert done.stdout == ""
    assert "[not_privileged]" in done.stderr
    assert "as root" in done.stderr
    assert list(temporary.iterdir()) == []


def test_not_root(tmp_path: Path, fleet: dict[str, Any]) -> None:
    said = refused(tmp_path, fleet, 1, prefix=("unshare", "--user"))
    assert "need root [not_privileged]" in said
    assert "as root" in said


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    folder = tmp_path / "snapshots"
    folder.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=8m", "tmpfs", str(folder)], check=True)
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


def test_no_space(tmp_path: Path, fleet: dict[str, Any], small_disk: Path) -> None:
    said = refused(tmp_path, fleet, 1)
    assert f"{small_disk} has 8 MiB free, and agent.minimum_free_bytes asks for 1024 [disk_full]" in said


def test_a_model_that_is_not_there(tmp_path: Path, fleet: dict[str, Any]) -> None:
    fleet["model"]["path"] = "elsewhere"
    said = refused(tmp_path, fleet, 2)
    assert f"model.path: {tmp_path / 'elsewhere'} is not a folder" in said


def test_a_worker_that_is_not_installed(tmp_path: Path, fleet: dict[str, Any]) -> None:
    fleet["pools"]["decode"]["worker"]["command"] = ["no-such-engine"]
    assert "pools.decode.worker.command: no-such-engine is neither beside" in refused(tmp_path, fleet, 2)


def test_a_folder_that_cannot_be_made(tmp_path: Path, fleet: dict[str, Any]) -> None:
    (tmp_path / "file").write_text("")
    fleet["agent"]["runtime_dir"] = str(tmp_path / "file" / "run")
    assert "cannot be used: Not a directory" in refused(tmp_path, fleet, 2)


@pytest.mark.parametrize("folder", [".", ""])
def test_a_folder_with_other_files_is_left_alone(tmp_path: Path, fleet: dict[str, Any], folder: str) -> None:
    fleet["agent"]["runtime_dir"] = folder
    assert f"{tmp_path} has other files in it" in refused(tmp_path, fleet, 2)
    assert {path.name for path in tmp_path.iterdir()} == {"model", "fleet.yaml"}


@pytest.mark.parametrize("option", ["--json", "--html"])
def test_a_demo_that_could_not_write_its_result_does_not_begin(tmp_path: Path, option: str) -> None:
    begun = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-m", "dynamo_snapshot.cli.main", "demo", "--plain", option, str(tmp_path / "no" / "file")],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 2
    assert f"{tmp_path / 'no' / 'file'} cannot be written: No such file or directory" in done.stderr
    assert "Traceback" not in done.stderr
    assert time.monotonic() - begun < 20


def test_a_bench_that_could_not_write_its_result_does_not_begin(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "dynamo_snapshot.cli.main", "bench", "control-path", "--json", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert f"{tmp_path} cannot be written: Is a directory" in done.stderr


@pytest.mark.parametrize(("name", "url"), [("etcd", "http://127.0.0.1:{port}"), ("nats", "nats://127.0.0.1:{port}")])
async def test_a_server_that_stays_away_is_one_sentence_in_the_end(
    name: str, url: str, free_port: Callable[[], int]
) -> None:
    said: list[str] = []
    url = url.format(port=free_port())
    with pytest.raises(SnapshotError, match=f"{name} at {url} did not answer within 2 s") as caught:
        await wait_for_server(name, url, said.append, timeout_s=2)
    assert caught.value.reason is Reason.SERVER_UNREACHABLE
    assert caught.value.remedy
    assert said == [f"waiting for {name} at {url}: 2 s left"]
