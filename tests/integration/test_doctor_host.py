"""The doctor on this host, as a person runs it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from dynamo_snapshot.agent.doctor import examine as doctor_module
from dynamo_snapshot.agent.doctor.examine import CHECKS
from dynamo_snapshot.cli.main import build
from dynamo_snapshot.local.tiny_model import write_tiny_model


def doctor(*arguments: str) -> tuple[int, dict[str, Any]]:
    command = [sys.executable, "-m", "dynamo_snapshot.cli.main", "doctor", "--json", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.stderr == ""
    return done.returncode, json.loads(done.stdout)


def finding(report: dict[str, Any], check: str) -> dict[str, str]:
    return next(found for found in report["findings"] if found["check"] == check)


def fake_criu(tmp_path: Path, script: str) -> Path:
    criu = tmp_path / "criu"
    criu.write_text(f"#!/bin/sh\n{script}\n")
    criu.chmod(0o755)
    return criu


OLD = "case $1 in --version) echo Version: 3.17.1 ;; *) exit 1 ;; esac"


def test_this_host_can_restore(criu: Path) -> None:
    status, report = doctor("--criu", str(criu))
    assert (status, report["can_restore"]) == (0, True), report
    assert {found["check"] for found in report["findings"]} >= set(CHECKS) | {"criu check"}
    assert "dumped and restored" in finding(report, "criu")["seen"]
    assert finding(report, "dynamo")["severity"] == "ok"


def test_a_fleet_that_names_what_is_not_there_cannot_run_on_a_host_that_can_restore(criu: Path, tmp_path: Path) -> None:
    write_tiny_model(tmp_path / "model")
    fleet = tmp_path / "fleet.yaml"
    text = (
        "model: {name: tiny, path: model}\npools: {decode: {worker: {command: [python]}}}\n"
        f"agent: {{runtime_dir: run, store_dir: store, criu: {criu}}}\nplanner: {{headroom_replicas: 0}}\n"
    )
    fleet.write_text(text)
    assert doctor(str(fleet))[0] == 0
    for change, check, seen in (
        (("path: model", "path: elsewhere"), "model", f"model.path: {tmp_path}/elsewhere is not a folder"),
        (("[python]", "[no-such-engine]"), "workers", "no-such-engine is neither beside"),
        (("headroom_replicas: 0", "headroom_replicas: 8"), "planner", "headroom_replicas must be below max_replicas"),
    ):
        fleet.write_text(text.replace(*change))
        status, report = doctor(str(fleet))
        assert (status, report["can_restore"]) == (1, True), report
        assert finding(report, check)["severity"] == "error"
        assert seen in finding(report, check)["seen"]


def test_old_criu_is_an_error_with_a_remedy(tmp_path: Path) -> None:
    status, report = doctor("--criu", str(fake_criu(tmp_path, OLD)))
    assert (status, report["can_restore"]) == (1, False)
    found = finding(report, "criu")
    assert found["severity"] == "error"
    assert "3.17.1 cannot dump and restore" in found["seen"]
    assert "install-criu" in found["remedy"]


@pytest.mark.parametrize(
    ("script", "seen"), [(OLD, "3.17.1"), ("echo no criu", "says nothing usable"), (None, "is not an executable file")]
)
def test_table_names_criu_and_ends_with_the_verdict(
    script: str | None, seen: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doctor_module.examine, "__defaults__", ({"criu": CHECKS["criu"], "kernel": CHECKS["kernel"]},))
    criu = fake_criu(tmp_path, script) if script else tmp_path / "none"
    result = CliRunner().invoke(build(["doctor"]), ["doctor", "--criu", str(criu)])
    assert result.exit_code == 1
    text = " ".join(result.output.split())
    assert seen in text
    assert "CHECKPOINT_RESTORE" in text
    assert text.endswith("Restoring cannot work here: see criu above.")
