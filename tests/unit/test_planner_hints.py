"""Hints beside the decisions, in virtual time: what is had ready for what may come, told when it changes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from fleet_world import rules
from hypothesis import given
from hypothesis import strategies as st
from planned_fleet import KNOBS, PlannedFleet
from simulated_node import STARTS, Luck

from dynamo_snapshot.config import Fleet, Hints
from dynamo_snapshot.fleet.hints import subject
from dynamo_snapshot.model import OrderKind, PoolHint, ScalingHint
from planner.config import RoleBounds, hints_subject, planner_config, plugin_options
from planner.engine import engine_from_options
from planner.forecast import Forecast
from planner.hints import AGAIN_S, KEPT_S, LASTS_S, NO_HINTS, Hinting, HintMemory, HintPolicy
from planner.observation import EngineSample, Observation, PoolView, Role
from planner.outlook import Choice
from planner.policy import Action, LoadPolicy, Memory, Proposal

PARK = HintPolicy(Hinting.PARK, {Role.DECODE: 10.0}, parked_most=4)


def proposal(replicas: int | None, misses: Sequence[float] | None, role: Role = Role.DECODE) -> Proposal:
    """``misses``: requests a second that 1, 2, … replicas would miss."""
    if misses is None:
        return Proposal(role, Action.HOLD, "", replicas)
    choices = tuple(Choice(size, missed, size + 10 * missed) for size, missed in enumerate(misses, start=1))
    best = min(choices, key=lambda choice: choice.cost).replicas
    return Proposal(
        role, Action.HOLD, "", replicas, forecast=Forecast(best, best, 0, 2.0, 0.0, 0.0, 1.0, 9, 0.0, choices)
    )


class Teller:
    """Gives proposals to a hint policy, one a second."""

    def __init__(self, policy: HintPolicy = PARK) -> None:
        self.policy = policy
        self.memory = HintMemory()
        self.now = 50.0

    def tick(self, *proposals: Proposal, seconds: float = 1.0) -> ScalingHint | None:
        self.now += seconds
        hint, self.memory = self.policy.hint(
            {each.role: each for each in proposals}, self.memory, self.now, 1000 + self.now
        )
        return hint


BURSTY = (0.3, 0.09, 0.05, 0.0, 0.0, 0.0)
"""Four replicas would miss nothing, but with a miss worth 10 one is cheapest: 1 + 3 against 2 + 0.9 … 4."""
CALM = (0.0, 0.0, 0.0)


def test_what_may_come_but_is_not_worth_a_replica_is_parked_and_prefetched() -> None:
    hint = Teller().tick(proposal(2, BURSTY))
    assert hint is not None
    assert hint.decode == PoolHint(parked=2, prefetch=True)
    assert hint.prefill is None
    assert hint.expires_at - hint.at == LASTS_S


def test_nothing_is_parked_where_nothing_more_may_come() -> None:
    hint = Teller().tick(proposal(1, CALM))
    assert hint is not None
    assert hint.decode == PoolHint(parked=0, prefetch=False)


def test_prefetch_alone_leaves_parking_to_the_pool() -> None:
    hint = Teller(HintPolicy(Hinting.PREFETCH, {Role.DECODE: 10.0})).tick(proposal(2, BURSTY))
    assert hint is not None
    assert hint.decode == PoolHint(parked=None, prefetch=True)


def test_none_gives_none() -> None:
    assert Teller(NO_HINTS).tick(proposal(2, BURSTY)) is None


@pytest.mark.parametrize(("least", "most", "parked"), [(0, 1, 1), (3, 1, 3), (3, 4, 3), (0, 0, 0)])
def test_no_fewer_than_the_pool_keeps_and_no_more_than_the_user_allows(least: int, most: int, parked: int) -> None:
    teller = Teller(HintPolicy(Hinting.PARK, {Role.DECODE: 10.0}, {Role.DECODE: least}, most))
    hint = teller.tick(proposal(2, BURSTY))
    assert hint is not None
    assert hint.decode is not None
    assert hint.decode.parked == parked


def test_a_hint_is_told_when_it_changes_and_again_before_it_ends() -> None:
    teller = Teller()
    told = [teller.now for _ in range(90) if teller.tick(proposal(2, BURSTY)) is not None]
    assert told == [51.0, 51.0 + AGAIN_S, 51.0 + 2 * AGAIN_S, 51.0 + 3 * AGAIN_S, 51.0 + 4 * AGAIN_S]
    assert AGAIN_S < LASTS_S / 2, "one that is lost must not end the hint"


def test_more_is_asked_for_at_once_and_less_only_when_it_was_enough_for_a_while() -> None:
    teller = Teller()
    teller.tick(proposal(3, BURSTY))
    more = teller.tick(proposal(2, BURSTY))
    assert more is not None
    assert more.decode == PoolHint(parked=2, prefetch=True)
    asked = [teller.tick(proposal(1, CALM)) for _ in range(int(KEPT_S) + 2)]
    said = [hint.decode.parked for hint in asked if hint is not None and hint.decode is not None]
    assert said == [2, 2, 0]


def test_what_is_unknown_changes_no_hint() -> None:
    teller = Teller()
    teller.tick(proposal(2, BURSTY))
    assert teller.tick(proposal(2, None)) is None
    assert teller.tick(proposal(None, None)) is None
    again = teller.tick(proposal(None, None), seconds=AGAIN_S)
    assert again is not None
    assert again.decode == PoolHint(parked=2, prefetch=True)
    assert Teller().tick(proposal(2, None)) is None


def test_each_role_has_its_hint() -> None:
    policy = HintPolicy(Hinting.PARK, {Role.DECODE: 10.0, Role.PREFILL: 10.0})
    hint = Teller(policy).tick(proposal(2, BURSTY), proposal(1, CALM, Role.PREFILL))
    assert hint is not None
    assert hint.decode is not None
    assert hint.prefill is not None
    assert (hint.decode.parked, hint.prefill.parked) == (2, 0)


@given(
    st.lists(
        st.tuples(
            st.one_of(st.none(), st.integers(0, 8)),
            st.one_of(st.none(), st.lists(st.floats(0, 100), min_size=1, max_size=12).map(lambda m: sorted(m)[::-1])),
            st.sampled_from([0.2, 1.0, 30.0, 100.0]),
        ),
        max_size=40,
    ),
    st.integers(0, 5),
    st.integers(0, 6),
)
def test_hints_keep_to_their_bounds_and_are_told_no_more_often_than_they_change(
    ticks: list[tuple[int | None, list[float] | None, float]], least: int, most: int
) -> None:
    teller = Teller(HintPolicy(Hinting.PARK, {Role.DECODE: 10.0}, {Role.DECODE: least}, most))
    last: tuple[float, PoolHint | None] | None = None
    for replicas, misses, seconds in ticks:
        hint = teller.tick(proposal(replicas, misses), seconds=seconds)
        if hint is None:
            continue
        assert hint.decode is not None
        assert hint.decode.parked is not None
        assert least <= hint.decode.parked <= max(least, most)
        assert last is None or last[1] != hint.decode or teller.now - last[0] >= AGAIN_S
        last = (teller.now, hint.decode)


BURST, LULL = (12.0, 6.0), (0.0, 40.0)
"""Requests that are there, and for how long."""


def bursty_fleet(hints: HintPolicy) -> PlannedFleet:
    """A fleet that has seen some minutes of bursts between lulls, and is in a lull."""
    fleet = PlannedFleet(
        Luck(restore_s=3.0), rules(), hints=hints, ttft_objective_s=0.5, miss_cost_s=1.0, scale_down_after_s=4.0
    )
    fleet.world.run(15)
    fleet.add_planner()
    for _ in range(6):
        for requests, seconds in (BURST, LULL):
            fleet.run(seconds, requests)
    return fleet


def test_what_bursts_need_is_parked_in_the_lulls_and_woken_by_the_next() -> None:
    fleet = bursty_fleet(PARK)
    assert 1 <= len(fleet.world.parked()) <= 4
    begins = fleet.world.now
    serving = fleet.serving[-1]
    fleet.run(BURST[1], BURST[0])
    started = [order.kind for order in fleet.world.orders.values() if order.kind in STARTS and order.issued_at > begins]
    assert OrderKind.WAKE in started
    assert OrderKind.RESTORE not in started, "what was parked was enough"
    assert fleet.serving[-1] > serving
    assert not bursty_fleet(NO_HINTS).world.issued(OrderKind.PARK)


def test_when_the_planner_has_gone_its_hint_ends_with_it() -> None:
    fleet = bursty_fleet(PARK)
    assert fleet.world.parked()
    fleet.planners.clear()
    fleet.world.run(LASTS_S + 15)
    assert not fleet.world.parked()


# How it is configured


def test_the_planner_talks_where_the_fleet_listens() -> None:
    assert hints_subject("some-namespace") == subject("some-namespace")


def options(**more: Any) -> dict[str, Any]:
    config = planner_config(
        namespace="n", model_name="m", roles={"decode": RoleBounds(1, 8, parked=1)}, ttft_objective_s=1.0, **more
    )
    return plugin_options(config)


def test_the_configuration_names_what_the_plugin_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    made = options(hints="park", parked_most=3)
    assert {name: made[name] for name in ("hints", "hints_subject", "parked_least", "parked_most")} == {
        "hints": "park",
        "hints_subject": "dynamo_snapshot.n.scaling_hint",
        "parked_least": {"decode": 1},
        "parked_most": 3,
    }
    monkeypatch.setenv("NATS_SERVER", "nats://127.0.0.1:4222")
    engine_from_options(**made)
    assert "hints" not in options()
    advisory = options(hints="park", advisory=True)
    assert "hints" not in advisory, "advisory changes nothing"
    assert advisory["advisory"]
    assert "advisory" not in options()
    engine_from_options(**advisory)
    with pytest.raises(ValueError, match="warm"):
        options(hints="warm")


def test_hints_that_cannot_be_given_are_refused_at_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NATS_SERVER", raising=False)
    predicting = {"decode": {**KNOBS, "ttft_objective_s": 1.0}}
    told = {"hints": "park", "hints_subject": "s", "hints_nats": "nats://127.0.0.1:4222"}
    engine_from_options(predicting, **told)
    for roles, changes, text in (
        (predicting, {"hints": "warm"}, "warm"),
        (predicting, {"hints_nats": None}, "NATS_SERVER"),
        (predicting, {"hints_subject": None}, "hints_subject"),
        (predicting, {"parked_most": -1}, "parked_most must be 0 or more"),
        (predicting, {"parked_least": {"decoder": 1}}, "decoder"),
        ({"decode": KNOBS}, {}, "needs a ttft_objective_s"),
    ):
        with pytest.raises(ValueError, match=text):
            engine_from_options(roles, **{**told, **changes})


def test_the_fleets_file_has_the_same_choices_and_refuses_hints_without_predictions() -> None:
    assert {kind.value for kind in Hints} == {kind.value for kind in Hinting}
    fleet: dict[str, Any] = {
        "model": {"name": "m", "path": "/m"},
        "pools": {"main": {"worker": {"command": ["engine"]}}},
        "planner": {"hints": "park"},
    }
    with pytest.raises(ValueError, match="hints: park needs a ttft_objective_s"):
        Fleet.model_validate(fleet)
    fleet["planner"]["ttft_objective_s"] = 1.0
    assert Fleet.model_validate(fleet).planner.hints is Hints.PARK


# What is parked, in the forecast


def decided(parked: int, queued: float, ticks: int = 40) -> Proposal:
    """The last of some decisions for a worker that prefills a prompt of 2000 tokens in 0.2 s."""
    policy = LoadPolicy(ttft_objective_s=1.0, max_replicas=8)
    memory = Memory()
    pool = PoolView(1, 1, parked=parked, start_times={"restore": (8.0,) * 6, "wake": (0.25,) * 6})
    for tick in range(ticks):
        waiting = queued if tick == ticks - 1 else 0.0
        sample = EngineSample("1", 0, tick, 2.0, waiting, 0.21, 2000.0, 0.0, 1.0, 2000.0, 2000.0 * waiting)
        last, memory = policy.decide(Observation(1, (sample,), pool), memory, float(tick))
    assert last.forecast is not None
    return last


def test_while_enough_is_parked_a_start_takes_no_longer_than_a_wake() -> None:
    last = decided(parked=6, queued=10)
    assert last.forecast is not None
    assert last.forecast.lead_s == 0.25
    assert 1 < last.forecast.rise <= 7


def test_what_is_parked_is_asked_for_and_the_rest_takes_as_long_as_a_restore() -> None:
    last = decided(parked=1, queued=60)
    assert last.forecast is not None
    assert last.forecast.lead_s == 8.0
    assert last.forecast.rise >= 2


def test_with_nothing_parked_nothing_changes() -> None:
    last = decided(parked=0, queued=10)
    assert last.forecast is not None
    assert last.forecast.lead_s == 8.0
