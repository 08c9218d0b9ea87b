"""The catalog: specs, refusals, and every policy in a closed loop with the simulator."""

from __future__ import annotations

import math

import pytest

from dynamo_snapshot.errors import SnapshotError
from dynamo_snapshot.model import Reason
from dynamo_snapshot.replay.policies.catalog import build, knobs, names, sweep
from dynamo_snapshot.replay.policies.engine_facts import EngineFacts, Traffic
from dynamo_snapshot.replay.policies.hpa import Hpa
from dynamo_snapshot.replay.policies.knative import KnativeKpa
from dynamo_snapshot.replay.policies.spec import Relative, parse, value
from dynamo_snapshot.replay.simulation.run import simulate
from dynamo_snapshot.replay.simulation.setting import Setting
from dynamo_snapshot.replay.simulation.startup import startup_model
from dynamo_snapshot.replay.simulation.timing import EngineTiming
from dynamo_snapshot.replay.trace import TraceRequest, bundled_trace

SETTING = Setting(engine=EngineTiming(speed=0.33))


def test_names_and_settings_are_read_with_or_without_spaces() -> None:
    spec = parse("knative-kpa( target = 8,panic_window_s=6 )")
    assert (spec.name, dict(spec.values), spec.first) == ("knative-kpa", {"target": "8", "panic_window_s": "6"}, None)
    assert parse("static(4)").first == "4"
    assert parse("hpa").values == {}
    assert parse("hpa()").values == {}


@pytest.mark.parametrize(
    "text",
    ["", "hpa(", "hpa)", "HPA", "hpa(target=)", "hpa(=3)", "hpa(target=1,target=2)", "hpa(target=1,2)", "a(b(c))"],
)
def test_what_is_no_spec_is_refused(text: str) -> None:
    with pytest.raises(SnapshotError) as refused:
        parse(text)
    assert refused.value.reason is Reason.CONFIGURATION_INVALID


def test_values_are_read_by_the_kind_of_their_knob() -> None:
    assert value("3", int) == 3
    assert value("0.5", float) == 0.5
    assert value("0.5c", float) == Relative(0.5)
    assert value("true", bool) is True
    assert value("False", bool) is False
    for text, kind in (("3.5", int), ("x", float), ("c", float), ("1", bool), ("2c", int)):
        with pytest.raises(ValueError, match="expected"):
            value(text, kind)


@pytest.mark.parametrize(
    ("spec", "says"),
    [
        ("knative", "no policy is named knative (did you mean knative-kpa?)"),
        ("hpa(tolerence=0)", "has no knob tolerence (did you mean tolerance?)"),
        ("hpa(target=much)", "target: expected a number, not much"),
        ("hpa(target=nan)", "target: expected a finite number, not nan"),
        ("hpa(tolerance=2)", "tolerance must be from 0 to below 1"),
        ("hpa(4)", "4 has no knob to go to"),
        ("hpa(tolerance=0.1c)", "it is no load of a replica"),
        ("static(0)", "replicas must be at least 1"),
        ("static(4,replicas=5)", "4 has no knob to go to"),
        ("keda(min_replicas=17)", "min_replicas must be from 1 to the setting's 16"),
        ("snapshot(luck=1)", "has no knob luck"),
    ],
)
def test_refusals_name_what_is_wrong_and_what_is_known(spec: str, says: str) -> None:
    with pytest.raises(SnapshotError) as refused:
        build(spec, SETTING)
    assert refused.value.reason is Reason.CONFIGURATION_INVALID
    assert says in refused.value.message
    known = names() if "no policy" in says else knobs(parse(spec).name)
    assert all(name in refused.value.remedy for name in known)


def test_a_policy_is_named_by_its_spec_without_what_is_default() -> None:
    assert build("knative-kpa(target=100, panic_window_s=3)", SETTING).name == "knative-kpa(panic_window_s=3)"
    assert build("knative-kpa(panic_window_s=3,target=8)", SETTING).name == "knative-kpa(target=8,panic_window_s=3)"
    assert build("static", SETTING).name == "static"
    assert build("static(replicas=6)", SETTING).name == "static(6)"
    assert build("hpa(target=0.5c)", SETTING).name == "hpa"
    assert build("hpa(target=2c)", SETTING).name == "hpa(target=2c)"


@pytest.mark.parametrize("name", names())
def test_a_name_built_again_is_the_same_policy(name: str) -> None:
    for spec in sweep(name):
        policy = build(spec, SETTING)
        assert build(policy.name, SETTING).name == policy.name
        assert policy.interval_s > 0


@pytest.mark.parametrize("name", sorted(set(names()) - {"static", "snapshot", "clairvoyant"}))
def test_every_autoscaler_keeps_its_lowest_size(name: str) -> None:
    policy = build(f"{name}(min_replicas=3)", SETTING)
    assert policy.name == f"{name}(min_replicas=3)"
    requests = [TraceRequest(0.0, 100, 10), TraceRequest(900.0, 100, 10)]
    outcome = simulate(requests, policy, SETTING, startup_model("cold(0)"))
    assert outcome.replicas[-1].target == 3


def test_relative_loads_follow_engine_and_traffic() -> None:
    def target(speed: float, traffic: Traffic) -> float:
        policy = build("hpa(target=1c)", Setting(engine=EngineTiming(speed=speed)), traffic)
        assert isinstance(policy, Hpa)
        return policy.knobs.target

    code = Traffic(2048, 28)
    assert target(2.0, code) > target(1.0, code) > target(0.3, code)
    assert target(1.0, Traffic(8192, 28)) < target(1.0, code) < target(1.0, Traffic(2048, 300))
    half = build("knative-kpa(target=0.5c)", SETTING, code)
    assert isinstance(half, KnativeKpa)
    assert half.knobs.target == pytest.approx(EngineFacts.of(SETTING, code).capacity / 2)


def test_capacity_keeps_the_objective_and_twice_of_it_does_not() -> None:
    """So many requests in flight, replaced as they finish: the load is what the word says."""
    traffic = Traffic(2048, 28)
    capacity = EngineFacts.of(SETTING, traffic).capacity
    prefill_s = 2048 * EngineFacts.of(SETTING, traffic).pass_s(8192, 0) / 8192

    def attainment(rate: float) -> float:
        requests = [TraceRequest(number / rate, 2048, 28) for number in range(int(200 * rate))]
        return simulate(requests, build("static(1)", SETTING), SETTING, startup_model("cold(0)")).ttft_attainment

    assert attainment(0.7 / prefill_s) > 0.99
    assert attainment(1.4 / prefill_s) < 0.5
    assert 1 < capacity < SETTING.engine.max_requests


def test_traffic_is_the_mean_of_requests() -> None:
    requests = [TraceRequest(0, 100, 10), TraceRequest(1, 300, 20)]
    assert Traffic.of(requests) == Traffic(200, 15)
    assert Traffic.of([]) == Traffic()


@pytest.mark.parametrize("name", names())
def test_each_sweep_begins_with_the_defaults_and_repeats_nothing(name: str) -> None:
    specs = sweep(name)
    assert specs[0] == name
    built = [build(spec, SETTING).name for spec in specs]
    assert built[0] == name
    assert len(set(built)) == len(built)
    if name not in {"snapshot", "clairvoyant"}:
        assert 8 <= len(specs) <= 16


def test_a_sweep_of_an_unknown_policy_is_refused() -> None:
    with pytest.raises(SnapshotError, match="no policy is named luck"):
        sweep("luck")


@pytest.mark.parametrize("name", names())
def test_every_policy_serves_the_bundled_trace_within_the_bounds(name: str) -> None:
    outcome = simulate(bundled_trace(), build(name, SETTING), SETTING, startup_model("restore-2s"), seed=3)
    assert outcome.policy == name
    assert outcome.unfinished == 0
    assert outcome.peak_replicas >= 1
    assert all(1 <= entry.target <= 16 for entry in outcome.replicas)
    assert math.isfinite(outcome.gpu_hours)


@pytest.mark.parametrize("spec", ["knative-kpa(target=0.5c)", "hpa", "hpa-gpu", "keda", "ray-serve"])
def test_more_load_means_more_replicas_and_silence_means_one(spec: str) -> None:
    rate, busy_s, quiet_s = 12.0, 600, 1800
    requests = [TraceRequest(number / rate, 2048, 28) for number in range(int(rate * busy_s))]
    outcome = simulate(
        requests, build(spec, SETTING), SETTING, startup_model("restore-2s"), duration_s=busy_s + quiet_s
    )
    assert max(entry.target for entry in outcome.replicas) >= 3
    assert outcome.replicas[-1].target == 1
    assert outcome.replicas[-1].at_s < busy_s + quiet_s
