"""Planner and fleet together in virtual time: capacity that is late, stuck or lost, and two planners at once."""

from __future__ import annotations

import math
import random
from itertools import pairwise

import pytest
from fleet_world import World, rules
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from msgspec.structs import replace
from planned_fleet import KNOBS, PlannedFleet, context, message
from simulated_node import STARTS, Luck

from dynamo_snapshot.fleet.status import fleet_status
from dynamo_snapshot.model import FleetStatus, OrderKind, ReplicaState, ReplicaStatus, Way
from planner.engine import ScalingEngine, engine_from_options
from planner.fleet_status import NoFleetStatus
from planner.hints import Hinting, HintPolicy
from planner.joint import JointPolicy
from planner.observation import Role
from planner.records import DecisionLog


def starts(fleet: PlannedFleet) -> int:
    """Orders that made a replica."""
    return len([order for order in fleet.world.orders.values() if order.kind in STARTS])


def turns(sizes: list[int]) -> int:
    """Changes of direction."""
    steps = [later - earlier for earlier, later in pairwise(sizes)]
    return sum((one > 0) != (other > 0) for one, other in pairwise(steps))


SLOW = replace(rules().pools["decode"], restore_s=90.0)


def slow() -> PlannedFleet:
    return PlannedFleet(Luck(), replace(rules(), pools={"decode": SLOW}))


@pytest.mark.parametrize("tick_s", [1.0, 5.0])
def test_an_overload_during_a_long_restore_is_ordered_once(tick_s: float) -> None:
    fleet = slow()
    fleet.reach(1, 2)
    fleet.tick_s, fleet.world.luck.restore_s = tick_s, 30.0
    before = starts(fleet)
    fleet.run(80, 12)
    assert starts(fleet) - before == 2
    assert fleet.sizes == [1, 3]
    assert len(fleet.world.serving()) == 3


def test_capacity_that_never_arrives_silences_scaling_only_until_its_deadline() -> None:
    fleet = PlannedFleet()
    fleet.reach(1, 2)
    fleet.world.luck.hanging = 1.0
    fleet.run(8, 12)
    assert (len(fleet.world.serving()), fleet.starting[-1]) == (1, 2)
    # A higher need is asked for while the first two hang.
    fleet.run(1, 20)
    assert fleet.said[-1].replicas == 5
    fleet.world.luck.hanging = 0.0
    fleet.run(60, 20)
    assert len(fleet.world.serving()) == 5


def test_capacity_that_is_stuck_is_cancelled_when_the_load_has_gone_and_what_serves_is_kept() -> None:
    fleet = slow()
    fleet.reach(2, 8)
    served = {replica.id for replica in fleet.world.serving()}
    fleet.world.luck.hanging = 1.0
    fleet.run(3, 16)
    assert fleet.starting[-1] == 2
    fleet.run(KNOBS["scale_down_after_s"] + 3, 6)
    assert {replica.id for replica in fleet.world.serving()} == served
    cancelled = {order.replica_id for order in fleet.world.issued(OrderKind.CANCEL)}
    assert len(cancelled) == 2
    assert not cancelled & served
    assert not fleet.world.issued(OrderKind.DRAIN)


def test_a_worker_that_was_removed_behind_the_planners_back_is_replaced_and_the_target_stands() -> None:
    fleet = PlannedFleet()
    fleet.reach(3, 12)
    fleet.world.nodes["one"].crash_worker(fleet.world.serving()[0])
    fleet.run(10, 12)
    assert fleet.sizes == [3]
    assert len(fleet.world.serving()) == 3


def test_no_more_starts_are_under_way_than_the_work_needs_however_slow_they_are() -> None:
    fleet = slow()
    fleet.reach(1, 2)
    fleet.world.luck.restore_s = 20.0
    before = starts(fleet)
    fleet.run(60, 24)
    assert max(fleet.starting) == 5
    assert max(serving + starting for serving, starting in zip(fleet.serving, fleet.starting, strict=True)) == 6
    assert starts(fleet) - before == 5


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    st.lists(st.tuples(st.integers(0, 40), st.sampled_from([3, 10, 30])), min_size=1, max_size=6),
    st.sampled_from([0.5, 8.0]),
    st.integers(0, 100),
)
def test_ready_pending_and_load_never_come_to_more_than_the_load_needs(
    loads: list[tuple[int, int]], restore_s: float, seed: int
) -> None:
    fleet = PlannedFleet(Luck(dice=random.Random(seed), failing=0.1, restore_s=restore_s, hanging=0.05))
    fleet.world.run(15)
    fleet.add_planner()
    most = 1
    for requests, seconds in loads:
        most = max(most, math.ceil(requests / KNOBS["target_requests_per_replica"]))
        fleet.run(seconds, requests)
        assert max(fleet.sizes, default=0) <= min(most, KNOBS["max_replicas"])
        together = (serving + starting for serving, starting in zip(fleet.serving, fleet.starting, strict=True))
        assert max(together) <= min(most, KNOBS["max_replicas"])


def test_a_role_that_is_never_ready_holds_nobody_else_up() -> None:
    """Decode has no worker and never gets one; prefill is overloaded."""
    engine = engine_from_options(
        {"decode": KNOBS, "prefill": KNOBS}, gpu_budget=12, gpus_per_replica={"decode": 1, "prefill": 1}
    )
    sizes = []
    for tick in range(3):
        engines = {"7/0": message(tick, 12)}
        decode, prefill = engine.propose(context(0, {}, 1, engines))
        sizes.append(prefill.replicas)
        assert decode.role is Role.DECODE
        assert decode.floor is not None
        assert decode.floor <= KNOBS["max_replicas"]
    assert sizes == [3, 3, 3]


def test_what_a_replica_on_its_way_tells_is_no_load() -> None:
    """It works at its start-up as hard as it can, and counts that as load."""

    class OneRestores(NoFleetStatus):
        def latest(self) -> FleetStatus:
            world = World(rules())
            world.run(15)
            world.decide(2)
            replicas = [
                ReplicaStatus(
                    replica_id=f"r{number}",
                    pool="decode",
                    node="one",
                    state=state,
                    since=100.0,
                    way=Way.RESTORE,
                    instance_id=number,
                )
                for number, state in enumerate((ReplicaState.SERVING, ReplicaState.RESTORING, ReplicaState.RESUMING))
            ]
            return replace(fleet_status(world.state, 100.0), replicas=tuple(replicas))

    engine = ScalingEngine(
        JointPolicy.of({"decode": KNOBS}),
        OneRestores(),
        DecisionLog(None),
        clock=lambda: 100.0,
        wall_clock=lambda: 100.0,
    )
    (proposal,) = engine.propose(context(1, {"0/0": message(1, 2), "1/0": message(1, 400), "2/0": message(1, 400)}))
    assert proposal.load.requests == 2


def test_a_load_that_goes_up_and_down_by_a_tenth_for_half_an_hour_changes_the_size_once_at_the_most() -> None:
    fleet = PlannedFleet()
    fleet.reach(3, 12)
    for tick in range(1800):
        fleet.run(1, 12 * (0.9 + 0.2 * (tick % 60) / 60))
    assert len(fleet.sizes) <= 2


@pytest.mark.parametrize("scale_down_after_s", [5.0, 20.0])
@pytest.mark.parametrize("cooldown_s", [0.0, 5.0, 60.0])
def test_no_cooldown_is_too_short_for_the_window_that_it_goes_with(
    scale_down_after_s: float, cooldown_s: float
) -> None:
    """Load that comes and goes within the window is never followed down, whatever the cool-down."""
    fleet = PlannedFleet(scale_down_after_s=scale_down_after_s, cooldown_s=cooldown_s)
    fleet.reach(1, 2)
    for _ in range(40):
        fleet.run(1, 20)
        fleet.run(scale_down_after_s - 2, 2)
    assert fleet.sizes == [1, 5]
    fleet.run(max(scale_down_after_s, cooldown_s) + 2, 2)
    assert fleet.sizes == [1, 5, 1]


# Two of a kind


def test_two_planners_on_one_fleet_come_to_one_size_and_do_not_flap() -> None:
    fleet = PlannedFleet()
    fleet.reach(5, 20)
    fleet.run(20, 20)
    fleet.add_planner()  # of a rolling update, or started by mistake
    fleet.run(60, 20)
    assert fleet.sizes == [5]
    fleet.run(60, 4)
    fleet.run(60, 16)
    assert turns(fleet.sizes) <= 1, fleet.sizes
    assert fleet.sizes[-1] == 4


@pytest.mark.parametrize("begins_after_s", [10.0, 18.0, 21.0, 24.0])
def test_a_second_planner_that_begins_amid_a_step_down_does_not_undo_it_for_long(begins_after_s: float) -> None:
    fleet = PlannedFleet()
    fleet.reach(5, 20)
    fleet.run(begins_after_s, 2)
    fleet.add_planner()
    fleet.run(80, 2)
    assert fleet.sizes == [5, 1]


# The same examples each time: one takes a second, and to make a failing one smaller takes minutes.
@example([(0, 1), (0, 1), (9, 1), (4, 1), (0, 21)], 4, 2)
@example([(0, 1), (0, 1), (11, 1), (2, 1), (0, 21)], 4, 2)
@settings(max_examples=25, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
@given(
    st.lists(st.tuples(st.integers(0, 30), st.integers(1, 25)), min_size=1, max_size=5),
    st.integers(1, 28),
    st.integers(2, 3),
)
def test_planners_that_come_and_go_settle_on_the_size_that_the_load_needs(
    loads: list[tuple[int, int]], last: int, planners: int
) -> None:
    fleet = PlannedFleet()
    fleet.world.run(15)
    fleet.add_planner()
    for index, (requests, seconds) in enumerate(loads):
        fleet.run(seconds, requests)
        if index % 2:
            fleet.planners.pop(0)
        while len(fleet.planners) < planners:
            fleet.add_planner()
    fleet.run(400, last)
    before = len(fleet.sizes)
    fleet.run(60, last)
    assert len(fleet.sizes) == before, f"still at it: {fleet.sizes}"
    need = math.ceil(last / KNOBS["target_requests_per_replica"])
    assert need <= fleet.sizes[-1] <= need + 1


def test_a_planner_that_ends_is_succeeded_by_the_other_within_a_tick() -> None:
    fleet = PlannedFleet()
    fleet.reach(2, 8)
    fleet.add_planner()
    fleet.run(30, 8)
    fleet.planners.pop(0)
    fleet.run(1, 16)
    assert fleet.sizes[-1] == 4


def two_that_disagree() -> PlannedFleet:
    """The first has lowered the fleet to 2 and has gone; the second, whose window is not over, still wants 4."""
    fleet = PlannedFleet()
    fleet.reach(4, 16)
    fleet.run(12, 6)
    fleet.add_planner()
    fleet.run(10, 6)
    assert fleet.sizes == [4, 2]
    fleet.planners.pop(0)
    return fleet


def test_a_wish_that_somebody_else_overwrote_is_said_again_as_soon_as_the_work_needs_it() -> None:
    fleet = two_that_disagree()
    fleet.run(8, 16)
    assert fleet.sizes == [4, 2, 4]
    assert "somebody else" in " ".join(proposal.reason for proposal in fleet.said[-8:])


def test_a_wish_that_is_only_held_is_not_said_again_before_its_window_is_over() -> None:
    fleet = two_that_disagree()
    fleet.run(120, 6)
    assert fleet.sizes == [4, 2]


def test_a_fleet_that_never_shows_what_it_was_told_is_told_again_ever_more_rarely() -> None:
    """Its own bounds may be narrower, or another plugin lowers what is proposed."""
    fleet = PlannedFleet(fleet=replace(rules(), pools={"decode": replace(rules().pools["decode"], max_replicas=3)}))
    fleet.world.run(15)
    fleet.add_planner()
    fleet.run(600, 24)
    again = [index for index, proposal in enumerate(fleet.said) if "is said again" in proposal.reason]
    assert len(fleet.world.serving()) == 3
    gaps = [later - earlier for earlier, later in pairwise(again)]
    assert gaps == sorted(gaps)
    assert gaps[-1] >= 40


def test_what_is_proposed_only_to_be_said_again_has_nothing_parked_beside_it() -> None:
    fleet = PlannedFleet(
        fleet=replace(rules(), pools={"decode": replace(rules().pools["decode"], max_replicas=3)}),
        hints=HintPolicy(Hinting.PARK, {Role.DECODE: 1.0}),
        max_replicas=5,
        ttft_objective_s=0.5,
        miss_cost_s=1.0,
    )
    fleet.world.run(15)
    fleet.add_planner()
    fleet.run(120, 24)
    assert any("is said again" in proposal.reason for proposal in fleet.said)
    assert fleet.said[-1].replicas == 5, "all that may be had: nothing is worth having ready beside it"
    assert not fleet.world.issued(OrderKind.PARK)
    hints = [each for each in fleet.heard if each.decode is not None]
    assert hints
    assert {each.decode.parked for each in hints if each.decode is not None} == {0}


def test_who_only_advises_does_not_insist() -> None:
    fleet = PlannedFleet(advisory=True)
    fleet.world.run(15)
    fleet.add_planner()
    fleet.run(300, 12)
    assert {proposal.replicas for proposal in fleet.said} == {3}
    assert fleet.sizes == []


def test_a_planner_that_begins_anew_keeps_what_is_there_for_one_window() -> None:
    fleet = PlannedFleet()
    fleet.reach(5, 20)
    fleet.planners.clear()
    fleet.add_planner()
    fleet.run(KNOBS["scale_down_after_s"] - 1, 2)
    assert fleet.sizes == [5]
    fleet.run(10, 2)
    assert fleet.sizes == [5, 1]
