"""What a comparison is told: traces and halves, settings, runs; and work on several processes."""

from __future__ import annotations

import gzip
import multiprocessing
from collections.abc import Sequence
from importlib.resources.abc import Traversable
from pathlib import Path

import msgspec
import pytest
from support.comparison import die, double, refuse, threads

from dynamo_snapshot.errors import SnapshotError
from dynamo_snapshot.replay.comparison import conduct as conduct_module
from dynamo_snapshot.replay.comparison import fingerprint
from dynamo_snapshot.replay.comparison.conduct import Progress, conduct
from dynamo_snapshot.replay.comparison.halves import Half
from dynamo_snapshot.replay.comparison.lanes import Lane
from dynamo_snapshot.replay.comparison.parallel import work
from dynamo_snapshot.replay.comparison.rows import OURS, Start
from dynamo_snapshot.replay.comparison.runs import Run, perform, runs
from dynamo_snapshot.replay.comparison.settings import changed, combinations, field_names, setting_of
from dynamo_snapshot.replay.comparison.sources import BUNDLED_S, Source, named_sources, part, study_sources
from dynamo_snapshot.replay.simulation.setting import Setting
from dynamo_snapshot.replay.simulation.study import STUDIES

BUNDLED = Source("excerpt", None)


def test_halves_share_out_every_request_and_all_the_time() -> None:
    whole, first, second = (part(BUNDLED, half) for half in (Half.WHOLE, Half.FIRST, Half.SECOND))
    assert whole.duration_s == BUNDLED_S == first.duration_s + second.duration_s
    assert len(whole.requests) == len(first.requests) + len(second.requests)
    assert all(request.offset_s < first.duration_s for request in first.requests)
    assert second.requests[-1].offset_s == pytest.approx(whole.requests[-1].offset_s - first.duration_s)


def test_a_second_half_is_played_after_the_first() -> None:
    whole, second = part(BUNDLED, Half.WHOLE), part(BUNDLED, Half.SECOND)
    assert second.played == whole.played == whole.requests
    assert second.begin_s == BUNDLED_S / 2


def test_a_split_of_ones_own_is_kept_to() -> None:
    assert part(Source("excerpt", None, split_s=100.0), Half.FIRST).duration_s == 100


def test_a_half_without_requests_is_refused() -> None:
    with pytest.raises(SnapshotError, match="first half has no request"):
        part(Source("excerpt", None, split_s=5.0), Half.FIRST)


def test_traces_are_named_after_their_files_and_the_studys_as_it_has_them(tmp_path: Path) -> None:
    sources = named_sources([tmp_path / "mine.csv.gz", tmp_path / "AzureLLMInferenceTrace_conv.csv"])
    assert [(source.name, source.split_s) for source in sources] == [("mine", None), ("azure-conv", 1718.0)]
    assert setting_of(sources[1]).engine.speed != 1
    assert setting_of(sources[0]) == Setting(name="mine")
    assert setting_of(*named_sources([])).name == "azure-code"
    with pytest.raises(SnapshotError, match="another trace is called mine too"):
        named_sources([tmp_path / "mine.csv", tmp_path / "mine.jsonl"])


def test_the_studys_traces_are_found_packed_or_not_and_named_where_they_are_missing(tmp_path: Path) -> None:
    plain, packed, *_ = STUDIES
    (tmp_path / plain.file).touch()
    (tmp_path / f"{packed.file}.gz").write_bytes(gzip.compress(b""))
    found = study_sources(tmp_path, [plain.trace, packed.trace])
    assert [Path(source.path or "").suffix for source in found] == [".csv", ".gz"]
    with pytest.raises(SnapshotError, match=r"does not hold mooncake"):
        study_sources(tmp_path)
    with pytest.raises(SnapshotError, match="has no trace x"):
        study_sources(tmp_path, ["x"])


def test_a_setting_is_changed_by_its_fields() -> None:
    setting = changed(Setting(), ["max_replicas=8", "engine.speed=0.5", "router=round-robin"])
    assert (setting.max_replicas, setting.engine.speed, setting.router) == (8, 0.5, "round-robin")
    assert setting.ttft_objective_s == Setting().ttft_objective_s


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ("max_replica=8", "max_replica: there is no such field"),
        ("engine=fast", "engine: there is no such field"),
        ("engine.speed.x=1", "engine.speed.x: there is no such field"),
        ("max_replicas", "--setting max_replicas: no value"),
        ("max_replicas=many", "--setting max_replicas: expected a whole number, not many"),
        ("max_replicas=", "--setting max_replicas: expected a whole number, not nothing"),
        ("engine.kv_tokens=x", "--setting engine.kv_tokens: expected a whole number, not x"),
        ("engine.kv_tokens=1e400", "--setting engine.kv_tokens: expected a whole number, not 1e400"),
        (f"engine.kv_tokens=1{400 * '0'}", "engine.kv_tokens: expected a whole number from 1 to 1000000000000, not 1"),
        ("engine.max_batched_tokens=1000000001", "expected a whole number from 1 to 1000000000, not 1000000001"),
        ("engine.speed=1e-320", "--setting engine.speed: expected a number from 0.000001 to 1000000, not 1e-320"),
        ("engine.decode_speed=1e300", "--setting engine.decode_speed: expected a number from 0.000001 to 1000000"),
        ("engine.speed=nan", "speed must be a positive number"),
        ("ttft_objective_s=nan", "objectives must be positive"),
        ("ttft_objective_s=inf", "--setting ttft_objective_s: expected a number from 0.000001 to 10000000, not inf"),
        ("drain_limit_s=inf", "--setting drain_limit_s: expected a number from 0 to 10000000, not inf"),
        ("max_replicas=10001", "--setting max_replicas: expected a whole number from 1 to 10000, not 10001"),
        ("router=foo", "router: expected one of round-robin, least-loaded, shared-queue, not foo"),
        ("min_replicas=20", "max_replicas must be at least min_replicas"),
        ("engine.speed=0", "speed must be a positive number"),
        ("name=mine", "--setting name: a setting is called after its trace"),
        (" name =mine", "a setting is called after its trace"),
    ],
)
def test_a_wrong_setting_is_refused_with_the_fields_there_are(change: str, said: str) -> None:
    with pytest.raises(SnapshotError, match=said) as error:
        changed(Setting(), ["drain_limit_s=1", change])
    assert "engine.max_batched_tokens" in error.value.remedy
    assert "$" not in str(error.value)


def test_all_fields_of_a_setting_can_be_changed() -> None:
    values = msgspec.to_builtins(Setting())
    fields = field_names(values)
    assert {"max_replicas", "engine.kv_tokens"} <= set(fields)
    assert "name" not in fields
    for field in fields:
        folder, _, name = field.rpartition(".")
        value = (values[folder] if folder else values)[name]
        assert changed(Setting(), [f"{field}={value}"]) == Setting()


def test_every_field_of_a_setting_that_is_a_number_has_a_least_and_a_most() -> None:
    """A field without them takes what no policy can reckon with."""
    numbers = set(field_names(msgspec.to_builtins(Setting()))) - {"router"}
    for field in numbers:
        with pytest.raises(SnapshotError):
            changed(Setting(max_replicas=10**4, initial_replicas=10**4), [f"{field}=1{40 * '0'}"])


def test_rows_of_dynamos_planner_are_those_of_its_version(monkeypatch: pytest.MonkeyPatch) -> None:
    before = {policy: fingerprint.code_of(policy) for policy in ("dynamo-load", "dynamo-throughput", "hpa", "snapshot")}
    assert fingerprint.dynamo_version()
    fingerprint.code_of.cache_clear()
    monkeypatch.setattr(fingerprint, "dynamo_version", lambda: "0.0.1")
    after = {policy: fingerprint.code_of(policy) for policy in before}
    fingerprint.code_of.cache_clear()
    assert {policy for policy in before if before[policy] != after[policy]} == {"dynamo-load", "dynamo-throughput"}


def test_our_rows_are_those_of_the_policy_and_not_of_what_brings_it_to_the_planner() -> None:
    decides = {file.name for file in fingerprint.sources_of(OURS)} - {
        file.name for file in fingerprint.sources_of("hpa")
    }
    assert {"policy.py", "forecast.py", "observation.py"} <= decides
    assert not decides & {"engine.py", "plugin.py", "grpc_server.py", "config.py", "records.py"}


def test_knobs_are_combined() -> None:
    assert combinations("snapshot", ["a=1,2", "b=x"]) == ["snapshot(a=1,b=x)", "snapshot(a=2,b=x)"]
    with pytest.raises(SnapshotError, match="no values"):
        combinations("snapshot", ["a"])


def test_seeds_are_for_what_dice_decide() -> None:
    settings = {"excerpt": Setting()}
    specs = ["static(2)", "hpa"]
    planned = runs([BUNDLED], Half.WHOLE, specs, ["restore-2s", "restore(2,spread=0)"], 4, settings)
    assert [(run.policy, run.startup, run.seed) for run in planned] == [
        ("static(2)", "none", 0),
        *(("hpa", "restore-2s", seed) for seed in range(4)),
        ("hpa", "restore(2,spread=0)", 0),
    ]


@pytest.mark.parametrize(
    ("policy", "start"), [("hpaa", "restore-2s"), ("hpa", "restore-fast"), ("hpa(x=1)", "cold-9s")]
)
def test_what_does_not_exist_is_refused_before_anything_runs(policy: str, start: str) -> None:
    with pytest.raises(SnapshotError):
        runs([BUNDLED], Half.WHOLE, [policy], [start], 1, {"excerpt": Setting()})


@pytest.mark.parametrize(
    ("policy", "bounds", "said"),
    [
        ("clairvoyant", (1, 129), "plans with 128 sizes at most, not with 1 to 129 replicas"),
        ("clairvoyant(miss_cost_s=3)", (2, 10**4), "plans with 128 sizes at most"),
        ("snapshot(tick_s=1e-300)", (1, 16), "would decide every 1e-300 s"),
        ("dynamo-load(interval_s=1000000000000000000000)", (1, 16), r"would decide every 1e\+21 s"),
        ("static(17)", (1, 16), r"policy static\(17\): the setting has 1 to 16 replicas"),
        ("static(replicas=2)", (3, 16), r"policy static\(2\): the setting has 3 to 16 replicas"),
    ],
)
def test_what_no_run_would_end_well_with_is_refused(policy: str, bounds: tuple[int, int], said: str) -> None:
    least, most = bounds
    setting = Setting(min_replicas=least, max_replicas=most, initial_replicas=least)
    with pytest.raises(SnapshotError, match=said):
        runs([BUNDLED], Half.FIRST, [policy], ["restore-2s"], 1, {"excerpt": setting})


def test_a_fleet_of_constant_size_without_a_size_takes_what_the_bounds_allow() -> None:
    (run,) = runs([BUNDLED], Half.FIRST, ["static"], ["restore-2s"], 1, {"excerpt": Setting(max_replicas=2)})
    assert [size.ready for size in perform(run).sizes] == [2]


def test_the_ceiling_plans_with_as_many_sizes_as_are_let_through() -> None:
    setting = Setting(max_replicas=128)
    (run,) = runs([BUNDLED], Half.FIRST, ["clairvoyant"], ["restore-2s"], 1, {"excerpt": setting})
    assert perform(run).row.ttft_attainment > 0.9


def test_memory_that_runs_out_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    def out(*arguments: object, **options: object) -> None:
        raise MemoryError

    monkeypatch.setattr("dynamo_snapshot.replay.comparison.runs.simulate", out)
    (run,) = runs([BUNDLED], Half.FIRST, ["hpa"], ["cold-9s"], 1, {"excerpt": Setting()})
    with pytest.raises(SnapshotError, match="excerpt: memory ran out while hpa was simulated, with at most 16 repl"):
        perform(run)


def test_runs_give_rows_that_say_how_their_replicas_came_to_be() -> None:
    told: list[Progress] = []
    specs = ["static(2)", "knative-kpa(target=2)"]
    settings = {"excerpt": Setting(max_replicas=4)}
    planned = runs([BUNDLED], Half.FIRST, specs, ["restore(2,cold=45,failures=0.5)", "cold-45s"], 1, settings)
    lanes = list(conduct(planned, 1, told.append))
    lanes.sort(key=lambda lane: [run.key for run in planned].index(lane.row.key))
    rows = [lane.row for lane in lanes]
    assert [(row.start, row.restore_s, row.cold_s) for row in rows] == [
        (Start.NONE, None, None),
        (Start.RESTORE, 2.0, 45.0),
        (Start.COLD, None, 45.0),
    ]
    assert len(lanes) == len(planned)
    assert rows[0].gpu_hours == pytest.approx(2 * BUNDLED_S / 2 / 3600, rel=0.05)
    assert [size.ready for size in lanes[0].sizes] == [2]
    assert max(size.ready for size in lanes[1].sizes) <= 4
    assert all(row.code for row in rows)
    assert [(progress.done, progress.total) for progress in told] == [(0, 3), (1, 3), (2, 3), (3, 3)]
    assert told[-1].left_s == 0


def test_a_row_names_the_code_that_made_it_though_its_files_were_edited_meanwhile(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    perform_all, imported = conduct_module.perform_all, fingerprint._imported

    def edited(module: str) -> list[Traversable]:
        return [*imported(module), *imported("planner.engine")]

    def perform_and_edit(together: Sequence[Run]) -> tuple[Lane, ...]:
        monkeypatch.setattr(fingerprint, "_imported", edited)
        return perform_all(together)

    loaded = fingerprint.code_of("snapshot")
    for kept in (fingerprint.code_of, conduct_module._codes):
        kept.cache_clear()
    monkeypatch.setattr(conduct_module, "perform_all", perform_and_edit)
    (run,) = runs([BUNDLED], Half.FIRST, ["snapshot"], ["cold-45s"], 1, {"excerpt": Setting()})
    (lane,) = conduct([run], 1)
    assert lane.row.code == loaded
    fingerprint.code_of.cache_clear()
    assert fingerprint.code_of("snapshot") != loaded
    fingerprint.code_of.cache_clear()


def test_all_seeds_of_the_ceiling_go_together_and_other_runs_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[tuple[Run, ...]] = []
    monkeypatch.setattr(
        "dynamo_snapshot.replay.comparison.conduct.work", lambda do, pieces, processes: given.extend(pieces) or iter(())
    )
    specs = ["clairvoyant", "clairvoyant(miss_cost_s=3)", "hpa"]
    planned = runs([BUNDLED], Half.FIRST, specs, ["restore-2s", "cold-45s"], 3, {"excerpt": Setting()})
    assert list(conduct(planned, 2)) == []
    assert sorted(len(piece) for piece in given) == [1] * 6 + [3] * 4
    assert {run for piece in given for run in piece} == set(planned)
    for piece in given:
        assert len({(run.policy, run.startup) for run in piece}) == 1


@pytest.mark.parametrize("processes", [1, 2])
def test_pieces_are_done_whatever_the_number_of_processes(processes: int) -> None:
    assert dict(work(double, range(5), processes)) == {piece: 2 * piece for piece in range(5)}
    assert multiprocessing.active_children() == []


def test_a_process_has_one_thread_whatever_numpy_would_like() -> None:
    assert dict(work(threads, range(3), 2)) == dict.fromkeys(range(3), 1)


@pytest.mark.parametrize("processes", [1, 2])
def test_a_refusal_ends_the_work_and_keeps_its_words(processes: int) -> None:
    with pytest.raises(SnapshotError) as error:
        list(work(refuse, range(100), processes))
    assert (error.value.message, error.value.remedy) == ("three", "Take four.")
    assert multiprocessing.active_children() == []


def test_a_killed_process_is_said_and_ends_the_work() -> None:
    with pytest.raises(SnapshotError, match="ended from outside"):
        list(work(die, range(100), 2))
    assert multiprocessing.active_children() == []
