"""The page of ``bench restore``: where a restore's time went, drawn so that nothing is left out."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from dynamo_snapshot.agent.pipelines.phases import PIPELINES, RESTORE
from dynamo_snapshot.cli.bench import app
from dynamo_snapshot.cli.results import result_in
from dynamo_snapshot.errors import SnapshotError
from dynamo_snapshot.local.report.restore_bars import restore_bars
from dynamo_snapshot.local.report.restore_page import render
from dynamo_snapshot.local.report.stages import Stage, middle, stages
from dynamo_snapshot.model import Reason

RAW = Path(__file__).parents[2] / "docs" / "benchmarks" / "raw"
PHASES = [spec.name for spec in PIPELINES[RESTORE]]


def restore(total_s: float = 1.0, evidence: dict[str, str] | None = None, **phases: float) -> dict[str, Any]:
    return {
        "total_s": total_s,
        "phases": phases | {"unaccounted": 0.0},
        "evidence": evidence or {},
        "image_cached_bytes": 1 << 20,
        "weights_cached_bytes": 1 << 29,
    }


def row(way: str = "prefetched", *restores: dict[str, Any], **changes: Any) -> dict[str, Any]:
    return {
        "engine": "torch",
        "case": "1GiB",
        "way": way,
        "repeats": len(restores),
        "failures": 0,
        "median_s": 1.0,
        "p95_s": 2.0,
        "limit_s": 0.5,
        "image_bytes": 1 << 20,
        "image_read_bytes_per_s": 2e9,
        "disk_read_bytes_per_s": None,
        "weight_bytes": 1 << 30,
        "answers": ["5 6"],
        "errors": [],
        "restores": list(restores),
        **changes,
    }


@given(st.dictionaries(st.sampled_from(PHASES), st.floats(0, 10)), st.floats(0, 20), st.floats(0, 20), st.floats(0, 5))
def test_the_stages_of_a_restore_add_up_to_its_time(
    phases: dict[str, float], weights_s: float, answer_s: float, rest_s: float
) -> None:
    evidence = {"weights_s": f"{weights_s:.4f}", "answer_s": f"{answer_s:.4f}"}
    total = sum(phases.values()) + rest_s
    spent = stages(restore(total, evidence, **phases))
    assert list(spent) == list(Stage)
    assert min(spent.values()) >= 0
    assert sum(spent.values()) == pytest.approx(total)
    assert spent[Stage.UNACCOUNTED] == pytest.approx(rest_s)


def test_what_the_worker_says_of_its_own_time_is_taken_out_of_the_wake() -> None:
    evidence = {"weights_s": "0.2000", "wake_s": "0.2500", "answer_s": "0.1000"}
    spent = stages(restore(1.0, evidence, admit=0.05, house=0.1, restore=0.3, thaw=0.1, resume=0.4))
    assert spent == pytest.approx(
        {
            Stage.HOUSE: 0.15,
            Stage.CRIU: 0.3,
            Stage.CUDA: 0.1,
            Stage.WEIGHTS: 0.2,
            Stage.WAKE: 0.1,
            Stage.SELF_TEST: 0.1,
            Stage.UNACCOUNTED: 0.05,
        }
    )


def test_the_bar_is_the_restore_in_the_middle() -> None:
    totals = [3.0, 1.0, 2.0, 9.0]
    found = middle(row("stock", *(restore(total, restore=total) for total in totals)))
    assert found is not None
    assert found["total_s"] == 2.0
    assert middle(row()) is None


def _widths(svg: str) -> dict[str, float]:
    """By tip: how wide it is drawn."""
    rects = re.findall(r'<rect x="[\d.]+" y="[\d.]+" width="([\d.]+)"[^>]*data-tip="([^"]*)"', svg)
    return {tip: float(width) for width, tip in rects}


def test_bars_are_as_long_as_their_stages_and_the_limit_stands_beside() -> None:
    svg = restore_bars([row("prefetched", restore(1.0, restore=0.6, thaw=0.2), restore(4.0, restore=4.0))])
    widths = _widths(svg)
    assert widths["CRIU: 600 ms"] == pytest.approx(3 * widths["CUDA: 200 ms"], rel=0.01)
    assert widths["unaccounted: 200 ms"] == pytest.approx(widths["CUDA: 200 ms"], rel=0.01)
    assert "this machine&#x27;s limit: 0.50 s" in svg
    assert "the slowest of 2: 4.00 s" in svg
    assert "2.0 × the limit" in svg


def test_a_way_that_dwarfs_the_others_is_left_out_of_a_second_picture() -> None:
    fast, slow = row("prefetched", restore(1.0, restore=1.0)), row("stock", restore(10.0, restore=10.0))
    assert render({"rows": [fast, slow], "environment": {}}).count("1GiB prefetched</text>") == 2
    assert render({"rows": [fast, slow], "environment": {}}).count("1GiB stock</text>") == 1
    assert render({"rows": [fast, fast], "environment": {}}).count("the same, enlarged") == 0


def test_failures_and_different_answers_are_on_the_page() -> None:
    failed = row("prefetched", failures=3, errors=["no_gpu: <gone>"], answers=["5", "6"], median_s=None, limit_s=None)
    page = render({"rows": [failed], "environment": {"kernel": "6.18"}})
    for words in ("no restore succeeded", "no_gpu: &lt;gone&gt;", "2 different", "6.18"):
        assert words in page


def test_the_command_draws_what_an_earlier_run_wrote(tmp_path: Path) -> None:
    written, page = tmp_path / "result.json", tmp_path / "page.html"
    for failures, status in ((0, 0), (1, 1)):
        rows = [row("prefetched", restore(1.0, restore=1.0), failures=failures)]
        written.write_text(json.dumps({"rows": rows, "environment": {}}))
        done = CliRunner().invoke(app, ["restore", "--read", str(written), "--html", str(page)])
        assert done.exit_code == status, done.output
        assert "1GiB prefetched" in page.read_text()


def test_what_an_earlier_run_wrote_is_summed_up(tmp_path: Path) -> None:
    written = tmp_path / "result.json"
    written.write_text(json.dumps({"rows": [row("prefetched", restore(1.0, thaw=0.25))], "environment": {}}))
    done = CliRunner().invoke(app, ["restore", "--read", str(written)])
    assert done.exit_code == 0, done.output
    first, phases, rates = done.stdout.splitlines()
    assert first.startswith("1GiB prefetched: median 1.000 s, p95 2.000 s, 2.0 times this machine's limit of 0.500 s")
    assert phases.strip() == "thaw 0.250 unaccounted 0.000"
    assert rates.strip() == "one thread reads: page cache 2.00 GB/s, disk not known"


@pytest.mark.parametrize("file", sorted(RAW.glob("*.json")), ids=lambda file: str(file.stem))
def test_the_results_in_the_docs_are_read_but_for_those_that_tests_wrote(file: Path, tmp_path: Path) -> None:
    done = CliRunner().invoke(app, ["restore", "--read", str(file), "--html", str(tmp_path / "page.html")])
    if file.name in ("h200-dynamo-vllm.json", "h200-torch-1rank.json"):
        assert isinstance(done.exception, SnapshotError)
        assert done.exception.reason is Reason.CONFIGURATION_INVALID
    else:
        assert done.exit_code == 0, done.output
        assert done.stdout.count("median") == len(json.loads(file.read_text())["rows"])


WRONG = {
    "no rows": [],
    "of another kind": [{"planner": "snapshot", "failed": 0}],
    "a field is missing": [{name: value for name, value in row("stock").items() if name != "limit_s"}],
    "a restore is a number": [row("stock", 7)],
    "a total is not finite": [row("stock", restore(float("inf")))],
    "a total is no number": [row("stock", restore(float("nan")))],
    "a text is none": [row("stock", restore(), case="\ud800")],
    "evidence is no time": [row("stock", restore(1.0, {"weights_s": "soon"}))],
    "evidence is not finite": [row("stock", restore(1.0, {"answer_s": "nan"}))],
}


@pytest.mark.parametrize("rows", WRONG.values(), ids=WRONG)
def test_a_file_of_another_kind_is_refused_with_what_is_wrong(tmp_path: Path, rows: list[Any]) -> None:
    written, page = tmp_path / "result.json", tmp_path / "page.html"
    written.write_text(json.dumps({"rows": rows, "environment": {}}))
    done = CliRunner().invoke(app, ["restore", "--read", str(written), "--html", str(page)])
    assert isinstance(done.exception, SnapshotError), done.output
    assert done.exception.reason is Reason.CONFIGURATION_INVALID
    assert f"{written} is no result of `bench restore`: " in done.exception.message
    assert done.stdout == ""
    assert not page.exists()


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--ways", "fast"], "unknown: 'fast'; there are stock, hugepages"),
        (["--ways", ""], "unknown: ''"),
        (["--ways", "stock"], "--ways would be of no effect"),
        (["--gib", "16", "--repeats", "2"], "--gib, --repeats would be of no effect"),
    ],
)
def test_what_says_how_to_measure_is_refused_where_nothing_is_measured(
    tmp_path: Path, options: list[str], said: str
) -> None:
    written = tmp_path / "result.json"
    written.write_text(json.dumps({"rows": [row("stock", restore())], "environment": {}}))
    done = CliRunner().invoke(app, ["restore", "--read", str(written), *options])
    assert done.exit_code == 2
    assert said in " ".join(done.stderr.replace("│", " ").split())


@pytest.mark.parametrize("gib", ["abc", "nan", "inf", ",", "0", "-3", "1,,2", "1e999", ""])
def test_a_size_that_is_none_is_a_usage_error(gib: str) -> None:
    done = CliRunner().invoke(app, ["restore", "--gib", gib])
    assert done.exit_code == 2
    assert "Invalid value for --gib" in done.stderr


def test_a_result_that_cannot_be_written_after_all_is_told_after_the_figures(tmp_path: Path) -> None:
    written = tmp_path / "result.json"
    written.write_text(json.dumps({"rows": [row("stock", restore())], "environment": {}}))
    for option in ("--json", "--html"):
        done = CliRunner().invoke(app, ["restore", "--read", str(written), option, "/dev/full"])
        assert isinstance(done.exception, SnapshotError)
        assert done.exception.reason is Reason.DISK_FULL
        assert done.exception.message == "/dev/full could not be written: No space left on device"
        assert "median" in done.stdout


def test_the_file_that_is_read_is_not_written_over(tmp_path: Path) -> None:
    written = tmp_path / "result.json"
    written.write_text(json.dumps({"rows": [row("stock", restore())], "environment": {}}))
    done = CliRunner().invoke(app, ["restore", "--read", str(written), "--html", str(written)])
    assert "is named twice" in str(done.exception)
    assert json.loads(written.read_text())["rows"]


@pytest.mark.parametrize("content", [None, "no JSON", "{}", "[]", "7", '["rows"]', '"rows"', "[" * 100_000])
def test_what_is_no_result_is_refused(tmp_path: Path, content: str | None) -> None:
    file = tmp_path / "result.json"
    if content is not None:
        file.write_text(content)
    with pytest.raises(SnapshotError, match=re.escape(str(file))) as refused:
        result_in(file, "rows")
    assert refused.value.reason is Reason.CONFIGURATION_INVALID
