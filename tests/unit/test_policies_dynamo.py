"""Dynamo's own planner as a policy: what it is told, and that its decisions are its own."""

from __future__ import annotations

import math
import random
import sys
from typing import Any

import pytest
from dynamo.planner.config.planner_config import PlannerConfig
from dynamo.planner.core.state_machine import PlannerScalingState
from dynamo.planner.core.types import EngineCapabilities, FpmObservations, WorkerCapabilities, WorkerCounts
from policy_signals import sample, signals

from dynamo_snapshot.errors import SnapshotError
from dynamo_snapshot.model import Reason
from dynamo_snapshot.replay.policies.dynamo import Dynamo, DynamoLoadKnobs, DynamoThroughputKnobs
from dynamo_snapshot.replay.policies.dynamo_planner import forward_pass_metrics
from dynamo_snapshot.replay.policies.engine_facts import EngineFacts, Traffic
from dynamo_snapshot.replay.simulation.setting import Setting
from dynamo_snapshot.replay.simulation.timing import EngineTiming
from planner.observation import Observation

SETTING = Setting(engine=EngineTiming(kv_tokens=100_000))
FACTS = EngineFacts.of(SETTING, Traffic())


def load(**knobs: Any) -> Dynamo:
    return Dynamo(DynamoLoadKnobs(**knobs), FACTS, 1, 16, name="dynamo-load")


def engines(*kv_tokens: float) -> Observation:
    samples = (sample(str(number), decode_kv_tokens=tokens) for number, tokens in enumerate(kv_tokens))
    return Observation(len(kv_tokens), tuple(samples))


def test_by_default_one_replica_more_when_any_cache_is_over_full() -> None:
    policy = load()
    assert policy.decide(signals(0)) is None  # its first tick is an interval after the start
    assert policy.decide(signals(5, ready=2, observation=engines(10_000, 100_001))) == 3


def test_one_replica_less_when_all_are_under_sixty_percent_and_the_rest_can_take_it() -> None:
    policy = load()
    assert policy.decide(signals(5, ready=3, observation=engines(50_000, 59_000, 1_000))) == 2
    assert policy.decide(signals(10, ready=2, observation=engines(50_000, 59_000))) is None
    assert policy.decide(signals(15, ready=2, observation=engines(40_000, 49_000))) == 1


def test_queued_prompts_count_as_cache() -> None:
    queued = Observation(1, (sample("0", decode_kv_tokens=50_000.0, queued=30.0, queued_tokens=60_000.0),))
    assert load().decide(signals(5, observation=queued)) == 2


def test_nothing_more_while_a_replica_starts_and_nothing_at_all_while_one_drains() -> None:
    policy = load()
    assert policy.decide(signals(5, starting=1, target=2, observation=engines(200_000))) is None
    assert policy.decide(signals(10, draining=1, target=1, observation=engines(200_000))) is None
    assert policy.decide(signals(15, observation=engines(200_000))) == 2


def test_capacity_on_its_way_is_withdrawn_when_the_load_is_gone_for_an_interval() -> None:
    policy = load()
    assert policy.decide(signals(5, starting=2, target=3, observation=engines(0))) is None
    assert policy.decide(signals(10, starting=2, target=3, observation=engines(0))) == 1


def test_the_bounds_are_the_planners_budget() -> None:
    full = engines(*[200_000.0] * 16)
    assert load().decide(signals(5, ready=16, observation=full)) in (None, 16)


def test_decisions_are_those_of_dynamos_scaling_state() -> None:
    """The same metrics, given to the class below the pipeline, give the same size."""
    config = PlannerConfig(
        environment="virtual", namespace="test", backend="mocker", mode="agg", max_gpu_budget=16, min_endpoint=1
    )
    capabilities = EngineCapabilities(num_gpu=1, max_kv_tokens=100_000)
    state = PlannerScalingState(config, WorkerCapabilities(decode=capabilities))
    policy, dice, decided = load(), random.Random(7), set()
    for tick in range(1, 200):
        ready = dice.randint(1, 6)
        observation = engines(*(dice.choice([0.1, 0.5, 0.9, 1.1]) * 100_000 for _ in range(ready)))
        state.observe_worker_counts(WorkerCounts(ready_num_decode=ready, expected_num_decode=ready))
        metrics = {(one.worker_id, 0): forward_pass_metrics(one) for one in observation.samples}
        decision = state.advance_load(FpmObservations(decode=metrics))
        expected = None if decision is None or decision.num_decode == ready else decision.num_decode
        assert policy.decide(signals(5.0 * tick, ready=ready, observation=observation)) == expected
        decided.add(None if expected is None else expected - ready)
    assert decided == {None, -1, 1}


def test_with_an_objective_it_scales_when_every_engine_would_miss_it() -> None:
    policy = load(target="sla")
    slow = FACTS.pass_s(8192, 0)
    prompts = math.ceil(FACTS.ttft_s / slow) + 2

    def queues(*waiting: int) -> Observation:
        return Observation(
            len(waiting),
            tuple(
                sample(
                    str(number), running=1.0, pass_s=slow, prefill_tokens=8192.0,
                    queued=float(queue), queued_tokens=8192.0 * queue,
                )
                for number, queue in enumerate(waiting)
            ),
        )  # fmt: skip

    assert policy.decide(signals(5, ready=2, observation=queues(prompts, prompts))) == 3
    assert policy.decide(signals(10, ready=2, observation=queues(prompts, 0))) is None


def test_throughput_divides_the_predicted_rate_by_what_an_engine_can_do() -> None:
    policy = Dynamo(DynamoThroughputKnobs(predictor="constant"), FACTS, 1, 16, name="dynamo-throughput")
    decisions = []
    for tick in range(1, 37):
        decisions.append(
            policy.decide(
                signals(5.0 * tick, arrivals=500, input_tokens=500 * 2000, finished=500, output_tokens=500 * 20)
            )
        )
    assert decisions[:35] == [None] * 35
    assert decisions[35] is not None
    prefill_rate = 8192 / FACTS.pass_s(8192, 0) / 2000
    assert 100 / prefill_rate <= decisions[35] <= 2 * 100 / prefill_rate + 1
    assert decisions[35] <= 9  # 8 at most at a time


def test_an_idle_interval_lets_throughput_go_down() -> None:
    policy = Dynamo(DynamoThroughputKnobs(predictor="constant", interval_s=30), FACTS, 1, 16, name="dynamo-throughput")
    busy = {"arrivals": 150, "input_tokens": 300_000, "finished": 150, "output_tokens": 3000}
    ready, sizes = 4, []
    for tick in range(1, 25):
        ready = policy.decide(signals(5.0 * tick, ready=ready, **(busy if tick <= 12 else {}))) or ready
        sizes.append(ready)
    assert sizes[11] > 1
    assert sizes[-1] == 1


def test_without_dynamo_the_refusal_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "dynamo.planner.config.planner_config", None)
    with pytest.raises(SnapshotError) as refused:
        load()
    assert refused.value.reason is Reason.CONFIGURATION_INVALID
    assert "dynamo-snapshot[dynamo]" in refused.value.remedy


@pytest.mark.parametrize(
    ("knobs", "wrong"),
    [
        (DynamoLoadKnobs, {"target": "luck"}),
        (DynamoLoadKnobs, {"interval_s": 0}),
        (DynamoLoadKnobs, {"sensitivity": 101}),
        (DynamoLoadKnobs, {"up_kv": 10.0, "down_kv": 20.0}),
        (DynamoThroughputKnobs, {"interval_s": 7}),
        (DynamoThroughputKnobs, {"predictor": "luck"}),
    ],
)
def test_wrong_knobs_are_named(knobs: type, wrong: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=next(iter(wrong))):
        knobs(**wrong)
