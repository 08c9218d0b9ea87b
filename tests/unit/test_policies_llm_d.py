"""llm-d's saturation rules: the documented thresholds, then the minute and the autoscaler around them."""

from __future__ import annotations

import pytest
from policy_signals import sample, signals

from dynamo_snapshot.replay.policies.llm_d import LlmD, LlmDKnobs, Usage, saturation_target
from planner.observation import Observation


@pytest.mark.parametrize(
    ("replicas", "starting", "expected"),
    [
        ([Usage(0.5, 0)], 0, 1),  # enough left, and the last one stays
        ([Usage(0.75, 0), Usage(0.70, 0)], 0, 3),  # 0.075 left of the cache
        ([Usage(0.1, 3), Usage(0.1, 2)], 0, 3),  # 2.5 left of the queue
        ([Usage(0.9, 0), Usage(0.1, 0)], 0, 2),  # the saturated one counts for nothing; one is free
        ([Usage(0.9, 0), Usage(0.2, 6)], 0, 3),  # none is free
        ([Usage(0.7, 0), Usage(0.7, 0), Usage(0.4, 0)], 0, 3),  # two would be at 0.9
        ([Usage(0.2, 0), Usage(0.2, 0), Usage(0.2, 0)], 0, 2),
        ([Usage(0.2, 1), Usage(0.2, 1)], 0, 1),  # 2 queued on one leave 3
        ([Usage(0.2, 1.1), Usage(0.2, 1)], 0, 2),
        ([Usage(0.9, 9)], 1, 2),  # capacity is on its way
    ],
)
def test_targets(replicas: list[Usage], starting: int, expected: int) -> None:
    assert saturation_target(replicas, starting, LlmDKnobs()) == expected


def observed(*queues: float) -> Observation:
    return Observation(len(queues), tuple(sample(str(number), queued=queue) for number, queue in enumerate(queues)))


def test_it_decides_every_minute_on_the_peaks_of_the_last() -> None:
    policy = LlmD(LlmDKnobs(up_stabilization_s=0), 1000, 1, 16)
    assert policy.decide(signals(0, observation=observed(0))) == 1
    assert policy.decide(signals(15, observation=observed(9))) == 1
    assert policy.decide(signals(30, observation=observed(0))) == 1
    assert policy.decide(signals(60, observation=observed(0))) == 2  # the peak was 9


def test_the_autoscaler_behind_it_waits_four_minutes_each_way() -> None:
    policy = LlmD(LlmDKnobs(), 1000, 1, 16)
    sizes = [policy.decide(signals(15.0 * tick, observation=observed(9))) for tick in range(18)]
    assert sizes.index(2) == 16  # the size that was found, 1, counts for 240 s


def test_the_cache_is_measured_by_the_contexts_of_running_requests() -> None:
    policy = LlmD(LlmDKnobs(up_stabilization_s=0), 1000, 1, 16)
    full = Observation(1, (sample("0", decode_kv_tokens=700.0, prefill_kv_tokens=50.0),))
    assert policy.decide(signals(0, observation=full)) == 2


def test_wrong_knobs_are_named() -> None:
    with pytest.raises(ValueError, match="kv_spare"):
        LlmDKnobs(kv_spare=0.9)
    with pytest.raises(ValueError, match="queue_spare"):
        LlmDKnobs(queue_threshold=2)
