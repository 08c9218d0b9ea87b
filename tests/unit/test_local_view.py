"""What a person sees: rendered from given views, and what a log says of a change."""

from __future__ import annotations

import json
import os
from pathlib import Path

import msgspec
from rich.console import Console

from dynamo_snapshot.local.observe import FleetView, counter_total
from dynamo_snapshot.local.planner_log import latest_reason, planner_changes
from dynamo_snapshot.local.service import ServiceState, ServiceStatus, restart_delay
from dynamo_snapshot.local.view import LiveView, Terminal, duration, render, state_changes
from dynamo_snapshot.model import (
    DecisionRecord,
    FleetStatus,
    PoolStatus,
    ReplicaState,
    ReplicaStatus,
    Way,
    WorkerLoad,
)

NOW = 1_000_000.0


def status(state: ReplicaState = ReplicaState.SERVING, *, at: float = NOW, achievable: int = 3) -> FleetStatus:
    return FleetStatus(
        fleet="demo",
        at=at,
        fence=7,
        pools=(
            PoolStatus(
                pool="decode",
                role="decode",
                target=3,
                achievable=achievable,
                serving=1,
                pending=2,
                draining=0,
                unachievable_reason=None if achievable == 3 else "disk_full",
                snapshot_id="snap-1",
            ),
        ),
        replicas=(
            ReplicaStatus(
                replica_id="decode-1",
                pool="decode",
                node="here",
                state=state,
                since=NOW - 75,
                way=Way.RESTORE,
                instance_id=0xABC,
                load=WorkerLoad(running=4, queued=2, at=NOW),
            ),
        ),
        decisions=(DecisionRecord(at=NOW - 3, pool="decode", what="target 1 -> 3", reason="9 requests queued"),),
    )


def shown(view: FleetView) -> str:
    console = Console(width=160, record=True, file=open("/dev/null", "w"))  # noqa: SIM115 - ends with the test
    console.print(render(view, ["a line"]))
    return console.export_text()


def test_short_words_stay_whole_in_80_columns() -> None:
    console = Console(width=80, record=True, file=open("/dev/null", "w"))  # noqa: SIM115 - ends with the test
    cold = msgspec.structs.replace(
        status().replicas[0], replica_id="decode-1-1", way=Way.COLD_START, instance_id=2**63 - 1
    )
    console.print(render(FleetView(at=NOW, status=msgspec.structs.replace(status(), replicas=(cold,)))))
    text = console.export_text()
    assert "cold_start" in text
    assert "● serving" in text
    assert "1 min 15 s" in text


def test_a_fleet_shows_replicas_with_time_in_state_load_and_decisions_with_reasons() -> None:
    text = shown(FleetView(at=NOW, status=status(), requests_per_s=12.34))
    for expected in (
        "decode-1",
        "● serving",
        "1 min 15 s",
        "restore",
        "abc",
        "snap-1",
        "9 requests queued",
        "12.3 req",
        "a line",
    ):
        assert expected in text


def test_parked_replicas_stand_apart_from_those_that_serve_or_will() -> None:
    parked = status(ReplicaState.PARKED)
    pools = (msgspec.structs.replace(parked.pools[0], parked=1, parked_target=2),)
    text = shown(FleetView(at=NOW, status=msgspec.structs.replace(parked, pools=pools)))
    assert "◒ parked" in text
    assert "1 of 2" in text
    assert "1 of 2" not in shown(FleetView(at=NOW, status=status()))


def test_what_cannot_be_reached_says_why() -> None:
    assert "at most 2: disk_full" in shown(FleetView(at=NOW, status=status(achievable=2)))


def test_an_old_status_is_shown_with_its_age() -> None:
    assert "the status is 42 s old" in shown(FleetView(at=NOW, status=status(at=NOW - 42)))


def test_a_service_that_is_down_is_named_with_its_detail() -> None:
    down = ServiceStatus(
        name="planner", state=ServiceState.RESTARTING, since=NOW, restarts=2, detail="exited with status 1"
    )
    text = shown(FleetView(at=NOW, services=(down,)))
    assert "planner restarting exited with status 1" in text
    assert "2 restarts" in text


def test_a_log_says_each_change_once() -> None:
    first = FleetView(at=NOW, status=status(ReplicaState.RESTORING))
    second = FleetView(at=NOW, status=status(ReplicaState.SERVING))
    assert state_changes(None, first) == [
        "replica decode-1 (decode, restore) restoring",
        "decision for decode: target 1 -> 3 (9 requests queued)",
    ]
    assert state_changes(first, second) == ["replica decode-1 (decode, restore) serving"]
    assert state_changes(second, second) == []


def test_a_reader_that_goes_is_told_once_and_nothing_is_raised() -> None:
    gone: list[str] = []
    reading, writing = os.pipe()
    with os.fdopen(writing, "w") as output:
        console = Terminal(file=output)
        console.on_reader_gone = lambda: gone.append("gone")
        with LiveView(console, plain=True) as view:
            view.say("one")
            assert b"one" in os.read(reading, 100)
            os.close(reading)
            view.say("two")
            view.say("three")
    assert gone == ["gone"]


def test_durations() -> None:
    assert [duration(value) for value in (0.44, 12, 75, 3600 + 62)] == ["0.4 s", "12 s", "1 min 15 s", "1:01:02"]


def test_restart_delay_doubles_up_to_its_cap_and_a_stable_life_is_forgiven() -> None:
    assert [restart_delay(failures, 1.0) for failures in (1, 2, 3, 20)] == [0.25, 0.5, 1.0, 10.0]
    assert restart_delay(20, 30.0) == 0.0


def test_a_counter_is_summed_over_its_labels_and_not_over_others() -> None:
    text = 'requests_total{a="1"} 3\nrequests_total{a="2"} 4\nrequests_total_other 9\n# TYPE requests_total counter\n'
    assert counter_total(text, "requests_total") == 7


def test_the_planners_reasons_are_read_from_its_log(tmp_path: Path) -> None:
    log = tmp_path / "decisions.jsonl"
    entry = {"at": 1.0, "role": "decode", "action": "set", "replicas": 1, "running": 0, "queued": 0, "reason": "idle"}
    busy = {**entry, "at": 3.0, "replicas": 3, "running": 9, "reason": "9 requests"}
    lines = [json.dumps(row) for row in (entry, {**entry, "at": 2.0}, busy)]
    log.write_text("\n".join(lines) + '\n{"at": 4.0, "ro')
    assert [(row["at"], row["replicas"]) for row in planner_changes(log)] == [(1.0, 1), (3.0, 3)]
    assert latest_reason(log) == "decode: 9 requests"
    assert latest_reason(tmp_path / "none") is None
    assert "planner: decode: 9 requests" in shown(FleetView(at=NOW, status=status(), planner=latest_reason(log)))
