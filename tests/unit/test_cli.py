"""The command line as a stranger meets it: help, and errors that are sentences."""

from __future__ import annotations

import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest
import typer

from dynamo_snapshot.cli.direct import in_options, note_relative_paths, settings
from dynamo_snapshot.cli.main import COMMANDS, explain, paragraphs
from dynamo_snapshot.cli.stores import in_store
from dynamo_snapshot.config import load_fleet
from dynamo_snapshot.errors import SnapshotError
from dynamo_snapshot.local.up import LocalFleet
from dynamo_snapshot.model import Reason

EXAMPLE = Path(__file__).parents[2] / "examples" / "fleet.yaml"


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "dynamo_snapshot.cli.main", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=60)


def test_help_lists_every_command_and_imports_none() -> None:
    program = (
        "import sys; sys.argv = ['dynamo-snapshot', '--help']\n"
        "from dynamo_snapshot.cli.main import main\n"
        "try: main()\n"
        "except SystemExit as end: assert not end.code\n"
        "heavy = ('dynamo_snapshot.local', 'aiohttp', 'pydantic')\n"
        "assert not [name for name in sys.modules if name.startswith(heavy)]\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    for name in COMMANDS:
        assert name in done.stdout


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_is_there_and_explains_itself(name: str) -> None:
    entry = COMMANDS[name]
    target = getattr(import_module(f"dynamo_snapshot.cli.{entry.module}"), entry.attribute)
    assert isinstance(target, typer.Typer) or target.__doc__
    done = run(name, "--help")
    assert done.returncode == 0, done.stderr
    assert "Usage:" in done.stdout


def test_an_unknown_command_is_a_usage_error_with_a_suggestion() -> None:
    done = run("dmo")
    assert done.returncode == 2
    assert "demo" in done.stderr


def test_a_wrong_fleet_is_refused_with_file_line_field_and_remedy(tmp_path: Path) -> None:
    wrong = tmp_path / "fleet.yaml"
    wrong.write_text("model:\n  name: tiny\n  path: .\npools:\n  decode:\n    worker:\n      comand: [x]\n")
    done = run("up", str(wrong))
    assert done.returncode == 2
    assert f"{wrong}:7: pools.decode.worker.comand" in done.stderr
    assert "remedy" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("arguments", [("--help",), ("snapshots", "ls", "--store", "/tmp"), ("snapshots", "--help")])
def test_output_that_has_no_place_is_a_sentence(arguments: tuple[str, ...]) -> None:
    command = [sys.executable, "-m", "dynamo_snapshot.cli.main", *arguments]
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, timeout=60)
    assert done.returncode == 1
    assert "No space left on device [disk_full]" in done.stderr
    assert "Traceback" not in done.stderr
    assert "Exception ignored" not in done.stderr


def test_status_says_clearly_that_nothing_runs(tmp_path: Path) -> None:
    done = run("status", "--runtime-dir", str(tmp_path))
    assert done.returncode == 1
    assert "no fleet runs here" in done.stderr


@pytest.mark.parametrize(("reason", "code"), [(Reason.CONFIGURATION_INVALID, 2), (Reason.PORT_IN_USE, 1)])
def test_the_exit_status_tells_configuration_from_the_rest(reason: Reason, code: int) -> None:
    assert explain(SnapshotError(reason, "no", "do")) == code


REPLAY = ("replay", "--policy", "static(2)", "--seeds", "1", "--jobs", "1")


def test_two_results_in_one_file_are_refused_before_anything_runs(tmp_path: Path) -> None:
    file, other = tmp_path / "result", tmp_path / "other"
    for there in (False, True):
        done = run(*REPLAY, "--json", str(file), "--html", str(other if there else tmp_path / "." / "result"))
        assert done.returncode == 2, done.stderr
        assert f"error {other if there else file} is named twice" in done.stderr
        assert done.stdout == ""
        if not there:
            file.touch()
            other.symlink_to(file)
    assert file.read_text() == ""


def test_a_trace_is_not_written_over(tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    trace.write_text('{"timestamp": 0, "input_length": 5, "output_length": 5}\n')
    done = run(*REPLAY, str(trace), "--html", str(trace))
    assert done.returncode == 2
    assert f"{trace} is named twice" in done.stderr
    assert "timestamp" in trace.read_text()
    done = run(*REPLAY, str(trace), "--html", "/dev/null", "--json", "/dev/null")
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ((*REPLAY, "--setting", "engine.kv_tokens=300"), "830 of 1013 requests do not fit into a KV cache of 300"),
        (("policy", "tune", "--setting", "engine.kv_tokens=300"), "830 of 1013 requests do not fit into a KV cache"),
    ],
)
def test_what_no_simulation_can_answer_is_refused_before_it_begins(arguments: tuple[str, ...], said: str) -> None:
    done = run(*arguments)
    assert done.returncode == 2
    assert said in done.stderr
    assert "[configuration_invalid]" in done.stderr
    assert "remedy" in done.stderr
    assert "starts TTFT" not in done.stdout


@pytest.mark.parametrize("option", ["--attainment", "--gpu-hours"])
@pytest.mark.parametrize("value", ["nan", "inf", "-1"])
def test_a_wish_that_is_no_number_is_a_usage_error(option: str, value: str) -> None:
    done = run("policy", "tune", option, value)
    assert done.returncode == 2
    assert f"Invalid value for '{option}'" in done.stderr


@pytest.mark.parametrize(
    "arguments",
    [
        ("demo", "--speed", "inf"),
        ("demo", "--boot-seconds", "inf"),
        ("bench", "planner", "--speed", "inf"),
        ("bench", "planner", "--ttft", "nan"),
        ("bench", "planner", "--itl", "inf"),
    ],
)
def test_a_measure_without_end_is_a_usage_error(arguments: tuple[str, ...]) -> None:
    done = run(*arguments)
    assert done.returncode == 2, done.stderr
    assert f"Invalid value for '{arguments[-2]}'" in done.stderr


def test_a_command_to_type_next_names_the_store_that_was_named() -> None:
    text = "Remove it with `dynamo-snapshot snapshots rm a`; `dynamo-snapshot up` goes on."
    assert in_store(text, None, None) == text
    assert "`dynamo-snapshot snapshots rm a --store '/my store'`; `dynamo-snapshot up`" in in_store(
        text, Path("/my store"), None
    )
    assert "snapshots rm a --fleet f.yaml`" in in_store(text, None, Path("f.yaml"))


def test_the_example_is_a_valid_fleet() -> None:
    fleet = load_fleet(EXAMPLE)
    assert fleet.model.path == EXAMPLE.parent / "tiny-model"


def test_help_breaks_lines_where_the_terminal_ends_and_not_where_the_source_does() -> None:
    def command() -> None:
        """One
        sentence.

        Another
        one.
        """

    assert paragraphs(command) == "One sentence.\n\nAnother one."


def test_a_path_that_the_worker_will_not_find_is_pointed_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "worker.py").touch()
    (tmp_path / "run").mkdir()
    note_relative_paths(["python", "worker.py", "run", "no.py", str(tmp_path / "worker.py")])
    said = capsys.readouterr().err
    assert said.count("note: ") == 1
    assert str(tmp_path / "worker.py") in said


@pytest.mark.parametrize(
    ("said", "heard"),
    [
        ("Free space in agent.store_dir, or remove", "Free space in --store, or remove"),
        ("Correct agent.criu in fleet.yaml, --criu or X.", "Correct --criu or X."),
        ("Raise the worker's boot_timeout_s in fleet.yaml if", "Raise --boot-timeout if"),
        (
            "Raise agent.deadlines.restore_s in fleet.yaml if",
            "Raise agent.deadlines.restore_s in a file that --fleet names if",
        ),
        ("lower agent.minimum_free_bytes, or", "lower agent.minimum_free_bytes in a file that --fleet names, or"),
    ],
)
def test_who_gave_no_fleet_is_told_of_options(said: str, heard: str) -> None:
    assert in_options(said) == heard


def test_a_fleet_says_what_no_option_does(tmp_path: Path) -> None:
    agent = settings(tmp_path / "store", None, None, EXAMPLE)
    assert agent.store_dir == tmp_path / "store"
    assert agent.runtime_dir != load_fleet(EXAMPLE).agent.runtime_dir, "never a fleet's own"
    fields = {"runtime_dir", "store_dir"}
    assert agent.model_dump(exclude=fields) == load_fleet(EXAMPLE).agent.model_dump(exclude=fields)


@pytest.mark.parametrize("place", ["file", "file/store"])
def test_a_store_that_cannot_be_is_refused_before_anything_starts(tmp_path: Path, place: str) -> None:
    (tmp_path / "file").touch()
    done = run("capture", "--store", str(tmp_path / place), "--runtime-dir", str(tmp_path / "run"), "--", "true")
    assert done.returncode == 2
    assert f"{tmp_path / 'file'} is not a folder" in done.stderr
    assert "starting" not in done.stderr


def test_the_fleet_that_up_writes_for_its_parts_is_for_its_owner_alone(tmp_path: Path) -> None:
    """Workers' environments may hold tokens."""
    example = load_fleet(EXAMPLE)
    agent = example.agent.model_copy(update={"runtime_dir": tmp_path})
    path = LocalFleet(example.model_copy(update={"agent": agent})).write_fleet()
    assert path.stat().st_mode & 0o077 == 0
