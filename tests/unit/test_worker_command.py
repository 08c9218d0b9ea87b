import os
import subprocess
import sys
from pathlib import Path

import pytest

from worker_hooks.reasons import HookError, HookReason
from worker_hooks.worker import parse_command


@pytest.mark.parametrize(
    ("command", "expected"),
    [
        (["--", "python", "-m", "dynamo.mocker"], ("dynamo.mocker", [])),
        (["python3", "-m", "dynamo.vllm", "--model", "m", "--"], ("dynamo.vllm", ["--model", "m", "--"])),
        (["--", sys.executable, "-m", "x"], ("x", [])),
    ],
)
def test_commands_that_run_in_this_process(command: list[str], expected: tuple[str, list[str]]) -> None:
    assert parse_command(command) == expected


@pytest.mark.parametrize(
    "command",
    [[], ["--"], ["vllm", "serve"], ["python", "worker.py"], ["python", "-m"], ["/nowhere/bin/python", "-m", "x"]],
)
def test_others_are_refused(command: list[str]) -> None:
    with pytest.raises(HookError, match=r"command_invalid.*python -m MODULE") as failure:
        parse_command(command)
    assert failure.value.reason is HookReason.COMMAND_INVALID


def _run(*arguments: str, **environ: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "worker_hooks.worker", *arguments]
    return subprocess.run(command, capture_output=True, text=True, env={**os.environ, **environ}, timeout=60)


def test_help_is_enough_for_a_stranger() -> None:
    text = _run("run", "--help").stdout
    for word in ("python -m dynamo.mocker", "SNAPSHOT_CONTROL_DIR", "MOCKER_BOOT_SECONDS", "exit status"):
        assert word in text


def test_a_wrong_command_is_one_sentence_and_status_2() -> None:
    done = _run("run", "--", "nginx")
    assert done.returncode == 2
    assert done.stderr.startswith("dynamo-snapshot-worker: cannot run nginx [command_invalid].")
    assert len(done.stderr.splitlines()) == 1


def test_a_module_that_does_not_exist_is_named(tmp_path: Path) -> None:
    done = _run("run", "--", "python", "-m", "no.such.module", DYNAMO_SNAPSHOT_STATE_DIR=str(tmp_path / "control"))
    assert done.returncode == 2
    assert "no module named no.such.module" in done.stderr
    assert "Traceback" not in done.stderr
