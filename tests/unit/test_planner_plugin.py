"""The plugin around the policy: contexts recorded from real planners, FleetStatus, records, configuration."""

from __future__ import annotations

import asyncio
import base64
import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from dynamo_snapshot.model import FleetStatus, PoolStatus, ReplicaState, ReplicaStatus, StartTimes, Way, encode
from planner.config import RoleBounds, external_planner_config, planner_config, plugin_options
from planner.context import FPM_VERSION, engine_sample, observation
from planner.engine import engine_from_options
from planner.fleet_status import FleetStatusFile, pool_view
from planner.observation import EngineSample, Observation, Role
from planner.plugin import SnapshotScaling
from planner.policy import LoadPolicy, Memory
from planner.records import DecisionLog, record
from planner.window import NeedWindow

RECORDED = json.loads((Path(__file__).parent / "data" / "planner-contexts.json").read_text())


def pydantic_context(recorded: dict[str, Any]) -> Any:
    from dynamo.planner.plugins.types import PipelineContext

    context = json.loads(json.dumps(recorded["context"]))
    for engines in (context["observations"]["fpm"] or {}).values():
        for key, message in engines.items():
            engines[key] = base64.b64decode(message)
    return PipelineContext.model_validate(context)


def protobuf_context(recorded: dict[str, Any]) -> Any:
    from dynamo.planner.plugins._proto_bridge import pydantic_to_proto

    return pydantic_to_proto(pydantic_context(recorded))


@pytest.mark.parametrize("build", [pydantic_context, protobuf_context])
@pytest.mark.parametrize("recorded", RECORDED, ids=lambda entry: f"{entry['dynamo']}-{entry['running']}")
def test_recorded_contexts_read_the_same_over_both_transports(recorded: dict[str, Any], build: Any) -> None:
    seen = observation(build(recorded), Role.DECODE)
    assert seen.ready == 2
    assert len(seen.samples) == 2
    assert [sample.queued for sample in seen.samples] == [0, 0]
    assert sum(sample.running or 0 for sample in seen.samples) == recorded["running"]
    assert all(sample.worker_id.isdigit() and sample.sequence > 0 for sample in seen.samples)
    other = observation(build(recorded), Role.PREFILL)
    assert (other.ready, other.samples) == (None, ())


def test_the_metrics_schema_is_dynamos() -> None:
    from dynamo.common import forward_pass_metrics as fpm

    assert fpm.FPM_VERSION == FPM_VERSION
    metrics = fpm.ForwardPassMetrics(
        worker_id="7",
        counter_id=3,
        wall_time=0.25,
        scheduled_requests=fpm.ScheduledRequestMetrics(
            num_prefill_requests=1,
            sum_prefill_tokens=100,
            sum_prefill_kv_tokens=30,
            num_decode_requests=2,
            sum_decode_kv_tokens=500,
        ),
        queued_requests=fpm.QueuedRequestMetrics(num_prefill_requests=4, sum_prefill_tokens=900, num_decode_requests=8),
    )
    expected = EngineSample("7", 1, 3, 3.0, 12.0, 0.25, 100.0, 30.0, 2.0, 500.0, 900.0)
    assert engine_sample("7/1", fpm.encode(metrics)) == expected


def test_what_a_message_lacks_is_unknown_and_not_zero() -> None:
    sample = engine_sample("7/0", msgspec.msgpack.encode({"counter_id": 1, "wall_time": "long"}))
    assert (sample.running, sample.queued) == (0.0, 0.0)
    assert (sample.pass_s, sample.prefill_tokens, sample.queued_tokens, sample.decode_requests) == (None,) * 4


def test_what_is_too_much_to_be_an_amount_is_unknown_and_stops_no_decision() -> None:
    below_zero = 2**64 - 3
    content = {
        "counter_id": 9,
        "wall_time": 1e300,
        "scheduled_requests": {"num_prefill_requests": 1, "sum_prefill_tokens": 1e300, "num_decode_requests": 2},
        "queued_requests": {"num_prefill_requests": below_zero, "sum_prefill_tokens": 1e300},
    }
    sample = engine_sample("7/0", msgspec.msgpack.encode(content))
    assert (sample.running, sample.decode_requests) == (3.0, 2.0)
    assert (sample.queued, sample.pass_s, sample.prefill_tokens, sample.queued_tokens) == (None,) * 4


@pytest.mark.parametrize(
    "message",
    [
        b"",
        b"\xc1not msgpack",
        msgspec.msgpack.encode([1, 2]),
        msgspec.msgpack.encode({"version": FPM_VERSION + 1}),
        msgspec.msgpack.encode({"scheduled_requests": 3}),
        msgspec.msgpack.encode({"queued_requests": {"num_prefill_requests": "many"}}),
    ],
)
def test_a_message_that_cannot_be_read_is_an_unknown_worker_not_an_absent_one(message: bytes) -> None:
    sample = engine_sample("7/0", message)
    assert sample.worker_id == "7"
    assert None in (sample.running, sample.queued)


async def test_the_plugin_proposes_set_with_a_floor_and_its_reason(tmp_path: Path) -> None:
    from dynamo.planner.plugins.types import OverrideType, ProposeStageRequest

    busy = next(entry for entry in RECORDED if entry["running"] == 9 and entry["dynamo"] == "1.6.1")
    log = tmp_path / "decisions.jsonl"
    plugin = SnapshotScaling(roles={"decode": {"target_requests_per_replica": 2}}, decision_log_path=str(log))
    assert (await plugin.Bootstrap(None)).ok
    answer = await plugin.Propose(ProposeStageRequest(context=pydantic_context(busy)))
    targets = [(target.sub_component_type, target.type, target.replicas) for target in answer.override.targets]
    assert targets == [("decode", OverrideType.SET, 5), ("decode", OverrideType.AT_LEAST, 5)]
    assert "9 running + 0 queued on 2 of 2 ready workers, 2 a replica" in answer.override.reason
    begins, written = [json.loads(line) for line in log.read_text().splitlines()]
    assert begins["begins"]["policy"]["roles"]["decode"]["target_requests_per_replica"] == 2
    assert (written["replicas"], written["ready"], written["running"]) == (5, 2, 9)
    assert written["reason"] in answer.override.reason


async def test_every_answer_has_the_numbers_and_the_reason_of_its_own_tick_and_the_log_the_same(tmp_path: Path) -> None:
    """Raised, held, unknown: no reason stands still, and none is lost on its way into the answer."""
    from dynamo.planner.plugins.types import OverrideType, ProposeStageRequest

    log = tmp_path / "decisions.jsonl"
    plugin = SnapshotScaling(roles={"decode": {"target_requests_per_replica": 2}}, decision_log_path=str(log))
    answers = []
    for number, recorded in enumerate(RECORDED * 3):
        context = pydantic_context(recorded)
        if number % 3 == 1:
            context.observations.fpm.decode_engines.popitem()
        answer = (await plugin.Propose(ProposeStageRequest(context=context))).override
        sizes = {target.type: target.replicas for target in answer.targets}
        answers.append((sizes[OverrideType.SET], sizes[OverrideType.AT_LEAST], answer.reason))
    written = [json.loads(line) for line in log.read_text().splitlines()][1:]
    assert answers == [(entry["replicas"], entry["floor"], f"decode: {entry['reason']}") for entry in written]
    for entry in written:
        assert f"{entry['running']:g} running + {entry['queued']:g} queued" in entry["reason"]
        assert ("unknown: no metrics from 1 of 2 ready workers" in entry["reason"]) == bool(entry["unknown"])
    assert {"start", "hold"} <= {entry["action"] for entry in written}


async def test_the_plugin_has_no_opinion_while_nothing_is_known() -> None:
    from dynamo.planner.plugins.types import PipelineContext, ProposeStageRequest

    plugin = SnapshotScaling(roles={"decode": {}})
    answer = await plugin.Propose(ProposeStageRequest(context=PipelineContext(request_id="a", decision_id="b")))
    assert answer.accept is not None


@pytest.mark.parametrize(
    ("roles", "text"),
    [
        ({}, "roles is empty"),
        ({"router": {}}, "roles.router"),
        ({"decode": {"min_replica": 1}}, "roles.decode: .*min_replica"),
        ({"decode": {"hysteresis": 2}}, "roles.decode: hysteresis must be from 0 to below 1"),
    ],
)
def test_wrong_options_name_the_role_and_the_knob(roles: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        engine_from_options(roles)


def status(at: float, **pool: Any) -> FleetStatus:
    values = {"target": 3, "achievable": 3, "serving": 2, "pending": 1, "draining": 0, **pool}
    return FleetStatus(
        fleet="f",
        at=at,
        fence=1,
        pools=(PoolStatus(pool="main", role="decode", **values),),
        replicas=tuple(
            ReplicaStatus(
                replica_id=f"r{number}",
                pool="main",
                node="n",
                state=state,
                since=at,
                way=Way.RESTORE,
                instance_id=number,
            )
            for number, state in (
                (11, ReplicaState.SERVING),
                (12, ReplicaState.DRAINING),
                (13, ReplicaState.FAILED),
            )
        ),
    )


def test_pool_view_takes_only_what_is_fresh_and_of_the_role() -> None:
    view = pool_view(status(100.0), Role.DECODE, now=105.0, max_age_s=10)
    assert view is not None
    assert view.not_serving == {"12", "13"}
    assert view.limit is None
    assert pool_view(status(100.0), Role.DECODE, now=111.0, max_age_s=10) is None
    assert pool_view(status(100.0), Role.DECODE, now=95.0, max_age_s=10) is not None
    assert pool_view(status(100.0), Role.DECODE, now=89.0, max_age_s=10) is None, "the clock was set back"
    assert pool_view(status(100.0), Role.PREFILL, now=105.0, max_age_s=10) is None
    assert pool_view(None, Role.DECODE, now=105.0, max_age_s=10) is None


def test_pool_view_limits_where_something_stands_in_the_way() -> None:
    stuck = pool_view(status(100.0, achievable=2), Role.DECODE, now=100.0, max_age_s=10)
    assert stuck is not None
    assert stuck.limit == 2


def test_pool_view_has_no_parked_replica_among_those_on_their_way_but_one_that_wakes() -> None:
    def replica(name: str, state: ReplicaState, way: Way, *, parks: bool) -> ReplicaStatus:
        return ReplicaStatus(
            replica_id=name, pool="main", node="n", state=state, since=99.0, way=way, parks=parks, ordered_at=98.0
        )

    replicas = (
        replica("parks", ReplicaState.RESTORING, Way.RESTORE, parks=True),
        replica("parked", ReplicaState.PARKED, Way.RESTORE, parks=True),
        replica("wakes", ReplicaState.RESUMING, Way.WAKE, parks=False),
    )
    times = (StartTimes(pool="main", way=Way.WAKE, seconds=(0.4, 0.6)),)
    told = msgspec.structs.replace(status(100.0), replicas=replicas, start_times=times)
    view = pool_view(told, Role.DECODE, now=100.0, max_age_s=10)
    assert view is not None
    assert [(one.way, one.age_s) for one in view.starting] == [("wake", 2.0)]
    assert view.start_times["wake"] == (0.4, 0.6)


def test_the_status_file_is_read_again_when_it_was_replaced(tmp_path: Path) -> None:
    path = tmp_path / "fleet-status.json"
    source = FleetStatusFile(path)
    assert source.latest() is None
    for at in (1.0, 2.0):
        replacement = tmp_path / "next"
        replacement.write_bytes(encode(status(at)))
        replacement.replace(path)
        latest = source.latest()
        assert latest is not None
        assert latest.at == at
    path.write_text('{"fleet": 3}')
    assert source.latest() is None
    path.unlink()
    assert source.latest() is None


def test_a_decision_log_that_cannot_be_written_stops_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    log = DecisionLog(tmp_path / "missing" / "decisions.jsonl")
    for _ in range(3):
        log.write({"a": 1})
    assert len([entry for entry in caplog.records if "cannot be written" in entry.message]) == 1


def test_a_decision_log_is_moved_aside_at_its_size(tmp_path: Path) -> None:
    path = tmp_path / "decisions.jsonl"
    log = DecisionLog(path, max_bytes=40)
    for number in range(5):
        log.write({"number": number, "text": "x" * 10})
    # Two lines are above 40 bytes: numbers 2 and 3 were moved aside, 4 is the newest.
    assert [json.loads(line)["number"] for line in path.with_name("decisions.jsonl.1").open()] == [2, 3]
    assert [json.loads(line)["number"] for line in path.open()] == [4]


def test_records_hold_nothing_that_json_does_not() -> None:
    seen = Observation(ready=1, samples=(EngineSample("a", 0, 1, float("nan"), None),))
    proposal, _ = LoadPolicy().decide(seen, Memory(), 0.0)
    json.dumps(record(1.0, seen, proposal), allow_nan=False)


def test_the_window_keeps_the_maximum_and_forgets_the_old() -> None:
    window = NeedWindow()
    for at, need in [(0.0, 2), (1.0, 5), (2.0, 1), (3.0, 3)]:
        window = window.add(at, need, length_s=10)
    assert (window.highest, window.highest_at) == (5, 1.0)
    assert window.add(11.0, 0, length_s=10).highest == 3


@pytest.mark.parametrize(
    ("roles", "mode"),
    [
        ({"decode": RoleBounds()}, "agg"),
        ({"prefill": RoleBounds()}, "prefill"),
        ({"decode": RoleBounds(1, 4), "prefill": RoleBounds(2, 3)}, "disagg"),
    ],
)
def test_the_planner_accepts_the_configuration(roles: dict[str, RoleBounds], mode: str) -> None:
    from dynamo.planner.config.planner_config import PlannerConfig

    config = planner_config(namespace="n", model_name="m", roles=roles, tick_s=0.25, decision_log_path="/tmp/d")
    accepted = PlannerConfig.model_validate(config)
    assert accepted.mode == mode
    assert accepted.scheduling.scale_interval_seconds == 0.25
    (spec,) = accepted.plugin_registration.in_process_plugins
    plugin = SnapshotScaling(**spec.kwargs)
    assert asyncio.iscoroutinefunction(plugin.Propose)
    external = external_planner_config(config, "unix:///tmp/gateway.sock", "secret")
    accepted = PlannerConfig.model_validate(external)
    assert accepted.plugin_registration.in_process_plugins == []
    assert accepted.scheduling.gateway.enabled
    engine_from_options(**plugin_options(config))
