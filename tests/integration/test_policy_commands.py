"""`dynamo-snapshot replay` and `policy` as processes: results, refusals, Ctrl-C, a kill."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

COMMAND = [sys.executable, "-m", "dynamo_snapshot.cli.main"]
ENDLESS = ("replay", "--policy", "hpa", "--seeds", "100000", "--jobs", "2")
SIMULATING = 20
"""Clock ticks after which a process has its modules and works."""
SIMULATED = 200
"""Clock ticks after which a process has done runs of a small trace."""
AZURE = "AzureLLMInferenceTrace_code.csv"


def run(*arguments: str, folder: Path | None = None) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "COLUMNS": "160"}
    return subprocess.run(
        [*COMMAND, *arguments], capture_output=True, text=True, timeout=120, env=environment, cwd=folder
    )


def children(pid: int) -> list[int]:
    """Of all its threads."""
    return [int(child) for file in Path(f"/proc/{pid}/task").glob("*/children") for child in file.read_text().split()]


def used(pid: int) -> int:
    """Clock ticks of processor time."""
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return int(fields[11]) + int(fields[12])


def end(pids: list[int]) -> bool:
    """Waits until none of them is there, at most five seconds."""
    for pid in pids:
        try:
            descriptor = os.pidfd_open(pid)
        except ProcessLookupError:
            continue
        ended, _, _ = select.select([descriptor], [], [], 5)
        os.close(descriptor)
        if not ended:
            return False
    return True


def test_a_comparison_is_a_table_json_and_a_page(tmp_path: Path) -> None:
    json_file, html_file = tmp_path / "result.json", tmp_path / "result.html"
    policies = ("--policy", "snapshot", "--policy", "static(3)", "--policy", "knative-kpa(target=4)")
    done = run("replay", *policies, "--seeds", "2", "--json", str(json_file), "--html", str(html_file))
    assert done.returncode == 0, done.stderr
    assert "knative-kpa(target=4)" in done.stdout
    assert "restore-2s" in done.stdout
    assert "cold-45s" in done.stdout
    result = json.loads(json_file.read_text())
    found = {(row["policy"], row["knob"], row["startup"], row["seed"]) for row in result["rows"]}
    assert ("static", "3", "none", 0) in found
    assert ("snapshot", "", "cold-45s", 1) in found
    assert len(result["rows"]) == len(found) == 9
    assert all(row["requests"] == 1013 for row in result["rows"])
    assert result["rows"][0]["replicas"][0][0] == 0
    assert {"environment", "settings"} <= result.keys()
    assert html_file.read_text().startswith("<!doctype html>")


def test_the_same_command_gives_the_same_figures(tmp_path: Path) -> None:
    files = [tmp_path / f"{jobs}.json" for jobs in (1, 2)]
    for jobs, file in enumerate(files, start=1):
        arguments = ("--policy", "snapshot", "--policy", "keda", "--seeds", "2", "--jobs", str(jobs))
        assert run("replay", *arguments, "--json", str(file)).returncode == 0
    one, other = (
        [
            {name: value for name, value in row.items() if name != "wall_s"}
            for row in json.loads(file.read_text())["rows"]
        ]
        for file in files
    )
    assert one == other


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("replay", "--policy", "knative"), "no policy is named knative"),
        (("replay", "--policy", "hpa(targt=3)"), "has no knob targt"),
        (("replay", "--start", "restore"), "start-up model 'restore'"),
        (("replay", "--setting", "replicas=3"), "there is no such field"),
        (("replay", "/nowhere/trace.csv"), "/nowhere/trace.csv"),
        (("policy", "tune", "--knob", "miss_cost=1,2"), "has no knob miss_cost"),
        (("policy", "explain", "/nowhere/decisions.jsonl"), "cannot be read"),
        (("policy", "verify", "/nowhere/decisions.jsonl"), "cannot be read"),
        (("policy", "bench", "/nowhere"), "/nowhere does not hold"),
    ],
)
def test_what_is_wrong_is_said_in_a_sentence_with_a_remedy(
    tmp_path: Path, arguments: tuple[str, ...], said: str
) -> None:
    done = run(*arguments, folder=tmp_path)
    assert done.returncode == 2
    assert said in done.stderr
    assert "remedy" in done.stderr
    assert "Traceback" not in done.stderr
    assert list(tmp_path.iterdir()) == []


def start(*arguments: str, ticks: int = SIMULATING) -> tuple[subprocess.Popen[str], list[int]]:
    """A command whose processes have simulated; they are two, and the one that Python keeps beside them."""
    process = subprocess.Popen(
        [*COMMAND, *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    deadline = time.monotonic() + 60
    while sum(used(child) > ticks for child in children(process.pid)) < 2:
        assert time.monotonic() < deadline
        time.sleep(0.05)  # nothing tells of processor time
    return process, children(process.pid)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_ctrl_c_and_sigterm_end_a_comparison_and_all_its_processes_at_once(tmp_path: Path, number: int) -> None:
    process, helpers = start(*ENDLESS, "--json", str(tmp_path / "result.json"))
    began = time.monotonic()
    os.killpg(process.pid, number)
    output, errors = process.communicate(timeout=10)
    assert process.returncode == 128 + number
    assert time.monotonic() - began < 5
    assert "interrupted" in output
    assert "Traceback" not in output + errors
    assert end(helpers)
    assert list(tmp_path.iterdir()) == []


def test_processes_do_not_outlive_a_killed_comparison() -> None:
    process, helpers = start(*ENDLESS)
    process.kill()
    process.communicate(timeout=10)
    assert end(helpers)


@pytest.fixture
def small_trace(tmp_path: Path) -> str:
    """A folder with one of the study's traces: a minute of it."""
    lines = [f"2023-11-16 18:17:{second:02d}.0000000,2000,10" for second in range(0, 60, 2)]
    folder = tmp_path / "traces"
    folder.mkdir()
    (folder / AZURE).write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n" + "\n".join(lines) + "\n")
    return str(folder)


def test_the_matrix_goes_on_where_it_was_and_leaves_table_and_plot(tmp_path: Path, small_trace: str) -> None:
    table, plot = tmp_path / "policy.json", tmp_path / "policy.svg"
    arguments = ("policy", "bench", small_trace, "--trace", "azure-code", "--seeds", "2", "--json", str(table))
    done = run(*arguments, "--policy", "static")
    assert done.returncode == 0, done.stderr
    before = json.loads(table.read_text())["rows"]
    assert {row["policy"] for row in before} == {"static"}
    done = run(*arguments, "--policy", "static", "--policy", "snapshot", "--plot", str(plot))
    assert done.returncode == 0, done.stderr
    assert "azure-code, first half: restore 2 s, cold start 45 s: " in done.stdout
    after = json.loads(table.read_text())
    assert [row for row in after["rows"] if row["policy"] == "static"] == before
    assert {row["half"] for row in after["rows"]} == {"first"}
    assert {verdict["knob"] for verdict in after["verdicts"]} >= {"miss_cost_s=1", "miss_cost_s=10", "miss_cost_s=100"}
    assert plot.read_text().startswith("<svg ")


def test_a_table_that_is_being_filled_is_refused_to_others_and_sigterm_keeps_what_is_done(
    tmp_path: Path, small_trace: str
) -> None:
    table = tmp_path / "policy.json"
    arguments = ("policy", "bench", small_trace, "--trace", "azure-code", "--json", str(table))
    process, helpers = start(*arguments, "--policy", "snapshot", "--seeds", "300", "--jobs", "2", ticks=SIMULATED)
    refused = run(*arguments, "--policy", "static")
    assert refused.returncode == 1
    assert f"policy.json is being filled by process {process.pid} [file_in_use]" in refused.stderr
    assert "Traceback" not in refused.stderr
    os.killpg(process.pid, signal.SIGTERM)
    output, errors = process.communicate(timeout=30)
    assert process.returncode == 128 + signal.SIGTERM
    assert f"interrupted; {table} holds what is done" in output
    assert "Traceback" not in output + errors
    assert end(helpers)
    kept = json.loads(table.read_text())["rows"]
    assert {row["policy"] for row in kept} == {"snapshot"}
    done = run(*arguments, "--policy", "static")
    assert done.returncode == 0, done.stderr
    assert [row for row in json.loads(table.read_text())["rows"] if row["policy"] == "snapshot"] == kept


def test_tuning_ends_in_a_recommendation() -> None:
    done = run("policy", "tune", "--knob", "miss_cost_s=1,100", "--seeds", "1", "--attainment", "10")
    assert done.returncode == 0, done.stderr
    assert "Take miss_cost_s=" in done.stdout
    assert "fleet of constant size" in done.stdout
