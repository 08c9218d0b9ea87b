"""The demo in small: the same steps with a shorter trace, and the control run that must fail without the gate."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

TIMING = ("restore.ordered_to_serving_s median", "replacement.serving_s", "replacement.out_of_discovery_s")
"""Checks of how fast it is: a machine that runs tests is no place to judge them."""


def trace(path: Path, seconds: int, per_second: int, tokens: int) -> Path:
    """A trace in Mooncake's format of an even load."""
    rows = [
        {"timestamp": index * 1000 / per_second, "input_length": 32, "output_length": tokens}
        for index in range(seconds * per_second)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def demo(folder: Path, *arguments: str) -> tuple[int, dict[str, Any], str]:
    """Runs the demo; returns its exit status, its result and its output."""
    figures = folder / "demo.json"
    command = [sys.executable, "-m", "dynamo_snapshot.cli.main", "demo", "--plain", "--json", str(figures)]
    command += ["--boot-seconds", "1", "--resident-mib", "16", "--speed", "1", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240)
    output = done.stdout + done.stderr
    assert figures.exists(), output
    return done.returncode, json.loads(figures.read_text()), output


@pytest.mark.timeout(300)
def test_a_spike_a_kill_and_a_scale_in_lose_nothing_and_leave_nothing(tmp_path: Path) -> None:
    page = tmp_path / "demo.html"
    load = trace(tmp_path / "spike.jsonl", seconds=20, per_second=20, tokens=20)
    _, result, output = demo(tmp_path, "--trace", str(load), "--html", str(page))
    failed = [check for check in result["checks"] if not check["passed"] and check["name"] not in TIMING]
    assert not failed, output
    assert result["requests"]["sent"] == 400
    assert result["replacement"]["way"] == "restore"
    assert result["requests"]["migrated"] == result["requests"]["migrated_by_metric"]
    done = [order for order in result["orders"] if order["status"] == "done"]
    assert all({"phases", "unaccounted_s", "idle_cpu"} <= order.keys() for order in done)
    assert page.read_text().startswith("<!doctype html>")
    assert "The engine is Dynamo's mocker" in output


@pytest.mark.timeout(300)
def test_without_the_gate_workers_are_routed_to_before_they_serve(tmp_path: Path) -> None:
    load = trace(tmp_path / "spike.jsonl", seconds=10, per_second=10, tokens=20)
    status, result, output = demo(tmp_path, "--gate", "off", "--trace", str(load))
    assert result["routed_before_serving"] >= 1, output
    assert status == 0, output
