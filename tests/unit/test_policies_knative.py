"""Knative's autoscaler: the cases that its own documentation and tests describe, then windows of the metric."""

from __future__ import annotations

import pytest
from policy_signals import signals

from dynamo_snapshot.replay.policies.knative import KnativeKpa, KpaKnobs, KpaScaler

STABLE_S = 60.0


def scaler(target: float = 10, ready: int = 1, **changes: float) -> KpaScaler:
    """With the limits of Knative's tests: a target value of its own, rates of 10, panic at twice the capacity."""
    rates = {"max_scale_up_rate": 10.0, "max_scale_down_rate": 10.0, "utilization": 1.0}
    return KpaScaler(KpaKnobs(target=target, **{**rates, **changes}), ready, 0.0)


def test_the_stable_mean_divided_by_the_target_is_the_size() -> None:
    kpa = scaler()
    assert kpa.scale(1, 50, 10, 0) == 5
    assert kpa.scale(1, 100, 10, 2) == 10
    assert not kpa.panicking


@pytest.mark.parametrize(
    ("ready", "stable", "panic", "expected"),
    [(8, 100, 100, 10), (8, 50, 50, 5), (5, 50, 50, 5), (1, 0, 0, 0), (1, 50, 100, 10)],
)
def test_steady_cases(ready: int, stable: float, panic: float, expected: int) -> None:
    assert scaler().scale(ready, stable, panic, 0) == expected


def test_the_target_is_the_concurrency_times_the_utilization() -> None:
    assert KpaScaler(KpaKnobs(), 1, 0).scale(1, 141, 0, 0) == 3  # 100 requests at 70 %


def test_panic_begins_at_twice_the_capacity_and_ends_a_stable_window_after_it_was_last_over() -> None:
    kpa = scaler(target=1)
    assert kpa.scale(10, 11, 25, 0) == 25
    assert kpa.scale(40, 30, 41, STABLE_S / 2) == 41
    assert kpa.panicking
    assert kpa.scale(55, 50, 56, STABLE_S + 2) == 50
    assert not kpa.panicking


def test_panic_goes_on_for_as_long_as_the_surge() -> None:
    kpa = scaler(target=1)
    assert kpa.scale(10, 11, 25, 0) == 25
    assert kpa.scale(40, 30, 80, STABLE_S / 2) == 80
    assert kpa.scale(80, 80, 80, STABLE_S + 2) == 80
    assert kpa.panicking
    kpa.scale(80, 80, 80, 1.5 * STABLE_S + 2)
    assert not kpa.panicking


def test_in_panic_the_size_never_goes_down() -> None:
    kpa = scaler()
    assert kpa.scale(1, 100, 100, 0) == 10
    assert kpa.scale(10, 100, 1000, 0) == 100
    assert kpa.scale(10, 1, 1, 30) == 100
    assert kpa.scale(10, 1, 1, 61) == 1


def test_in_panic_the_larger_of_both_sizes_counts() -> None:
    kpa = scaler(target=1, ready=5)
    assert kpa.scale(5, 50, 30, 0) == 50
    assert scaler(target=1, ready=5).scale(5, 20, 30, 0) == 30


def test_rates_limit_the_way_up_and_down() -> None:
    up = scaler()
    assert up.scale(1, 1000, 1001, 0) == 10
    assert up.scale(10, 1000, 1001, 0) == 100
    down = scaler()
    assert down.scale(100, 1, 1, 0) == 10
    assert down.scale(10, 1, 1, 0) == 1


def test_small_rates_still_allow_one_replica() -> None:
    assert scaler(target=1, max_scale_up_rate=1.1).scale(2, 3, 3.1, 0) == 3
    assert scaler(max_scale_down_rate=1.1).scale(100, 1, 1, 0) == 90


def test_without_a_ready_replica_the_rate_counts_from_one() -> None:
    assert scaler().scale(0, 1000, 888, 0) == 10


def test_a_restart_with_several_replicas_begins_in_panic_at_that_size() -> None:
    kpa = scaler(ready=7)
    assert kpa.scale(7, 1, 1, 2) == 7
    assert kpa.scale(7, 1, 1, STABLE_S + 2) == 1


def test_the_scale_down_delay_keeps_the_highest_size_of_its_time() -> None:
    kpa = scaler(panic_threshold=10, scale_down_delay_s=300)
    assert kpa.scale(1, 40, 40, 540) == 4
    assert kpa.scale(4, 30, 30, 600) == 4
    assert kpa.scale(4, 0, 0, 660) == 4
    assert kpa.scale(4, 0, 0, 840) == 3
    assert kpa.scale(3, 0, 0, 900) == 0


def test_the_windows_are_means_over_time_of_the_requests_in_flight() -> None:
    policy = KnativeKpa(KpaKnobs(target=10, utilization=1))
    assert policy.decide(signals(0, in_flight=99)) is None
    for tick in range(1, 30):
        assert policy.decide(signals(2.0 * tick, in_flight=10)) == 1
    # Panic mean (10 + 10 + 40) / 3 = 20 is twice the capacity of one replica; the stable one is 11.
    assert policy.decide(signals(60, in_flight=40)) == 2


def test_a_history_shorter_than_the_window_is_averaged_over_what_there_is() -> None:
    policy = KnativeKpa(KpaKnobs(target=10, utilization=1))
    policy.decide(signals(0))
    assert policy.decide(signals(2, in_flight=80)) == 8


def test_a_burst_ends_and_the_size_halves_every_tick_after_panic() -> None:
    policy = KnativeKpa(KpaKnobs(target=10, utilization=1))
    policy.decide(signals(0))
    sizes, size = [], 1
    for tick in range(1, 80):
        size = max(1, policy.decide(signals(2.0 * tick, ready=size, in_flight=160 if tick <= 3 else 0)) or 0)
        sizes.append(size)
    assert sizes[:31] == [16] * 31  # panic held at second 2 for the last time, so it is over after 62
    assert sizes[31:36] == [8, 4, 2, 1, 1]


@pytest.mark.parametrize(
    "knobs",
    [
        {"target": 0.001},
        {"utilization": 0.0},
        {"stable_window_s": 5.0},
        {"panic_window_s": 61.0},
        {"panic_threshold": 1.0},
        {"max_scale_down_rate": 1.0},
        {"max_scale_up_rate": float("nan")},
        {"scale_down_delay_s": -1.0},
    ],
)
def test_wrong_knobs_are_named(knobs: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=next(iter(knobs)).split("_s")[0]):
        KpaKnobs(**knobs)
