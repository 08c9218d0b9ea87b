"""Ray Serve's policy: the arithmetic, the delays, and the metric's way to it."""

from __future__ import annotations

import pytest
from policy_signals import signals

from dynamo_snapshot.replay.policies.ray_serve import Delay, RayServe, RayServeKnobs, desired_replicas


@pytest.mark.parametrize(
    ("ongoing", "running", "knobs", "expected"),
    [
        (40, 10, {}, 20),  # twice the target of 2 a replica
        (10, 10, {}, 5),
        (41, 10, {}, 21),
        (40, 10, {"upscaling_factor": 0.5}, 15),
        (40, 10, {"upscaling_factor": 2.0}, 30),
        (10, 10, {"downscaling_factor": 0.5}, 8),
        (16, 10, {"downscaling_factor": 0.1}, 9),  # 9.8 would be 10 again: one less
        (0, 3, {}, 0),
    ],
)
def test_desired_is_the_ongoing_requests_by_the_target_and_the_factor(
    ongoing: float, running: int, knobs: dict[str, float], expected: int
) -> None:
    assert desired_replicas(ongoing, running, RayServeKnobs(**knobs)) == expected


def test_a_direction_must_last_longer_than_its_delay() -> None:
    delay = Delay(30, 600)
    assert delay.step(0, 1, 4) == 1
    assert delay.step(29.9, 1, 4) == 1
    assert delay.step(30, 1, 6) == 6  # what is desired then, not at first
    assert delay.step(31, 6, 2) == 6
    assert delay.step(630, 6, 2) == 6
    assert delay.step(631, 6, 2) == 2


def test_the_wait_begins_anew_when_the_direction_is_gone_for_a_moment() -> None:
    delay = Delay(30, 600)
    delay.step(0, 1, 4)
    delay.step(20, 1, 1)
    assert delay.step(40, 1, 4) == 1
    assert delay.step(70, 1, 4) == 4


def test_no_delay_acts_in_the_first_loop() -> None:
    assert Delay(0, 0).step(0, 1, 4) == 4


def test_the_last_replica_stays() -> None:
    assert Delay(0, 0).step(0, 3, 0) == 1


def test_the_metric_comes_every_ten_seconds_as_the_mean_of_thirty() -> None:
    policy = RayServe(RayServeKnobs(upscale_delay_s=0, downscale_delay_s=0), 1, 16)
    sizes = {}
    for second in range(41):
        sizes[second] = policy.decide(signals(float(second), in_flight=12 if second > 20 else 0))
    assert sizes[9] is None  # nothing was pushed yet
    assert sizes[20] == 1
    assert sizes[29] == 1  # pushed at 30 only
    assert sizes[30] == 2  # 10 s of 12 in 30 s: 4 ongoing, 2 a replica
    assert sizes[40] == 4


def test_defaults_wait_half_a_minute_before_more_and_ten_before_less() -> None:
    policy = RayServe(RayServeKnobs(), 1, 16)
    size, changes = 1, []
    for second in range(1200):
        wanted = policy.decide(signals(float(second), ready=size, in_flight=20 if second < 300 else 0))
        if wanted not in (None, size):
            changes.append((second, size, wanted))
            size = wanted or size
    first_up, last_up, down = changes[0], changes[-2], changes[-1]
    assert first_up == (40, 1, 10)
    assert last_up == first_up
    assert down[1:] == (10, 1)
    assert 900 <= down[0] <= 950


@pytest.mark.parametrize(
    "wrong",
    [
        {"target_ongoing_requests": 0.0},
        {"upscale_delay_s": -1.0},
        {"look_back_period_s": 0.0},
        {"downscaling_factor": float("inf")},
    ],
)
def test_wrong_knobs_are_named(wrong: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=next(iter(wrong))):
        RayServeKnobs(**wrong)
