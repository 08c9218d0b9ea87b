"""A decision log decided anew: the plugin's own log holds, and whatever is changed in it is found."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dynamo_snapshot.errors import SnapshotError
from dynamo_snapshot.model import FleetStatus, PoolStatus, ReplicaState, ReplicaStatus, StartTimes, Way
from dynamo_snapshot.replay.decisions.anew import Verification, decide_anew, outcome, verify
from planner.engine import ScalingEngine
from planner.fleet_status import NoFleetStatus
from planner.joint import JointPolicy
from planner.observation import Role
from planner.records import DecisionLog

ROLES: dict[str, dict[str, Any]] = {
    "decode": {"ttft_objective_s": 1.5, "itl_objective_s": 0.1, "max_replicas": 6},
    "prefill": {"ttft_objective_s": 1.5, "max_replicas": 6},
}
TICKS = 60


class Status(NoFleetStatus):
    """A fleet that restores one replica after another."""

    def __init__(self, wall: Callable[[], float]) -> None:
        self._wall = wall

    def latest(self) -> FleetStatus:
        at = self._wall()
        starting = ReplicaStatus(
            replica_id="r1", pool="main", node="n", state=ReplicaState.RESTORING, since=at - at % 2, way=Way.RESTORE
        )
        return FleetStatus(
            fleet="f",
            at=at,
            fence=1,
            pools=(PoolStatus(pool="main", role="decode", target=2, achievable=2, serving=1, pending=1, draining=0),),
            replicas=(starting,),
            start_times=(StartTimes(pool="main", way=Way.RESTORE, seconds=(1.5, 2.0, 0.1 + 0.2)),),
        )


def message(tick: int, requests: int) -> bytes:
    scheduled = {"num_prefill_requests": 1, "sum_prefill_tokens": 1700, "num_decode_requests": requests}
    scheduled["sum_decode_kv_tokens"] = 900 * requests
    queued = {"num_prefill_requests": requests, "sum_prefill_tokens": 1700 * requests}
    content = {"counter_id": 9 * tick, "wall_time": 0.1 + tick / 3000, "scheduled_requests": scheduled}
    return msgspec.msgpack.encode({**content, "queued_requests": queued})


def context(tick: int) -> Any:
    """Calm and bursts; at some ticks an engine is silent, tells nonsense, or the count is unknown."""
    requests = 12 if 20 <= tick < 30 or tick % 17 == 0 else 1
    engines = {"1/0": message(tick, requests), "2/0": message(tick, requests)}
    if tick % 7 == 0:
        del engines["2/0"]
    if tick % 11 == 0:
        engines["1/0"] = b"nonsense"
    return SimpleNamespace(
        request_id=f"t{tick}",
        decision_id=f"d{tick}",
        observations=SimpleNamespace(
            workers=SimpleNamespace(ready_decode=None if tick % 13 == 0 else 2, ready_prefill=2),
            fpm=SimpleNamespace(decode_engines=engines, prefill_engines=engines),
        ),
    )


class Clock:
    def __init__(self) -> None:
        self.now = 1000.1

    def __call__(self) -> float:
        return self.now


def written(path: Path, *, budget: int | None = 8, resets: tuple[int, ...] = (), max_bytes: int = 1 << 30) -> Path:
    """A log as the plugin writes it, of a minute at one tick a second."""
    for engine, tick in ticking(path, budget=budget, max_bytes=max_bytes):
        if tick in resets:
            engine.reset()
        engine.propose(context(tick))
    return path


def ticking(path: Path, *, budget: int | None = 8, max_bytes: int = 1 << 30) -> Iterator[tuple[ScalingEngine, int]]:
    """An engine that logs to ``path``, before each tick of a minute."""
    clock = Clock()
    engine = ScalingEngine(
        JointPolicy.of(ROLES, budget, {"decode": 1, "prefill": 2}),
        Status(clock),
        DecisionLog(path, max_bytes),
        clock=clock,
        wall_clock=clock,
    )
    for tick in range(TICKS):
        yield engine, tick
        clock.now += 1.0


@pytest.fixture(scope="module")
def entries(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    path = written(tmp_path_factory.mktemp("log") / "decisions.jsonl", resets=(40,))
    return [json.loads(line) for line in path.read_text().splitlines()]


def copied(entries: list[dict[str, Any]]) -> list[dict[str, Any]]:
    copy: list[dict[str, Any]] = json.loads(json.dumps(entries))
    return copy


def said(found: Verification) -> str:
    return " ".join(sentence for sentence, _ in outcome(found))


def test_the_plugins_log_holds_over_resets_bursts_and_silences(entries: list[dict[str, Any]]) -> None:
    found = decide_anew(entries)
    assert found.holds, found.first
    assert (found.same, found.different) == (2 * TICKS, 0)
    assert said(found) == f"{2 * TICKS} of {2 * TICKS} decisions came out the same when they were decided anew."
    acted = {entry["action"] for entry in entries if "role" in entry}
    assert {"start", "raise", "hold"} <= acted, "the log has to have something in it"
    assert any("within the budget" in entry.get("reason", "") for entry in entries)


@pytest.mark.parametrize(
    ("name", "value"),
    [("replicas", 5), ("floor", 0), ("action", "lower"), ("reason", "because"), ("desired", None), ("running", 3.0)],
)
def test_a_decision_that_was_changed_is_found(entries: list[dict[str, Any]], name: str, value: Any) -> None:
    changed = copied(entries)
    tampered = next(entry for entry in changed if entry.get("tick") == 12 and entry["role"] == "prefill")
    assert tampered[name] != value
    before, tampered[name] = tampered[name], value
    found = decide_anew(changed)
    assert not found.holds
    assert found.different == 1
    assert found.first is not None
    assert found.first.at == tampered["at"]
    assert f"tick 12, prefill: {name} is {value!r} in the log, {before!r} decided anew" in found.first.what


def test_what_was_seen_and_what_was_predicted_cannot_be_changed_either(entries: list[dict[str, Any]]) -> None:
    changed = copied(entries)
    seen = next(entry for entry in changed if entry.get("tick") == 25 and entry["role"] == "decode")
    seen["observation"]["samples"][0][4] += 400
    assert decide_anew(changed).different > 0
    changed = copied(entries)
    predicted = next(entry for entry in changed if entry.get("tick") == 25 and entry.get("forecast"))
    predicted["forecast"]["candidates"][0]["cost"] *= 1.01
    found = decide_anew(changed)
    assert found.first is not None
    assert "forecast.candidates[0].cost" in found.first.what


def test_a_knob_that_was_changed_is_found(entries: list[dict[str, Any]]) -> None:
    changed = copied(entries)
    changed[0]["begins"]["policy"]["roles"]["decode"]["miss_cost_s"] = 500.0
    assert decide_anew(changed).different > 0


def test_lines_that_were_taken_out_or_put_in_are_found(entries: list[dict[str, Any]]) -> None:
    first = entries[0]["run"]
    without = [entry for entry in entries if (entry["run"], entry.get("tick")) != (first, 9)]
    found = decide_anew(without)
    assert found.first is not None
    assert "tick 10 cannot be decided anew: it follows tick 8" in found.first.what
    assert found.after_gap == 2 * (40 - 9)
    # The next run begins with nothing to remember.
    assert found.same == 2 * 8 + 2 * 20
    one_role = [entry for entry in entries if not (entry.get("tick") == 9 and entry["role"] == "decode")]
    assert "it has decisions for prefill" in said(decide_anew(one_role))
    twice = [copy for entry in entries for copy in (entry, entry)[: 1 + (entry.get("tick") == 9)]]
    assert "it has decisions for decode, decode, prefill, prefill" in said(decide_anew(twice))


def of_versions_without(path: Path) -> None:
    """Takes the beginnings out with which a run goes on in another file."""
    for file in (path.with_name(path.name + ".1"), path):
        lines = [line for line in file.read_bytes().splitlines() if "tick" not in json.loads(line).get("begins", {})]
        file.write_bytes(b"\n".join(lines) + b"\n")


def test_a_log_whose_beginning_was_moved_away_says_what_it_cannot_tell(tmp_path: Path) -> None:
    path = written(tmp_path / "log", max_bytes=60_000, resets=(50,))
    of_versions_without(path)
    found = verify(path)
    assert found.holds
    assert found.same == 20
    assert 0 < found.without_beginning < 2 * TICKS
    assert "the beginning of their run is not in the log" in said(found)


def test_a_run_is_decided_anew_from_where_a_file_goes_on_with_it(tmp_path: Path) -> None:
    path = written(tmp_path / "log", max_bytes=60_000)
    kept = [json.loads(line) for name in ("log.1", "log") for line in (tmp_path / name).read_bytes().splitlines()]
    assert "begins" in kept[0]
    assert kept[0]["begins"]["tick"] > 0, "the beginning of the run has to be gone"
    found = verify(path)
    assert found.holds, found.first
    assert (found.same, found.without_beginning) == (2 * (TICKS - kept[0]["begins"]["tick"]), 0)


def test_what_is_missing_where_a_file_goes_on_is_found(tmp_path: Path) -> None:
    path = written(tmp_path / "log", max_bytes=60_000)
    older = path.with_name("log.1")
    older.write_bytes(b"".join(older.read_bytes().splitlines(keepends=True)[:-2]))
    found = verify(path)
    assert found.first is not None
    assert "begins anew after tick" in found.first.what
    assert not found.holds


def test_another_policy_where_a_file_goes_on_is_found(tmp_path: Path) -> None:
    written(tmp_path / "log", max_bytes=60_000)
    kept = [json.loads(line) for name in ("log.1", "log") for line in (tmp_path / name).read_bytes().splitlines()]
    going_on = [entry for entry in kept if "begins" in entry][1]
    going_on["begins"]["policy"]["roles"]["decode"]["miss_cost_s"] = 500.0
    found = decide_anew(kept)
    assert not found.holds
    assert f"goes on with another policy after tick {going_on['begins']['tick']}" in said(found)


def test_a_run_after_a_torn_line_has_its_beginning(tmp_path: Path) -> None:
    path = written(tmp_path / "log")
    path.write_bytes(path.read_bytes()[:-200])  # as after a kill, a power cut or a full disk
    found = verify(written(path))
    assert "tick 60 cannot be decided anew" in said(found)
    assert (found.same, found.without_beginning, found.after_gap) == (2 * (2 * TICKS - 1), 0, 1)


@pytest.mark.parametrize("gone", [0, 20], ids=["from the start", "in the midst"])
def test_what_follows_lines_that_could_not_be_written_has_a_beginning(tmp_path: Path, gone: int) -> None:
    folder, away = tmp_path / "folder", tmp_path / "away"
    folder.mkdir()
    for engine, tick in ticking(folder / "log"):
        if tick == gone:
            folder.rename(away)
        if tick == gone + 10:
            away.rename(folder)
        engine.propose(context(tick))
    found = verify(folder / "log")
    assert (found.same, found.without_beginning, found.after_gap) == (2 * (TICKS - 10), 0, 0)
    assert ("begins anew after tick 30, but it is at 20" in said(found)) is (gone == 20)


def test_where_another_moves_the_file_away_the_run_goes_on_with_a_beginning(tmp_path: Path) -> None:
    path = tmp_path / "log"
    for engine, tick in ticking(path):
        if tick == 30:
            path.rename(tmp_path / "log.1.gz")
        engine.propose(context(tick))
    found = verify(path)
    assert found.holds, found.first
    assert (found.same, found.without_beginning) == (2 * (TICKS - 30), 0)


def test_a_file_that_cannot_be_moved_away_grows_by_its_decisions_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refused(self: Path, target: Path) -> Path:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "replace", refused)
    path = written(tmp_path / "log", max_bytes=60_000)
    assert path.read_bytes().count(b'"begins"') == 1
    assert verify(path).same == 2 * TICKS
    (line,) = (each.getMessage() for each in caplog.records if each.name == "planner.records")
    assert line.startswith(f"decision log {path} cannot be moved to log.1, and grows:")


@pytest.mark.parametrize("memories", ["", "nonsense", "ü", None, 5])
def test_a_memory_that_is_none_is_said(tmp_path: Path, memories: Any) -> None:
    path = written(tmp_path / "log", max_bytes=60_000)
    kept = [json.loads(line) for line in path.read_bytes().splitlines()]
    kept[0]["begins"]["memories"] = memories
    found = decide_anew(kept)
    assert not found.holds
    assert "the policy at the beginning of run" in said(found)


def test_a_log_without_any_beginning_is_not_said_to_hold(entries: list[dict[str, Any]]) -> None:
    assert not decide_anew(entry for entry in entries if "begins" not in entry).holds
    assert not decide_anew([]).holds


def test_two_planners_in_one_log_are_told_apart(tmp_path: Path) -> None:
    logs = [written(tmp_path / name).read_bytes().splitlines() for name in ("one", "other")]
    both = tmp_path / "both"
    mixed = [line for pair in zip(*logs, strict=True) for line in pair]
    # The lines of one tick are written at once, so they are not parted.
    ticks = [(json.loads(line)["run"], json.loads(line).get("tick", 0)) for line in mixed]
    order = sorted(range(len(mixed)), key=lambda index: (ticks[index][1], ticks[index][0], index))
    both.write_bytes(b"".join(mixed[index] + b"\n" for index in order))
    found = verify(both)
    assert found.holds
    assert found.same == 4 * TICKS


def test_other_code_is_named(entries: list[dict[str, Any]]) -> None:
    changed = copied(entries)
    changed[0]["begins"]["code"] = "0123456789ab"
    found = decide_anew(changed)
    assert found.holds
    assert "written by other code (0123456789ab;" in said(found)


@pytest.mark.parametrize("begins", [None, {}, {"policy": {"roles": {"decode": {"knob": 3}}}, "code": "x"}])
def test_a_beginning_that_is_none_is_said(entries: list[dict[str, Any]], begins: Any) -> None:
    changed = copied(entries)
    changed[0]["begins"] = begins
    found = decide_anew(changed)
    assert not found.holds
    assert "the policy at the beginning of run" in said(found)


def _places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The way to each value in ``value``."""
    entries = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in entries:
        yield (*path, key)
        yield from _places(inner, (*path, key))


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_whatever_stands_in_a_line_it_is_said_and_nothing_is_raised(
    entries: list[dict[str, Any]], data: st.DataObject
) -> None:
    changed = copied(entries[:9])
    for _ in range(2):
        entry = data.draw(st.sampled_from([changed[0], changed[0], *changed[1:]]))
        *way, last = data.draw(st.sampled_from(list(_places(entry))))
        for key in way:
            entry = entry[key]
        entry[last] = data.draw(
            st.sampled_from([None, True, 0, -5, 10**30, 10**400, 1e308, -1e300, "x", [], {}, [1], {"a": 1}, [None]])
        )
    said(decide_anew(json.loads(json.dumps(changed))))


def test_a_time_beyond_all_numbers_is_none_that_stops_the_telling(entries: list[dict[str, Any]]) -> None:
    changed = copied(entries)
    changed[3]["at"] = 10**400
    changed[3]["replicas"] = 10**400
    assert "The first difference is at inf s after 1970: tick 2, " in said(decide_anew(changed))


@pytest.mark.parametrize(("name", "value"), [("roles", [1]), ("gpus_per_replica", "x")])
def test_a_policy_of_other_kinds_of_values_is_none_whatever_its_time(
    entries: list[dict[str, Any]], name: str, value: Any
) -> None:
    changed = copied(entries)
    changed[0]["begins"]["policy"][name] = value
    changed[0]["at"] = 1e300
    found = decide_anew(changed)
    assert not found.holds
    assert "The first difference is at 1e+300 s after 1970: the policy at the beginning of run" in said(found)


def test_a_torn_line_in_the_midst_is_no_entry_and_its_decision_is_missing(tmp_path: Path) -> None:
    path = written(tmp_path / "log")
    torn = path.read_bytes().splitlines()
    torn[10] = torn[10][:100]
    path.write_bytes(b"\n".join(torn) + b"\n")
    found = verify(path)
    assert not found.holds
    assert found.first is not None
    assert "1 line is no entry of a decision log (log:11): changed, torn, or put in by somebody else." in said(found)
    # A tick's lines are told by the first of them.
    assert found.first.place in ("log:10", "log:12")
    assert f", {found.first.place}: tick 5 cannot be decided anew" in said(found)


@pytest.mark.parametrize(
    "line",
    [b"nothing", b"{}", b"[]", b"12", b"null", b'{"at": 5}', b"\xff\xfe", b"\0" * 300, b"[" * 100_000, b'{"at":1e999}'],
    ids=lambda line: str(line[:12]),
)
@pytest.mark.parametrize("place", [0, 9, 10, 2 * TICKS + 1], ids=["first", "amid a tick", "between ticks", "last"])
def test_a_line_that_is_no_entry_fails_and_is_told_with_its_number_wherever_it_stands(
    tmp_path: Path, line: bytes, place: int
) -> None:
    path = written(tmp_path / "log")
    lines = path.read_bytes().splitlines()
    path.write_bytes(b"\n".join([*lines[:place], line, *lines[place:]]) + b"\n")
    found = verify(path)
    assert not found.holds
    assert (found.first, found.same) == (None, 2 * TICKS), "what is decided is not less sure for it"
    assert f"1 line is no entry of a decision log (log:{place + 1})" in said(found)


def test_of_many_lines_that_are_no_entries_the_first_are_told(tmp_path: Path) -> None:
    path = written(tmp_path / "log", max_bytes=60_000)
    (tmp_path / "log.1").write_bytes(b"x\n" + (tmp_path / "log.1").read_bytes() + b'{"at":12.5,"now":3')
    path.write_bytes(path.read_bytes() + 4 * b"x\n")
    found = verify(path)
    assert not found.holds
    assert found.torn_at is None, "what was moved away is written no more"
    assert "6 lines are no entries of a decision log (log.1:1, log.1:" in said(found)
    assert ", 3 more): changed" in said(found)


def test_a_log_that_is_still_written_holds_wherever_its_last_line_ends(tmp_path: Path) -> None:
    path = written(tmp_path / "log")
    whole = path.read_bytes()
    lines = whole.splitlines(keepends=True)
    for kept in (3, 4, 10, 11):  # with the beginning, odd numbers end with a tick
        before, last = b"".join(lines[:kept]), lines[kept]
        for length in (1, 5, 6, 100, len(last) - 2):
            path.write_bytes(before + last[:length])
            found = verify(path)
            assert found.holds, (kept, length, said(found))
            assert found.first is None
            assert found.same == 2 * ((kept - 1) // 2)
            assert f"The last line (log:{kept + 1}) is not whole, as while the planner writes it" in said(found)
        path.write_bytes(before + last[:-1])
        assert verify(path).torn_at is None, "all of it is there"


def test_what_else_is_wrong_is_found_in_a_log_that_is_still_written(tmp_path: Path) -> None:
    path = written(tmp_path / "log")
    lines = path.read_bytes().splitlines(keepends=True)
    torn = lines.pop()[:200]
    path.write_bytes(b"".join(lines[:9] + lines[11:]) + torn)
    assert not verify(path).holds
    path.write_bytes(b"".join(lines) + b"torn")
    found = verify(path)
    assert not found.holds
    assert f"1 line is no entry of a decision log (log:{len(lines) + 1})" in said(found), "the planner begins none so"


def test_a_file_that_is_no_log_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "log"
    with pytest.raises(SnapshotError, match="cannot be read"):
        verify(path)
    for text in ("nothing\n", "", '{"at":1'):
        path.write_text(text)
        with pytest.raises(SnapshotError, match="holds no decision"):
            verify(path)


def test_a_policy_is_the_same_from_its_plain_values() -> None:
    policy = JointPolicy.of(ROLES, 8, {"decode": 1, "prefill": 2})
    again = JointPolicy.of(**json.loads(json.dumps(policy.plain())))
    assert again == policy
    assert set(again.policies) == {Role.DECODE, Role.PREFILL}
