"""The Kubernetes autoscaler: the documented examples, then both policies and KEDA on top of it."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from policy_signals import signals

from dynamo_snapshot.replay.policies.hpa import Hpa, HpaGpu, HpaGpuKnobs, HpaKnobs
from dynamo_snapshot.replay.policies.hpa_rules import Behavior, Rate, Stabilizer, Unit, average_value, pods_metric
from dynamo_snapshot.replay.policies.keda import Keda, KedaKnobs


@pytest.mark.parametrize(
    ("replicas", "total", "target", "expected"),
    [
        (2, 2 * 200, 100, 4),  # twice the desired value doubles
        (2, 2 * 50, 100, 1),  # half of it halves
        (10, 10 * 109, 100, 10),  # within the tolerance
        (10, 10 * 91, 100, 10),
        (10, 10 * 111, 100, 12),
        (10, 10 * 89, 100, 9),
        (3, 20_000 + 10_000 + 30_000, 15_000, 4),
        (5, 5 * 12_000, 20_000, 3),
        (3, 0, 100, 0),
    ],
)
def test_the_ratio_of_the_metric_to_its_target_scales_the_pods(
    replicas: int, total: float, target: float, expected: int
) -> None:
    assert pods_metric(replicas, total, replicas, target) == expected


def test_pods_without_a_metric_dampen_both_directions() -> None:
    # Up: as if they had none of it. 300 % on one of two becomes 150 % on two.
    assert pods_metric(2, 3000, 1, 1000, silent=1) == 3
    # Down: as if they were at the target. 20 % on two of four becomes 60 % on four.
    assert pods_metric(4, 400, 2, 1000, silent=2) == 3


def test_nothing_changes_where_pods_without_a_metric_reverse_the_direction() -> None:
    assert pods_metric(2, 1900, 1, 1000, silent=1) == 2  # 190 % becomes 95 %
    assert pods_metric(2, 600, 1, 1000, silent=1) == 2  # 60 % becomes 80 %, rounded up to two again


def test_pods_that_do_not_run_yet_count_only_on_the_way_up() -> None:
    assert pods_metric(4, 8000, 2, 1000, unready=2) == 8
    assert pods_metric(4, 3000, 2, 1000, unready=2) == 4
    assert pods_metric(4, 1000, 2, 1000, unready=2) == 1


def test_without_any_metric_nothing_changes() -> None:
    assert pods_metric(3, 0, 0, 100, silent=3) == 3


def test_an_average_value_divides_an_external_metric_among_the_pods() -> None:
    assert average_value(1, 20, 5) == 4
    assert average_value(4, 21, 5) == 4  # within the tolerance
    assert average_value(4, 23, 5) == 5
    assert average_value(4, 0, 5) == 0


def test_the_highest_desired_size_of_five_minutes_counts_on_the_way_down() -> None:
    stabilizer = Stabilizer(Behavior(), 1, 100)
    assert stabilizer.step(0, 4, 8) == 8
    assert stabilizer.step(15, 8, 2) == 8
    assert stabilizer.step(30, 8, 5) == 8
    assert stabilizer.step(299, 8, 2) == 8
    assert stabilizer.step(300, 8, 2) == 5
    assert stabilizer.step(330, 5, 2) == 2


def test_the_size_that_was_found_counts_as_the_first_recommendation() -> None:
    stabilizer = Stabilizer(Behavior(), 1, 100)
    assert stabilizer.step(0, 6, 1) == 6
    assert stabilizer.step(300, 6, 1) == 1


def test_the_lowest_desired_size_of_the_window_counts_on_the_way_up() -> None:
    stabilizer = Stabilizer(Behavior(up_stabilization_s=60), 1, 100)
    sizes = [stabilizer.step(now, 2, 6) for now in (0, 15, 30, 45, 60)]
    assert sizes == [2, 2, 2, 2, 6]


def test_up_by_four_pods_or_double_in_fifteen_seconds() -> None:
    stabilizer = Stabilizer(Behavior(), 1, 100)
    sizes = [1]
    for sync in range(5):
        sizes.append(stabilizer.step(15.0 * sync, sizes[-1], 100))
    assert sizes == [1, 5, 10, 20, 40, 80]


def test_additions_within_the_period_count_against_the_rate() -> None:
    stabilizer = Stabilizer(Behavior(up=(Rate(Unit.PODS, 4, 60),)), 1, 100)
    assert stabilizer.step(0, 2, 5) == 5
    assert stabilizer.step(15, 5, 20) == 6
    assert stabilizer.step(30, 6, 20) == 6
    assert stabilizer.step(60, 6, 20) == 9


def test_the_documented_way_down_by_ten_percent_or_four_pods_a_minute() -> None:
    rates = (Rate(Unit.PODS, 4, 60), Rate(Unit.PERCENT, 10, 60))
    stabilizer = Stabilizer(Behavior(down=rates, down_stabilization_s=0), 1, 100)
    sizes = [80]
    while sizes[-1] > 10:
        sizes.append(stabilizer.step(60.0 * len(sizes), sizes[-1], 10))
    assert sizes[:4] == [80, 72, 64, 57]
    assert sizes[sizes.index(36) :] == [36, 32, 28, 24, 20, 16, 12, 10]


@given(
    desired=st.lists(st.integers(0, 40), min_size=1, max_size=60),
    behavior=st.builds(
        Behavior,
        up_stabilization_s=st.sampled_from([0.0, 30.0]),
        down_stabilization_s=st.sampled_from([0.0, 60.0, 300.0]),
    ),
)
def test_sizes_stay_within_bounds_and_rates(desired: list[int], behavior: Behavior) -> None:
    stabilizer, size = Stabilizer(behavior, 2, 16), 2
    for sync, wanted in enumerate(desired):
        new = stabilizer.step(15.0 * sync, size, wanted)
        assert 2 <= new <= 16
        assert new <= max(2 * size, size + 4)
        assert new <= size or wanted > size
        assert new >= size or wanted < size
        size = new


def test_requests_in_flight_are_shared_among_the_ready_and_the_starting_replicas() -> None:
    policy = Hpa(HpaKnobs(target=5), 1, 16)
    assert policy.decide(signals(0, ready=2, in_flight=20)) == 4
    # Two are on their way: 20 requests are still 4 replicas.
    assert policy.decide(signals(15, ready=2, starting=2, in_flight=20)) == 4
    # Less load while they start: as silent pods they hold the size.
    assert policy.decide(signals(315, ready=2, starting=2, in_flight=6)) == 4


def test_gpu_utilization_is_averaged_with_the_idle_gpus_of_starting_replicas() -> None:
    policy = HpaGpu(HpaGpuKnobs(target=0.5), 1, 16)
    assert policy.decide(signals(0, ready=2, busy=1.0)) == 4
    assert policy.decide(signals(15, ready=2, starting=2, busy=1.0)) == 4
    assert policy.decide(signals(30, ready=4, busy=0.52)) == 4


def test_keda_scales_on_the_queue_with_the_autoscalers_arithmetic() -> None:
    policy = Keda(KedaKnobs(target=5), 1, 16)
    assert policy.decide(signals(0, ready=1, waiting=20)) == 4
    assert policy.decide(signals(15, ready=1, starting=3, waiting=19)) == 4
    assert policy.decide(signals(30, ready=4, waiting=0)) == 4
    assert policy.decide(signals(330, ready=4, waiting=0)) == 1


def test_keda_asks_anew_unless_it_caches() -> None:
    fresh, cached = (Keda(KedaKnobs(use_cached_metrics=cache), 1, 16) for cache in (False, True))
    for policy in (fresh, cached):
        policy.decide(signals(0, waiting=0))
    assert fresh.decide(signals(15, waiting=20)) == 4
    assert cached.decide(signals(15, waiting=20)) == 1
    assert cached.decide(signals(30, waiting=20)) == 4


def test_keda_on_requests_in_flight() -> None:
    assert Keda(KedaKnobs(metric="in_flight"), 1, 16).decide(signals(0, waiting=0, in_flight=15)) == 3


@pytest.mark.parametrize(
    ("knobs", "wrong"),
    [
        (HpaKnobs, {"target": 0.0}),
        (HpaKnobs, {"tolerance": 1.0}),
        (HpaKnobs, {"down_stabilization_s": 3601.0}),
        (HpaKnobs, {"up_period_s": 0.0}),
        (HpaGpuKnobs, {"target": 1.5}),
        (KedaKnobs, {"metric": "luck"}),
        (KedaKnobs, {"polling_interval_s": 0.0}),
    ],
)
def test_wrong_knobs_are_named(knobs: type, wrong: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=next(iter(wrong))):
        knobs(**wrong)
