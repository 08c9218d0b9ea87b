"""Waiting at a replica that happens to be busy: the queues' laws, and what is learnt of single prompts for them."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from planner.history import History
from planner.observation import EngineSample
from planner.sizes import ENOUGH, Sizes, learn
from planner.waiting import Busy, Prompt, Prompts, Slotted, Waiting

OBJECTIVE_S = 1.5


def dealt_out(sizes: list[Prompt], rate: float, replicas: int, requests: int = 60_000) -> float:
    """The share that is late at one of several replicas that get requests in turn, by simulation."""
    dice = random.Random(1)
    drawn = dice.choices([one.prefill_s for one in sizes], [one.share for one in sizes], k=requests)
    waited_s = late = 0.0
    for prefill_s in drawn:
        late += prefill_s <= OBJECTIVE_S < waited_s + prefill_s
        waited_s = max(0.0, waited_s + prefill_s - dice.gammavariate(replicas, 1 / rate))
    return late / requests


@pytest.mark.parametrize("replicas", [2, 4, 8])
@pytest.mark.parametrize("busy", [0.3, 0.6, 0.8])
@pytest.mark.parametrize(
    "sizes",
    [
        [Prompt(0.2, 0.6), Prompt(0.5, 0.4)],
        [Prompt(0.1, 0.6), Prompt(0.5, 0.3), Prompt(1.3, 0.1)],
        [Prompt(0.2, 0.7), Prompt(1.0, 0.25), Prompt(3.0, 0.05)],
    ],
    ids=["alike", "unequal", "some too long"],
)
def test_late_requests_are_about_as_many_as_a_simulation_has(sizes: list[Prompt], busy: float, replicas: int) -> None:
    prompts = Prompts(tuple(sizes), OBJECTIVE_S)
    simulated = dealt_out(sizes, busy * replicas / prompts.mean_s, replicas)
    assert prompts.late(busy, replicas) == pytest.approx(simulated, rel=0.5, abs=0.012)


sizes_ = st.lists(st.tuples(st.floats(0.01, 4), st.floats(0.01, 1)), min_size=1, max_size=6)


@given(sizes_, st.floats(0.01, 12), st.floats(1, 20), st.floats(0, 3))
def test_more_replicas_are_never_worse(
    sizes: list[tuple[float, float]], work: float, bursts: float, behind_s: float
) -> None:
    total = sum(share for _, share in sizes)
    prompts = Prompts(tuple(Prompt(size, share / total) for size, share in sizes), OBJECTIVE_S, bursts)
    shares = [prompts.late(work / replicas, replicas, behind_s) for replicas in range(1, 17)]
    assert all(0 <= share <= 1 for share in shares)
    assert all(later <= earlier + 1e-6 for earlier, later in pairwise(shares))


def test_what_waits_anyway_and_what_is_too_long() -> None:
    prompts = Prompts((Prompt(0.5, 0.5), Prompt(2.0, 0.5)), OBJECTIVE_S)
    assert prompts.late(0.0, 4) == 0, "that a long prompt is late is no matter of size"
    assert prompts.late(0.0, 4, behind_s=0.9) == 0
    assert prompts.late(0.0, 4, behind_s=1.1) == 0.5
    assert Prompts((), OBJECTIVE_S).late(0.9, 1) == 0


def test_simultaneous_requests_wait_more() -> None:
    sizes = (Prompt(0.4, 1.0),)
    assert Prompts(sizes, OBJECTIVE_S, bursts=8).late(0.5, 4) > 3 * Prompts(sizes, OBJECTIVE_S).late(0.5, 4)


@given(st.floats(0, 2), st.floats(0.05, 2), st.floats(1, 256), st.floats(0, 0.5), st.floats(0, 1))
def test_late_requests_grow_with_utilization_and_fall_with_slots(
    busy: float, request_s: float, slots: float, more: float, behind_s: float
) -> None:
    share = Slotted(slots, request_s, 1.0).late(busy, 1)
    assert 0 <= share <= 1
    assert share <= Slotted(slots, request_s, 1.0).late(busy + more, 1) + 1e-12
    assert share <= Slotted(slots, request_s, 1.0).late(busy, 1, behind_s) + 1e-12
    assert Slotted(slots + 1, request_s, 1.0).late(busy, 1) <= share + 1e-12


def test_the_worse_of_what_binds_counts() -> None:
    prefill = Busy(Prompts((Prompt(0.3, 1.0),), OBJECTIVE_S), 5.0, 1.2)
    slots = Busy(Slotted(8.0, 0.3, 1.0), 5.0, 1.6)
    both = Waiting((prefill, slots))
    for replicas in range(1, 6):
        assert both.misses(replicas) == max(Waiting((prefill,)).misses(replicas), Waiting((slots,)).misses(replicas))
    assert Waiting().misses(3) == 0


Seen = tuple[EngineSample, EngineSample, float]


def told(queued: float, tokens: float) -> Seen:
    """An engine without a queue that has one now."""
    idle = EngineSample("1", 0, 1, 1.0, 0.0, pass_s=0.02, prefill_tokens=0.0, queued_tokens=0.0)
    return idle, EngineSample("1", 0, 9, 1.0, queued, pass_s=0.02, prefill_tokens=0.0, queued_tokens=tokens), 0.0


def learnt(steps: list[Seen]) -> Sizes:
    known = Sizes(chunk=8192.0)
    for step in steps:
        known = learn(known, [step], 1000.0, 0.02, 1e-4, 0.5, 1.0)
    return known


def test_sizes_of_prompts_are_learnt_from_those_that_are_seen_alone() -> None:
    dice = random.Random(1)
    steps = []
    for _ in range(4000):
        tokens = dice.choice([500.0, 4000.0])
        # The longer its pass, the more likely a tick falls into it.
        if dice.random() < 0.02 + 1e-4 * (1000 + tokens):
            steps.append(told(1, tokens))
    few, many = learnt(steps).shares(1000.0)
    assert (few[0], many[0]) == pytest.approx((500, 4000))
    assert few[1] == pytest.approx(0.5, abs=0.08)


def test_sizes_are_supposed_until_some_were_seen() -> None:
    seen = [told(1, 700.0)] * (int(ENOUGH) + 1)
    supposed = learnt(seen[2:]).shares(1000.0)
    assert sum(size * share for size, share in supposed) == pytest.approx(1000)
    assert sum(share for _, share in supposed) == pytest.approx(1)
    assert learnt([*seen, told(3, 9000.0)]).shares(1000.0) == [(pytest.approx(700), pytest.approx(1))]


def test_bursts_are_told_from_requests_that_come_independently() -> None:
    dice = random.Random(1)
    independent, together = History(), History()
    for second in range(300):
        came = sum(dice.random() < 0.02 for _ in range(200))
        independent = independent.add(1.0, came * 1000.0, came)
        at_once = 12.0 if second % 3 == 0 else 0.0
        together = together.add(1.0, at_once * 1000.0, at_once)
    assert 1 <= independent.bursts() < 1.4
    assert together.bursts() > 4
    assert History().bursts() == 1
