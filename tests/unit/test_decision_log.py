"""The planner's decision log told in sentences: the log is the plugin's own, written by its code."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from datetime import datetime
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from dynamo_snapshot.errors import SnapshotError
from dynamo_snapshot.replay.decisions.log import Decision, Pool, Prediction, moment, of_role, read_log
from dynamo_snapshot.replay.decisions.sentences import changes, explain
from planner.observation import EngineSample, Observation, PoolView, Role, Starting
from planner.policy import LoadPolicy, Memory
from planner.records import DecisionLog, record

NOON = datetime(2026, 5, 4, 12, 0, 0).timestamp()
"""Of this machine's time zone."""
IDS = {"request_id": "tick-7", "decision_id": "d-9"}


def engine(name: str, passes: int, running: float, queued: float, queued_tokens: float = 0.0) -> EngineSample:
    """A worker that prefills 2000 tokens in a pass of 0.1 s."""
    return EngineSample(name, 0, passes, running, queued, 0.1, 2000.0, 0.0, running, 100.0 * running, queued_tokens)


def seen(second: int, workers: int, queued: float, pool: PoolView | None) -> Observation:
    samples = tuple(engine(f"w{index}", 10 * second + index, 2.0, queued, 2000 * queued) for index in range(workers))
    return Observation(workers, samples, pool)


def pool_view(target: int, **others: Any) -> PoolView:
    return replace(PoolView(target, target, start_times={"restore": (1.0, 2.0, 3.0)}), **others)


@pytest.fixture
def written(tmp_path: Path) -> Path:
    """Twenty calm seconds of one worker, then a burst that is answered, with one replica on its way."""
    path = tmp_path / "decisions.jsonl"
    log, policy, memory = DecisionLog(path), LoadPolicy(ttft_objective_s=1.5, max_replicas=8), Memory()
    target = 1
    for second in range(24):
        burst = second >= 20
        starting = (Starting("restore", 1.5),) if second == 23 else ()
        observation = seen(second, 1, 40.0 if burst else 0.0, pool_view(target, starting=starting))
        proposal, memory = policy.decide(observation, memory, 100.0 + second)
        target = proposal.replicas or target
        log.write(record(NOON + second, observation, proposal, now=100.0 + second, ids=IDS))
    return path


def test_a_burst_is_told_from_what_was_seen_to_what_was_wanted(written: Path) -> None:
    decisions = read_log(written).decisions
    text = " ".join(explain(decisions, NOON + 23.4))
    last = decisions[-1]
    assert last.replicas is not None
    assert last.replicas > 1
    assert f"At 2026-05-04 12:00:23 {datetime.fromtimestamp(NOON).astimezone():%z} {last.replicas} replicas" in text
    assert "raised from " in text
    assert "1 worker was ready, 1 on the way: 1 being restored, the oldest ordered 1.5 s before" in text
    assert "lately they took 2.0 s, the median of 3" in text
    assert "1 of 1 ready workers told of 2 running and 40 waiting requests" in text
    assert "that is how far the policy looked" in text
    assert "would miss" in text
    assert last.forecast is not None
    best = min(last.forecast.candidates, key=lambda candidate: candidate.cost)
    assert f"Cheapest: {best.replicas}." in text
    assert last.reason in text
    assert "request tick-7, decision d-9" in text


def test_the_first_decision_is_told_as_that(written: Path) -> None:
    text = " ".join(explain(read_log(written).decisions, NOON + 0.5))
    assert "1 replica was wanted in the decode pool, since the log begins 0.5 s before" in text
    assert "none was on its way" in text
    assert "need came from the number of requests" in text


def test_changes_are_the_decisions_that_wanted_another_size(written: Path) -> None:
    decisions = read_log(written).decisions
    sizes = [decision.replicas for decision in decisions]
    found = list(changes(decisions))
    assert [(before, decision.replicas) for decision, before in found] == [
        (one, other) for one, other in pairwise(sizes) if one != other
    ]
    assert found


def entry(**others: Any) -> dict[str, Any]:
    plain = {"at": NOON, "role": "decode", "action": "hold", "reason": "why", "replicas": 3, "desired": 3, "ready": 3}
    return plain | others


def written_as(path: Path, *entries: Mapping[str, Any]) -> Path:
    path.write_text("".join(json.dumps(one) + "\n" for one in entries))
    return path


def told(tmp_path: Path, *entries: Mapping[str, Any], at: float = NOON) -> str:
    return " ".join(explain(read_log(written_as(tmp_path / "log", *entries)).decisions, at))


def test_what_is_unknown_is_said(tmp_path: Path) -> None:
    text = told(tmp_path, entry(ready=None, running=1.0, queued=0.0, fresh_workers=1, unknown=["no metrics from w2"]))
    assert "How many workers were ready was unknown" in text
    assert "Unknown: no metrics from w2. What is unknown may raise the size and never lowers it." in text
    assert "the fleet's status was not there" in text
    assert "need came from the number of requests" in text


def test_a_limit_of_the_fleet_is_said_with_its_reason(tmp_path: Path) -> None:
    pool = {"target": 5, "achievable": 3, "unachievable_reason": "node_at_capacity"}
    text = told(tmp_path, entry(desired=5, floor=2, observation={"pool": pool}))
    assert "5 were needed, but the fleet could not reach more than 3 (node_at_capacity)." in text
    assert "needs 2 at least" in text


def test_what_others_than_the_fleet_limit_is_not_laid_to_it(tmp_path: Path) -> None:
    pool = {"target": 3, "achievable": 3}
    for reason in (
        "why; 3 of 5 within the budget of 3 GPUs",
        "why; the fleet was told 3 by somebody else, so 5 is said again",
    ):
        text = told(tmp_path, entry(desired=5, reason=reason, observation={"pool": pool}))
        assert "5 were needed, but 3 asked for, for the reason" in text
        assert "could not reach" not in text
        assert f"In the policy's own words: {reason}." in text


def test_what_binds_an_engine_besides_prefill_is_said(tmp_path: Path) -> None:
    forecast = {"lead_s": 2.0, "demand_replicas": 3.3, "waiting_s": 2.5, "rise": 4, "keep": 4}
    text = told(tmp_path, entry(forecast={**forecast, "slots": 8.0, "residence_s": 1.7}))
    assert "it ran 8 requests at once, and each stayed for 1.7 s." in text
    assert "at once" not in told(tmp_path, entry(forecast={**forecast, "slots": None, "residence_s": None}))
    assert "at once" not in told(tmp_path, entry(forecast=forecast))


def test_what_was_parked_and_what_was_asked_to_be_is_said(tmp_path: Path) -> None:
    pool = {"target": 3, "achievable": 3, "parked": 2}
    text = told(tmp_path, entry(hint={"parked": 4, "prefetch": True}, observation={"pool": pool}))
    assert "3 workers were ready, 2 parked, none was on its way." in text
    assert "the fleet was asked to have 4 replicas kept parked and the snapshot in memory." in text
    assert "was asked to have the snapshot in memory." in told(tmp_path, entry(hint={"prefetch": True}))
    assert "was asked" not in told(tmp_path, entry(hint={"prefetch": False}))
    assert "parked" not in told(tmp_path, entry())


def test_a_planner_that_knows_nothing_and_one_that_went_silent(tmp_path: Path) -> None:
    assert "had no wanted size" in told(tmp_path, entry(replicas=None, action="nothing"))
    assert "The planner's last decision was 5 min old by then" in told(tmp_path, entry(), at=NOON + 300)


def test_before_the_log_begins_nothing_is_told(tmp_path: Path) -> None:
    with pytest.raises(SnapshotError, match="the log begins at 2026-05-04 12:00:00"):
        told(tmp_path, entry(), at=NOON - 1)


def test_the_log_that_was_moved_away_comes_first_and_torn_lines_are_counted(tmp_path: Path) -> None:
    path = written_as(tmp_path / "log", entry(at=NOON + 1))
    written_as(tmp_path / "log.1", entry(at=NOON))
    with path.open("a") as file:
        file.write('{"at": 17')
    log = read_log(path)
    assert [decision.at for decision in log.decisions] == [NOON, NOON + 1]
    assert log.unreadable == 1


@pytest.mark.parametrize("content", [None, "", "not a log\n"])
def test_a_file_without_a_decision_is_refused(tmp_path: Path, content: str | None) -> None:
    path = tmp_path / "log"
    if content is not None:
        path.write_text(content)
    with pytest.raises(SnapshotError, match=r"holds no decision|cannot be read"):
        read_log(path)


def test_of_several_pools_one_is_named(tmp_path: Path) -> None:
    decisions = read_log(written_as(tmp_path / "log", entry(), entry(role="prefill"))).decisions
    assert len(of_role(decisions, "prefill")) == 1
    assert of_role(decisions[:1], None) == decisions[:1]
    with pytest.raises(SnapshotError, match="several pools") as error:
        of_role(decisions, None)
    assert "decode, prefill" in error.value.remedy
    with pytest.raises(SnapshotError, match="no decision for encode"):
        of_role(decisions, "encode")


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        (None, NOON),
        ("-90", NOON - 90),
        (str(NOON - 3), NOON - 3),
        (f"{NOON:.0f}", NOON),
        ("11:59:00", NOON - 60),
        ("12:30:00", NOON + 1800 - 86400),
        ("2026-05-04 11:00:00", NOON - 3600),
        ("2026-05-04T11:00:00", NOON - 3600),
    ],
)
def test_moments_are_read_as_people_write_them(text: str | None, seconds: float) -> None:
    assert moment(text, [Decision(NOON, "decode", "hold", "why")]) == pytest.approx(seconds)


@pytest.mark.parametrize(
    "text",
    [
        "noon",
        "12:00",
        "2026-13-04",
        "nan",
        "inf",
        "-inf",
        "1e300",
        "-1e300",
        "0001-01-01T00:00:00+14:00",
        f"{NOON:.0f}000",
    ],
)
def test_what_is_no_moment_is_refused(text: str) -> None:
    """The last is in milliseconds."""
    with pytest.raises(SnapshotError, match="is no moment") as error:
        moment(text, [Decision(NOON, "decode", "hold", "why")])
    assert "seconds since 1970" in error.value.remedy


def test_of_a_log_whose_time_no_calendar_has_a_time_of_day_is_none() -> None:
    strange = [Decision(1e300, "decode", "hold", "why")]
    with pytest.raises(SnapshotError, match="is no moment"):
        moment("12:00:00", strange)
    assert moment("2026-05-04 12:00:00", strange) == NOON


def test_every_field_that_is_read_is_one_that_the_plugin_writes(written: Path) -> None:
    """A renamed field would be told as missing for ever."""
    newest = json.loads(written.read_text().splitlines()[-1])
    assert set(Decision.__struct_fields__) <= set(newest)
    assert set(Prediction.__struct_fields__) <= set(newest["forecast"])
    assert set(Pool.__struct_fields__) <= set(newest["observation"]["pool"])
    assert set(newest["forecast"]["candidates"][0]) == {"replicas", "misses_per_s", "cost"}
    assert newest["role"] == Role.DECODE
