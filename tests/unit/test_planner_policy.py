"""The load policy in virtual time: each rule, then Hypothesis against its promises."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from planner.load import LEFTOVER_AFTER_S
from planner.observation import EngineSample, Observation, PoolView
from planner.policy import Action, LoadPolicy, Memory, Proposal

POLICY = LoadPolicy(
    target_requests_per_replica=4, max_replicas=8, scale_down_after_s=20, cooldown_s=5, hysteresis=0.1, stale_after_s=5
)


class Driver:
    """Feeds a policy with ticks; sequence numbers move on by themselves, as with a live engine."""

    def __init__(self, policy: LoadPolicy = POLICY) -> None:
        self.policy = policy
        self.memory = Memory()
        self.now = 1000.0
        self.sequence = 0

    def tick(
        self,
        loads: Iterable[float | None],
        *,
        ready: int | None = None,
        pool: PoolView | None = None,
        step: float = 1.0,
        frozen: bool = False,
        workers: tuple[str, ...] = (),
    ) -> Proposal:
        """One observation: ``loads`` are running requests by worker, None is unreadable."""
        loads = tuple(loads)
        self.now += step
        if not frozen:
            self.sequence += 1
        names = workers or tuple(str(number) for number in range(len(loads)))
        samples = tuple(
            EngineSample(name, 0, self.sequence, load, 0.0) for name, load in zip(names, loads, strict=True)
        )
        observation = Observation(ready=len(loads) if ready is None else ready, samples=samples, pool=pool)
        proposal, self.memory = self.policy.decide(observation, self.memory, self.now)
        return proposal

    def until(self, seconds: float, loads: tuple[float | None, ...], ready: int | None = None) -> list[Proposal]:
        return [self.tick(loads, ready=ready) for _ in range(math.ceil(seconds))]


def test_counts_whose_sum_is_no_number_any_more_ask_for_the_most_and_break_nothing() -> None:
    driver = Driver()
    driver.tick([1])
    proposal = driver.tick([1.7e308, 1.7e308])
    assert (proposal.replicas, proposal.action) == (POLICY.max_replicas, Action.RAISE)


def leftover_driver(ready: int, seconds: int, last: float = 3.0) -> Proposal:
    """Two workers, then the second one's metrics stand still; the first is idle. Returns the last proposal."""
    driver = Driver()
    for _ in range(3):
        proposal = driver.tick([1, 20])
    assert proposal.replicas == 6
    for _ in range(seconds):
        driver.now += 1.0
        driver.sequence += 1
        samples = (EngineSample("0", 0, driver.sequence, 0.0, 0.0), EngineSample("1", 0, 3, last, 0.0))
        observation = Observation(ready=ready, samples=samples)
        proposal, driver.memory = driver.policy.decide(observation, driver.memory, driver.now)
    return proposal


@pytest.mark.parametrize("last", [20.0, math.nan])
def test_what_a_worker_that_is_gone_left_behind_does_not_hold_the_target_for_ever(last: float) -> None:
    """A message that arrives after its worker's removal stays in Dynamo's table."""
    early = leftover_driver(ready=1, seconds=int(LEFTOVER_AFTER_S) - 5, last=last)
    assert (early.replicas, early.load.complete) == (6, False)
    late = leftover_driver(ready=1, seconds=int(LEFTOVER_AFTER_S + POLICY.scale_down_after_s) + 10, last=last)
    assert (late.replicas, late.load.complete) == (1, True)


def test_a_ready_worker_whose_metrics_stand_still_holds_for_ever() -> None:
    proposal = leftover_driver(ready=2, seconds=300)
    assert (proposal.replicas, proposal.load.complete) == (6, False)


def test_a_change_is_followed_by_a_cool_down_before_the_target_falls() -> None:
    driver = Driver(replace(POLICY, scale_down_after_s=2, cooldown_s=10))
    driver.tick([1])
    assert driver.tick([20]).replicas == 5
    raised_at = driver.now
    while (proposal := driver.tick([1] * 5)).replicas == 5:
        assert driver.now - raised_at < 10, proposal.reason
    assert (driver.now - raised_at, proposal.replicas) == (10, 2)


def test_a_spike_raises_at_once_to_what_the_work_needs() -> None:
    driver = Driver()
    driver.tick([1])
    proposal = driver.tick([14])
    assert (proposal.action, proposal.replicas, proposal.floor) == (Action.RAISE, 4, 4)
    assert "raise 1 -> 4: 14 running + 0 queued on 1 of 1 ready workers, 4 a replica" in proposal.reason


def test_queued_requests_count_like_running_ones() -> None:
    sample = EngineSample("a", 0, 1, running=3, queued=6)
    proposal, _ = POLICY.decide(Observation(ready=1, samples=(sample,)), Memory(), 0.0)
    assert proposal.replicas == 3


def test_need_is_rounded_up_and_an_exact_multiple_is_not() -> None:
    assert Driver().tick([8]).replicas == 2
    assert Driver().tick([9]).replicas == 3
    tenth = replace(POLICY, target_requests_per_replica=0.1)
    assert Driver(replace(tenth, max_replicas=100)).tick([3]).replicas == 30


def test_spares_are_added_and_bounds_hold() -> None:
    assert Driver(replace(POLICY, spare_replicas=2)).tick([4]).replicas == 3
    assert Driver().tick([400]).replicas == POLICY.max_replicas
    assert Driver(replace(POLICY, min_replicas=3)).tick([0]).replicas == 3


def test_a_start_keeps_what_is_there_for_one_window() -> None:
    driver = Driver()
    first = driver.tick([0, 0, 0, 0, 0])
    assert (first.action, first.replicas) == (Action.START, 5)
    held = driver.until(19, (0,) * 5)
    assert {proposal.replicas for proposal in held} == {5}
    assert driver.tick((0,) * 5).replicas == 1


def test_a_start_keeps_what_the_fleet_was_told_before() -> None:
    first = Driver().tick([0, 0], pool=PoolView(target=4, achievable=4))
    assert first.replicas == 4


def test_a_start_without_a_count_has_no_opinion() -> None:
    driver = Driver()
    proposal, driver.memory = POLICY.decide(Observation(ready=None), Memory(), 0.0)
    assert (proposal.action, proposal.replicas, proposal.floor) == (Action.NOTHING, None, None)
    assert "number of ready workers unknown" in proposal.reason
    assert driver.tick([0, 0]).replicas == 2


def test_the_way_down_goes_to_the_most_that_was_needed_in_the_window() -> None:
    driver = Driver()
    driver.tick([16])
    driver.until(10, (0, 0, 0, 0))
    driver.tick([8, 0, 0, 0])  # 8 requests want 3 on the way down: 8 / (4 * 0.9)
    lowered = [proposal for proposal in driver.until(40, (0, 0, 0, 0)) if proposal.action is Action.LOWER]
    assert [proposal.replicas for proposal in lowered] == [3, 1]
    assert "lower 4 -> 3" in lowered[0].reason
    assert "at most 3 needed in the last 20 s" in lowered[0].reason


def test_the_cool_down_separates_two_steps_down() -> None:
    driver = Driver(replace(POLICY, scale_down_after_s=3, cooldown_s=7))
    driver.tick([16])
    driver.tick([0] * 4)
    times = []
    for load in [8] * 9 + [0] * 10:
        if driver.tick([load, 0, 0, 0]).action is Action.LOWER:
            times.append(driver.now)
    assert len(times) == 2
    assert times[1] - times[0] >= 7


def test_a_load_beside_a_boundary_does_not_flap() -> None:
    driver = Driver()
    driver.tick([8])
    targets = [driver.tick([load]).replicas for load in [8, 9, 8, 9, 7, 9] * 20]
    assert set(targets[1:]) == {3}


def test_missing_metrics_hold_and_start_the_window_anew() -> None:
    driver = Driver()
    driver.tick([12])
    driver.until(15, (0, 0, 0))
    held = driver.tick([0, 0], ready=3)
    assert held.replicas == 3
    assert "no metrics from 1 of 3 ready workers" in held.reason
    assert {proposal.replicas for proposal in driver.until(19, (0, 0, 0))} == {3}
    assert driver.tick([0, 0, 0]).replicas == 1


@pytest.mark.parametrize("bad", [None, math.nan, math.inf, -1.0])
def test_unreadable_metrics_hold(bad: float | None) -> None:
    driver = Driver()
    driver.tick([12])
    assert {proposal.replicas for proposal in driver.until(60, (0, 0, bad))} == {3}
    assert "metrics of worker 2 unreadable" in driver.tick([0, 0, bad]).reason


def test_metrics_that_stand_still_hold_but_do_not_count() -> None:
    driver = Driver()
    driver.tick([8])
    stale = [driver.tick([8], frozen=True) for _ in range(60)]
    assert {proposal.replicas for proposal in stale} == {2}
    assert "metrics of worker 0 unchanged for" in stale[-1].reason
    assert stale[-1].load.requests == 0


def test_what_is_known_may_raise_even_if_something_is_missing() -> None:
    driver = Driver()
    driver.tick([4, 0])
    assert driver.tick([13], ready=2).replicas == 4


def test_no_ready_worker_is_not_idle() -> None:
    driver = Driver()
    driver.tick([12])
    assert {proposal.replicas for proposal in driver.until(60, (), ready=0)} == {3}
    assert "no worker is ready, so no work can be seen" in driver.tick([]).reason


def test_a_long_gap_between_observations_holds() -> None:
    driver = Driver()
    driver.tick([12])
    assert driver.tick([0, 0, 0], step=3600).replicas == 3
    assert {proposal.replicas for proposal in driver.until(19, (0, 0, 0))} == {3}


def test_workers_that_do_not_serve_are_ignored() -> None:
    pool = PoolView(target=1, achievable=1, not_serving=frozenset({"gone"}))
    proposal = Driver().tick([2, 30], ready=1, workers=("alive", "gone"), pool=pool)
    assert (proposal.replicas, proposal.load.requests) == (1, 2)


def test_discovery_that_cannot_be_read_holds() -> None:
    driver = Driver()
    driver.tick([12])
    pool = PoolView(target=3, achievable=3, discovery_known=False)
    assert {driver.tick([0, 0, 0], pool=pool).replicas for _ in range(60)} == {3}


def test_what_the_fleet_cannot_reach_is_not_asked_for() -> None:
    driver = Driver()
    driver.tick([16])
    stuck = PoolView(target=4, achievable=2, unachievable_reason="node_at_capacity")
    proposal = driver.tick([8, 8], pool=stuck)
    assert (proposal.replicas, proposal.desired, proposal.floor) == (2, 4, 2)
    assert "asking for 2, the fleet cannot reach more (node_at_capacity)" in proposal.reason


def test_a_limit_is_remembered_after_the_fleet_has_been_told_less() -> None:
    driver = Driver(replace(POLICY, retry_unachievable_s=30))
    driver.tick([16])
    driver.tick([8, 8], pool=PoolView(target=4, achievable=2, unachievable_reason="node_at_capacity"))
    quiet = PoolView(target=2, achievable=2)
    asked = [driver.tick([8, 8], pool=quiet).replicas for _ in range(40)]
    assert asked[:29] == [2] * 29
    assert asked[30] == 4


def test_a_limit_never_takes_away_what_serves() -> None:
    driver = Driver()
    driver.tick([16])
    stuck = PoolView(target=4, achievable=1, unachievable_reason="disk_full")
    assert driver.tick([5, 5, 6], pool=stuck).replicas == 3


def test_a_limit_below_the_minimum_asks_for_the_minimum() -> None:
    stuck = PoolView(target=2, achievable=0, unachievable_reason="disk_full")
    assert Driver(replace(POLICY, min_replicas=2)).tick([], ready=0, pool=stuck).replicas == 2


def test_a_target_on_its_way_limits_nothing() -> None:
    driver = Driver()
    driver.tick([2], pool=PoolView(target=1, achievable=1))
    assert driver.tick([16], pool=PoolView(target=1, achievable=1)).replicas == 4


@pytest.mark.parametrize(
    ("knobs", "text"),
    [
        ({"target_requests_per_replica": 0}, "target_requests_per_replica must be a positive number"),
        ({"target_requests_per_replica": math.nan}, "target_requests_per_replica must be a positive number"),
        ({"min_replicas": 3, "max_replicas": 2}, "max_replicas must be at least 1 and at least min_replicas"),
        ({"hysteresis": 1.0}, "hysteresis must be from 0 to below 1"),
        ({"scale_down_after_s": 0}, "scale_down_after_s must be a positive number"),
    ],
)
def test_wrong_knobs_are_named(knobs: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        LoadPolicy(**knobs)


counts = st.floats(min_value=0, max_value=60).map(round).map(float)
anything = st.one_of(st.none(), st.just(math.nan), counts)


@st.composite
def ticks(draw: st.DrawFn, load: st.SearchStrategy[float | None]) -> list[tuple[tuple[float | None, ...], int, float]]:
    """Observations: loads by worker, ready workers, seconds since the one before."""
    result = []
    for _ in range(draw(st.integers(min_value=1, max_value=40))):
        loads = tuple(draw(st.lists(load, max_size=4)))
        result.append((loads, draw(st.integers(0, 5)), draw(st.sampled_from([0.1, 1.0, 4.0, 30.0]))))
    return result


@given(ticks(anything))
def test_proposals_keep_their_promises(observations: list[tuple[tuple[float | None, ...], int, float]]) -> None:
    driver = Driver()
    previous: int | None = None
    for loads, ready, step in observations:
        proposal = driver.tick(loads, ready=ready, step=step)
        assert proposal.reason
        assert proposal.replicas is not None
        assert proposal.floor is not None
        assert POLICY.min_replicas <= proposal.floor <= proposal.replicas <= POLICY.max_replicas
        if previous is not None:
            if not proposal.load.complete:
                assert proposal.replicas >= previous, "unknown lowered the target"
            assert (proposal.action is Action.LOWER) == (proposal.replicas < previous)
            assert (proposal.action is Action.RAISE) == (proposal.replicas > previous)
        # What is known to be there is always served by the target.
        needed = math.ceil(proposal.load.requests / POLICY.target_requests_per_replica - 1e-9)
        assert proposal.replicas >= min(needed, POLICY.max_replicas)
        previous = proposal.replicas


@given(ticks(anything))
def test_a_step_down_needs_a_window_without_a_higher_or_unknown_need(
    observations: list[tuple[tuple[float | None, ...], int, float]],
) -> None:
    driver = Driver()
    history: list[tuple[float, int, bool]] = []
    for loads, ready, step in observations:
        proposal = driver.tick(loads, ready=ready, step=step)
        needed = math.ceil(proposal.load.requests / POLICY.target_requests_per_replica - 1e-9)
        history.append((driver.now, needed, proposal.load.complete))
        if proposal.action is Action.LOWER:
            assert proposal.replicas is not None
            window = [entry for entry in history if entry[0] > driver.now - POLICY.scale_down_after_s]
            assert all(complete and need <= proposal.replicas for _, need, complete in window)


@given(ticks(anything))
def test_confirmed_idle_always_comes_back_to_the_minimum(
    observations: list[tuple[tuple[float | None, ...], int, float]],
) -> None:
    driver = Driver()
    for loads, ready, step in observations:
        driver.tick(loads, ready=ready, step=step)
    idle = driver.until(POLICY.scale_down_after_s + POLICY.cooldown_s + 2, (0.0, 0.0))
    assert idle[-1].replicas == POLICY.min_replicas


@given(st.integers(1, 30), st.lists(st.floats(-0.05, 0.05), min_size=30, max_size=90))
def test_noise_around_a_steady_load_changes_the_target_at_most_upwards(load: int, noise: list[float]) -> None:
    driver = Driver()
    driver.tick([float(load)])
    targets = [driver.tick([load * (1 + share)]).replicas or 0 for share in noise]
    assert targets == sorted(targets)
    assert targets[-1] - targets[0] <= 1
