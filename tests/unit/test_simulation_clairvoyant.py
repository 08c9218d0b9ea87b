"""The ceiling: its plan against every possible one, and that nothing simple beats it."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dynamo_snapshot.replay.policies import clairvoyant
from dynamo_snapshot.replay.policies.clairvoyant import Clairvoyant, ClairvoyantKnobs, Foresight, Planned
from dynamo_snapshot.replay.policies.clairvoyant_plan import SLOT_S, Work, cheapest, work
from dynamo_snapshot.replay.simulation.outcome import Outcome
from dynamo_snapshot.replay.simulation.run import simulate
from dynamo_snapshot.replay.simulation.setting import Setting
from dynamo_snapshot.replay.simulation.startup import startup_model
from dynamo_snapshot.replay.simulation.timing import EngineTiming
from dynamo_snapshot.replay.trace import TraceRequest, bundled_trace

SETTING = Setting(engine=EngineTiming(speed=0.3), max_replicas=12)
TINY = Setting(max_replicas=3)


def cost_of(sizes: tuple[int, ...], load: Work, start_s: float, stop_s: float, miss_cost_s: float) -> float:
    """What the plan's model says of one sequence of sizes."""
    cost, queued = 0.0, 0.0
    for size, seconds, slack, square in zip(sizes, load.seconds[0], load.slack, load.squares, strict=True):
        cost += size * SLOT_S
        delay = max(0.0, queued + (seconds - size * SLOT_S) / 2) / size
        blur = np.sqrt(0.15**2 + 0.3 * square / size)
        cost += sum(miss_cost_s / (1 + np.exp((one - delay) / blur)) for one in slack)
        queued = max(0.0, queued + seconds - size * SLOT_S)
    for before, after in itertools.pairwise(sizes):
        cost += start_s * max(0, after - before) + stop_s * max(0, before - after)
    return float(cost)


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.integers(0, 8), min_size=5, max_size=5),
    st.sampled_from([0.5, 2.0, 5.0]),
    st.sampled_from([0.25, 1.0]),
    st.sampled_from([0.3, 3.0, 30.0]),
)
def test_the_plan_is_the_cheapest_of_all(
    quarters: list[int], start_s: float, stop_s: float, miss_cost_s: float
) -> None:
    seconds = np.array(quarters) * 0.25
    load = Work(seconds[None], tuple(np.full(min(count, 1), 0.6) for count in quarters), seconds**2)
    plan = tuple(cheapest(load, TINY, start_s, stop_s, miss_cost_s)[0])
    costs = [cost_of(sizes, load, start_s, stop_s, miss_cost_s) for sizes in itertools.product((1, 2, 3), repeat=5)]
    assert cost_of(plan, load, start_s, stop_s, miss_cost_s) == pytest.approx(min(costs))


def test_work_grows_with_prompts_slowness_and_margin() -> None:
    requests = [TraceRequest(0.2, 1000, 10), TraceRequest(1.7, 4000, 10)]
    load = work(requests, SETTING, (1.0, 1.5))
    assert [slot > 0 for slot in load.seconds[0]] == [True, False, False, True]
    assert load.seconds[0, 3] > 3 * load.seconds[0, 0]
    assert load.seconds[1] == pytest.approx(load.seconds[0] * 1.5)
    slower = Setting(engine=EngineTiming(speed=0.15))
    assert work(requests, slower, (1.0,)).seconds[0] == pytest.approx(load.seconds[0] * 2)
    assert work(requests, slower, (1.0,)).slack[3] < load.slack[3]


def test_plans_for_several_margins_are_those_of_each_alone() -> None:
    margins = (0.8, 1.1, 1.6)
    together = cheapest(work(bundled_trace(), SETTING, margins), SETTING, 2.0, 1.0, 10.0)
    alone = [cheapest(work(bundled_trace(), SETTING, (margin,)), SETTING, 2.0, 1.0, 10.0)[0] for margin in margins]
    assert together == alone
    assert sum(together[0]) < sum(together[-1])


def ran(policy: Clairvoyant | Planned, startup: str) -> Outcome:
    return simulate(bundled_trace(), policy, SETTING, startup_model(startup), duration_s=285.0)


def cost(outcome: Outcome, miss_cost_s: float) -> float:
    return outcome.gpu_hours * 3600 + miss_cost_s * (1 - outcome.ttft_attainment) * outcome.requests


@pytest.mark.parametrize("startup", ["restore-2s", "cold-45s"])
def test_no_constant_size_is_cheaper(startup: str) -> None:
    ceiling = cost(ran(Clairvoyant(), startup), 30.0)
    assert all(cost(ran(Planned((size,)), startup), 30.0) >= ceiling for size in range(1, 13))


def test_the_knob_buys_attainment() -> None:
    outcomes = [ran(Clairvoyant(ClairvoyantKnobs(miss_cost_s)), "restore-2s") for miss_cost_s in (0.3, 3.0, 100.0)]
    attainments = [outcome.ttft_attainment for outcome in outcomes]
    hours = [outcome.gpu_hours for outcome in outcomes]
    assert attainments == sorted(attainments)
    assert hours == sorted(hours)
    assert attainments[0] < attainments[-1]
    assert attainments[-1] > 0.99


def test_slower_starts_cost_more() -> None:
    costs = [cost(ran(Clairvoyant(), startup), 30.0) for startup in ("restore-2s", "restore-8s", "cold-45s")]
    assert costs == sorted(costs)


def test_a_knob_that_is_no_cost_is_refused() -> None:
    with pytest.raises(ValueError, match="miss_cost_s must be a positive number"):
        ClairvoyantKnobs(0.0)


def test_what_is_foreseen_once_serves_every_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another seed, and another cost with the same plans to try: only what is new is simulated."""
    trials: list[tuple[int, ...]] = []

    def counted(requests: Any, policy: Planned, *arguments: Any, **named: Any) -> Outcome:
        trials.append(policy.sizes)
        return simulate(requests, policy, *arguments, **named)

    monkeypatch.setattr(clairvoyant, "simulate", counted)
    foresight, fast = Foresight(bundled_trace()[:200], SETTING), startup_model("restore-2s")
    first = foresight.plan(fast, 30.0)
    tried = len(trials)
    assert tried > len({len(sizes) for sizes in trials})
    assert foresight.plan(fast, 30.0) is first
    assert len(trials) == tried
    foresight.plan(startup_model("cold-45s"), 30.0)
    assert len([sizes for sizes in trials if len(sizes) == 1]) == len({sizes for sizes in trials if len(sizes) == 1})
