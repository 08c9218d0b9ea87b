"""The whole matrix: what is run, what is kept, what stands in the table."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import msgspec
import pytest
from support.comparison import row

from dynamo_snapshot.errors import SnapshotError
from dynamo_snapshot.model import Reason
from dynamo_snapshot.replay.comparison.bench import Bench
from dynamo_snapshot.replay.comparison.conduct import Progress
from dynamo_snapshot.replay.comparison.halves import Half
from dynamo_snapshot.replay.comparison.lanes import Lane
from dynamo_snapshot.replay.comparison.matrix import (
    START_SETTINGS,
    Matrix,
    contenders,
    in_each_setting,
    swept,
)
from dynamo_snapshot.replay.comparison.rows import Start
from dynamo_snapshot.replay.comparison.runs import NO_START, Run
from dynamo_snapshot.replay.comparison.sources import Source
from dynamo_snapshot.replay.comparison.store import held, read_table
from dynamo_snapshot.replay.policies import catalog
from dynamo_snapshot.replay.simulation.setting import Setting

SETTING = Setting(max_replicas=16)


def matrix(*policies: str, seeds: int = 3, setting: Setting = SETTING, half: Half = Half.FIRST) -> Matrix:
    return Matrix([Source("code", None)], half, policies, seeds, {"code": setting})


def test_ours_runs_restored_with_all_seeds_and_rivals_both_ways_with_one() -> None:
    planned = matrix("snapshot", "hpa").first_round()
    ours = [run for run in planned if run.policy.startswith("snapshot")]
    rivals = [run for run in planned if run.policy.startswith("hpa")]
    assert {run.policy.partition("=")[0] for run in ours} == {"snapshot(miss_cost_s"}
    assert len({run.policy for run in ours}) == len(catalog.sweep("snapshot"))
    assert {run.startup for run in ours} == {"restore-2s", "restore-8s"}
    assert {run.seed for run in ours} == {0, 1, 2}
    assert {run.startup for run in rivals} == {"restore-2s", "restore-8s", "cold-45s", "cold-100s"}
    assert {run.seed for run in rivals} == {0}
    assert len({run.policy for run in rivals}) == len(catalog.sweep("hpa"))


def test_static_fleets_run_once_and_stand_in_each_start_setting() -> None:
    planned = matrix("static").first_round()
    assert {(run.startup, run.seed) for run in planned} == {(NO_START, 0)}
    assert "static(4)" in swept("static")
    static = row("static(4)", 0.9, 3, start=Start.NONE, startup=NO_START, restore_s=None, cold_s=None)
    assert [(one.restore_s, one.cold_s) for one in in_each_setting(static)] == list(START_SETTINGS)


@pytest.mark.parametrize(("restore_s", "cold_s"), [(8.0, None), (None, 100.0)])
def test_a_run_stands_where_its_start_up_time_does(restore_s: float | None, cold_s: float | None) -> None:
    (one,) = in_each_setting(row("hpa", 0.9, 3, restore_s=restore_s, cold_s=cold_s))
    assert (one.restore_s, one.cold_s) == (8.0, 100.0)


def test_only_rivals_near_ours_and_defaults_get_all_seeds() -> None:
    rows = [
        row("snapshot", 0.97, 3.4),
        row("hpa", 0.30, 9.0),
        row("hpa(target=1c)", 0.96, 3.4),
        row("hpa(target=2c)", 0.93, 3.4),
        row("hpa(target=0.1c)", 0.99, 3.8),
        row("clairvoyant", 1.0, 1.0),
    ]
    assert {policy for _, policy, _ in contenders(rows)} == {"hpa", "hpa(target=1c)"}
    second = matrix("snapshot", "hpa").second_round(rows)
    assert {(run.policy, run.startup) for run in second} == {("hpa", "restore-2s"), ("hpa(target=1c)", "restore-2s")}
    assert {run.seed for run in second} == {1, 2}


class Simulator:
    """Gives every run the same result, but for noise, and knows which it was asked for."""

    def __init__(self, breaks_after: int | None = None) -> None:
        self.asked: list[Run] = []
        self._breaks_after = breaks_after

    def __call__(self, runs: Sequence[Run], processes: int, tell: Callable[[Progress], None]) -> Iterator[Lane]:
        for run in runs:
            if len(self.asked) == self._breaks_after:
                raise KeyboardInterrupt
            self.asked.append(run)
            restored, starts = run.startup.startswith("restore"), run.startup != NO_START
            seconds = float(run.startup.partition("-")[2].rstrip("s")) if starts else None
            yield Lane(
                row(
                    run.policy,
                    0.97,
                    3.4 + 1e-12 * len(self.asked),  # as sums of the same seconds in another order differ
                    trace=run.source.name,
                    half=run.half,
                    startup=run.startup,
                    start=Start.RESTORE if restored else Start.COLD if starts else Start.NONE,
                    restore_s=seconds if restored else None,
                    cold_s=None if restored else seconds,
                    seed=run.seed,
                ),
                (),
            )


def run(wanted: Matrix, file: Path, simulator: Simulator, *, again: bool = False) -> Bench:
    bench = Bench(wanted, file, again=again, environment={"cpus": 2}, carry_out=simulator)
    bench.run(1, lambda progress: None)
    return bench


def asked(wanted: Matrix, file: Path, *, again: bool = False) -> int:
    simulator = Simulator()
    run(wanted, file, simulator, again=again)
    return len(simulator.asked)


def test_what_the_table_holds_is_not_run_again_unless_it_is_asked_for(tmp_path: Path) -> None:
    file, wanted = tmp_path / "policy.json", matrix("snapshot", "static")
    first = asked(wanted, file)
    assert first == len(wanted.first_round())
    assert asked(wanted, file) == 0
    assert asked(wanted, file, again=True) == first
    content = json.loads(file.read_text())
    assert content["environment"] == {"cpus": 2}
    assert {"trace", "half", "policy", "knob", "restore_s", "cold_s", "seed", "ttft_attainment", "gpu_hours"} <= set(
        content["rows"][0]
    )
    assert {verdict["stands"] for verdict in content["verdicts"]} == {True}
    assert oct(file.stat().st_mode & 0o777) == "0o644"


def test_only_the_policies_that_are_named_are_run_again(tmp_path: Path) -> None:
    file = tmp_path / "policy.json"
    asked(matrix("snapshot", "static"), file)
    assert asked(matrix("static"), file, again=True) == len(swept("static"))
    assert asked(matrix("snapshot", "static"), file) == 0


def test_an_interrupted_matrix_goes_on_where_it_was(tmp_path: Path) -> None:
    file = tmp_path / "policy.json"
    with pytest.raises(KeyboardInterrupt):
        run(matrix("static"), file, Simulator(breaks_after=5))
    assert len({one.spec for one in read_table(file).rows}) == 5
    assert asked(matrix("static"), file) == len(swept("static")) - 5


def test_rows_of_another_setting_are_run_anew_and_other_traces_and_halves_kept(tmp_path: Path) -> None:
    file = tmp_path / "policy.json"
    asked(matrix("static"), file)
    asked(matrix("static", half=Half.SECOND), file)
    asked(Matrix([Source("conv", None)], Half.FIRST, ["static"], 1, {"conv": SETTING}), file)
    there = {(one.trace, one.half) for one in read_table(file).rows}
    assert there == {("code", "first"), ("code", "second"), ("conv", "first")}
    changed = msgspec.structs.replace(SETTING, initial_replicas=2)
    bench = Bench(matrix("static", setting=changed), file, again=False, environment={})
    assert bench.dropped == 2 * len(START_SETTINGS) * len(swept("static"))
    assert {one.trace for one in bench.rows} == {"conv"}


def test_rows_of_other_code_are_counted(tmp_path: Path) -> None:
    bench = run(matrix("static"), tmp_path / "policy.json", Simulator())
    assert bench.stale == len(bench.rows) == len(START_SETTINGS) * len(swept("static"))


@pytest.mark.parametrize("content", ["", "[]", '{"rows": 1}', '{"rows": [{"trace": 1}], "settings": {}}'])
def test_a_file_that_is_no_table_is_refused(tmp_path: Path, content: str) -> None:
    file = tmp_path / "policy.json"
    file.write_text(content)
    with pytest.raises(SnapshotError, match="is no table of a comparison"):
        read_table(file)


def test_a_table_is_one_processs_until_it_is_done_with_it(tmp_path: Path) -> None:
    file = tmp_path / "policy.json"
    with held(file):
        with pytest.raises(SnapshotError, match=rf"is being filled by process {os.getpid()} ") as refused, held(file):
            pass
        with held(tmp_path / "other.json"):
            pass
    assert refused.value.reason is Reason.FILE_IN_USE
    with held(file):
        pass


def test_a_table_whose_lock_cannot_be_made_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SnapshotError, match="cannot be written") as refused, held(tmp_path / "nowhere" / "policy.json"):
        pass
    assert refused.value.reason is Reason.CONFIGURATION_INVALID


def test_a_table_is_read_as_it_was_written(tmp_path: Path) -> None:
    file = tmp_path / "policy.json"
    rows = run(matrix("snapshot"), file, Simulator()).rows
    assert sorted(read_table(file).rows, key=repr) == sorted(rows, key=repr)
