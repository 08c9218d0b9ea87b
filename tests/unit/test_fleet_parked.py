"""Parked replicas, in virtual time: how many, woken when, replaced how, and never counted as what serves."""

from __future__ import annotations

from itertools import pairwise

import pytest
from fleet_world import World, rules
from msgspec.structs import replace
from simulated_node import Luck

from dynamo_snapshot.fleet.core import step
from dynamo_snapshot.fleet.core.decide import HINT_LASTS_AT_MOST_S
from dynamo_snapshot.fleet.core.messages import Decided, Hinted, SetWanted
from dynamo_snapshot.fleet.core.rules import Rules
from dynamo_snapshot.fleet.start_times import samples
from dynamo_snapshot.fleet.status import fleet_status
from dynamo_snapshot.model import (
    Decision,
    OrderKind,
    PoolHint,
    PoolStatus,
    Reason,
    ReplicaPhase,
    ReplicaState,
    ScalingHint,
    Way,
)


def settled(number: int, parked: int = 2, fleet: Rules | None = None, luck: Luck | None = None) -> World:
    """A world in which ``number`` replicas serve and ``parked`` are parked."""
    world = World(fleet or rules(parked=parked), luck)
    world.run(15)
    world.decide(number)
    world.run(15)
    assert len(world.serving()) == number
    assert len(world.parked()) == parked
    return world


def pool(world: World) -> PoolStatus:
    return fleet_status(world.state, world.now).pools[0]


def messages(world: World) -> str:
    return " ".join(f"{record.what} {record.reason}" for record in world.state.records)


def test_nothing_is_parked_unless_it_is_asked_for() -> None:
    world = settled(2, parked=0)
    world.run(30)
    assert world.issued(OrderKind.PARK) == []


def test_parked_replicas_are_made_one_by_one_after_what_is_to_serve_and_stand_apart() -> None:
    world = World(rules(parked=2), Luck(restore_s=2.0))
    world.run(15)
    made = [order.issued_at for order in world.issued(OrderKind.PARK)]
    assert len(made) == 2
    assert made[1] - made[0] >= 1, "one at a time"
    world.decide(3)
    world.run(20)
    status = pool(world)
    assert (status.serving, status.pending, status.parked, status.parked_target) == (3, 0, 2, 2)
    assert (status.target, status.achievable) == (3, 3)
    states = {replica.state for replica in fleet_status(world.state, world.now).replicas}
    assert states == {ReplicaState.SERVING, ReplicaState.PARKED}


def test_a_deficit_wakes_in_the_same_step_and_restores_only_what_is_left() -> None:
    world = settled(1)
    decided = Decided(decision=Decision(revision=1, id=99, decode=4))
    _, commands = step(world.state, decided, world.now)
    lists = [command.wanted for command in commands if isinstance(command, SetWanted)]
    kinds = [order.kind for wanted in lists for order in wanted.orders]
    assert kinds == [OrderKind.WAKE, OrderKind.WAKE, OrderKind.RESTORE]
    parked = {replica.id for replica in world.parked()}
    world.feed(decided)
    world.run(1.0)
    assert parked <= {replica.id for replica in world.serving()}
    world.run(15)
    assert len(world.serving()) == 4
    assert len(world.parked()) == 2, "their places are taken by others"


def test_a_wake_has_start_times_of_its_own() -> None:
    world = settled(1)
    before = samples(world.state.memory.start_times, "decode", Way.RESTORE)
    world.decide(2)
    world.run(5)
    woken = samples(world.state.memory.start_times, "decode", Way.WAKE)
    assert len(woken) == 1
    assert woken[0] <= 1
    assert len(samples(world.state.memory.start_times, "decode", Way.RESTORE)) == len(before), "parking is no start"


def test_a_failed_wake_is_followed_by_a_restore_at_once_and_uses_up_no_attempt() -> None:
    world = settled(1)
    world.luck.wakes_fail = True
    world.decide(2)
    world.run(3)
    assert len(world.issued(OrderKind.WAKE)) == 1, "the other is not tried right after"
    assert len(world.serving()) == 2
    assert not {order.replica_id for order in world.issued(OrderKind.WAKE)} & {replica.id for replica in world.live()}
    assert max(replica.attempts for replica in world.state.replicas.values()) == 0
    assert world.state.memory.quarantined == {}


def test_a_wake_refused_for_want_of_room_leaves_the_replica_parked() -> None:
    world = settled(1, parked=1)
    world.luck.wakes_refused = True
    (spare,) = world.parked()
    world.decide(2)
    world.run(5)
    assert len(world.serving()) == 2
    assert [replica.id for replica in world.parked()] == [spare.id]
    assert world.issued(OrderKind.KILL) == []
    assert Reason.NODE_AT_CAPACITY in messages(world)
    world.luck.wakes_refused = False
    world.run(10)
    world.decide(3)
    world.run(2)
    assert spare.id in {replica.id for replica in world.serving()}


def test_on_a_full_node_one_whose_wake_was_refused_gives_way_to_one_that_is_to_serve() -> None:
    """Parked again, it takes the place of the replica that is missing: no wanted replica is withdrawn for it."""
    world = settled(1, fleet=replace(rules(parked=1, max_replicas=3), node_capacity=3), parked=1)
    world.luck.wakes_refused = True
    (spare,) = world.parked()
    world.decide(3)
    world.run(15)
    assert spare.id in {order.replica_id for order in world.issued(OrderKind.WAKE)}
    assert spare.id not in {replica.id for replica in world.live()}
    assert (len(world.serving()), pool(world).achievable) == (3, 3)
    assert "every node is full" in messages(world)


def test_a_parked_replica_that_dies_is_replaced_and_a_row_of_failures_slows_that_down() -> None:
    world = settled(1, parked=1, fleet=rules(parked=1, quarantine_after=100))
    world.run(20)
    node = world.nodes["one"]
    node.crash_worker(world.parked()[0])
    world.run(3)
    assert len(world.parked()) == 1, "it had been parked for a while: replaced at once"
    world.luck.restores_fail = True
    node.crash_worker(world.parked()[0])
    world.run(120)
    assert world.parked() == []
    assert len(world.serving()) == 1, "what serves is none of it"
    assert pool(world).unachievable_reason is None
    tries = [order.issued_at for order in world.issued(OrderKind.PARK)][2:]
    gaps = [later - earlier for earlier, later in pairwise(tries)]
    assert len(gaps) >= 3
    assert gaps == sorted(gaps), "each pause is longer than the one before"


def test_failures_to_park_put_a_snapshot_into_quarantine_as_restores_do() -> None:
    world = World(rules(parked=1))
    world.luck.restores_fail = True
    world.run(90)
    assert list(world.state.memory.quarantined) == ["snapshot-one-0"]


def test_a_hint_asks_for_another_number_until_it_expires() -> None:
    world = settled(1, parked=1)
    world.hint(3, lasts_s=20)
    world.run(15)
    assert len(world.parked()) == 3
    assert pool(world).parked_target == 3
    world.run(10)
    assert len(world.parked()) == 1
    world.hint(0, lasts_s=20)
    world.run(5)
    assert world.parked() == []
    assert len(world.serving()) == 1


@pytest.mark.parametrize("number", [None, -1])
def test_a_hint_without_a_number_is_no_opinion(number: int | None) -> None:
    world = settled(1, parked=1)
    world.hint(number)
    world.run(5)
    assert len(world.parked()) == 1


def test_a_hint_that_comes_late_does_not_undo_a_newer_one() -> None:
    world = settled(1, parked=0)
    world.hint(2)
    newest, late = world.state.hint, world.now - 5
    assert newest is not None
    world.feed(Hinted(hint=ScalingHint(at=late, expires_at=late + 30, decode=PoolHint(parked=0))))
    assert world.state.hint == newest


def test_the_planner_s_hint_never_parks_more_than_the_pool_may_have() -> None:
    world = settled(1, fleet=rules(parked=0, max_replicas=3), parked=0)
    world.hint(50)
    world.run(15)
    assert len(world.parked()) == 3


def test_what_is_to_serve_takes_the_place_of_what_is_parked_when_every_node_is_full() -> None:
    two = replace(rules(parked=2), node_capacity=4)
    prefill = replace(two.pools["decode"], role="prefill", component="prefill", parked=0, min_replicas=0)
    world = World(replace(two, pools={**two.pools, "prefill": prefill}))
    world.run(20)
    assert (len(world.serving()), len(world.parked())) == (1, 2)
    world.feed(Decided(decision=Decision(revision=1, id=50, decode=1, prefill=3)))
    world.run(2)
    assert len(world.live("prefill")) == 3
    assert len(world.parked()) == 0
    assert "every node is full" in messages(world)
    room = {status.pool: status.achievable for status in fleet_status(world.state, world.now).pools}
    assert room["prefill"] == 3


def test_a_pool_that_shrinks_keeps_what_is_parked() -> None:
    world = settled(3)
    world.decide(1)
    world.run(5)
    assert len(world.serving()) == 1
    assert len(world.parked()) == 2


def test_a_decision_taken_back_ends_the_woken_before_it_serves() -> None:
    world = settled(1, parked=1)
    world.decide(2)
    world.decide(1)
    world.run(10)
    assert len(world.serving()) == 1
    assert len(world.parked()) == 1, "another took its place"
    assert world.open_orders() == []


def test_a_controller_that_takes_over_finds_what_is_parked_and_parks_no_more() -> None:
    world = settled(1)
    before = len(world.issued(OrderKind.PARK))
    world.start_controller()
    world.run(20)
    assert len(world.issued(OrderKind.PARK)) == before
    assert pool(world).parked == 2
    world.decide(2)
    world.run(2)
    assert len(world.issued(OrderKind.WAKE)) == 1
    assert len(world.serving()) == 2


def test_a_controller_that_takes_over_amid_a_wake_lets_it_end() -> None:
    world = settled(1, parked=1)
    world.decide(2)
    world.start_controller()
    world.run(5)
    assert len(world.issued(OrderKind.WAKE)) == 1
    assert len(world.serving()) == 2


def test_what_a_pool_does_not_run_any_more_is_not_woken_and_goes() -> None:
    world = settled(1, parked=1)
    spare = world.parked()[0].id
    world.keys["decode"] = "another-key"
    world.nodes["one"].dirty = True
    world.run(2)
    world.decide(2)
    world.run(3)
    assert world.issued(OrderKind.WAKE) == []
    assert spare not in {replica.id for replica in world.live()}
    assert "another configuration" in messages(world)


def test_a_key_that_is_not_told_leaves_what_is_parked_alone() -> None:
    world = settled(1, parked=1)
    world.keys.clear()
    world.nodes["one"].dirty = True
    world.run(5)
    assert len(world.parked()) == 1


def test_nothing_is_parked_woken_or_withdrawn_while_discovery_is_unknown() -> None:
    world = settled(1, parked=1)
    orders = len(world.orders)
    world.set_etcd(False)
    world.run(1)
    world.hint(0)
    world.decide(3)
    world.run(10)
    assert len(world.orders) == orders
    assert len(world.parked()) == 1


def test_a_prefetch_is_asked_of_each_node_once_in_a_while() -> None:
    world = settled(1, parked=0)
    assert world.issued(OrderKind.PREFETCH) == []
    world.hint(None, prefetch=True, lasts_s=1000)
    world.run(100)
    assert [order.snapshot_id for order in world.issued(OrderKind.PREFETCH)] == ["snapshot-one-0"]
    assert world.open_orders() == []
    world.run(300)
    assert len(world.issued(OrderKind.PREFETCH)) == 2
    assert len(world.live()) == 1


def test_a_parked_worker_that_shows_up_in_discovery_serves() -> None:
    world = settled(1, parked=1)
    world.decide(2)
    world.run(0.0)
    stray = world.parked()[0]
    assert stray.phase is ReplicaPhase.PARKED
    world.register(stray, world.nodes["one"].host)
    world.run(0.25)
    assert world.state.replicas[stray.id].state is ReplicaState.SERVING
    assert pool(world).serving == 2


def test_a_replica_whose_wake_was_refused_amid_a_change_of_controllers_is_woken_later() -> None:
    world = settled(1, parked=1)
    world.luck.wakes_refused = True
    (spare,) = world.parked()
    world.decide(2)
    world.start_controller()
    world.run(5)
    assert [replica.id for replica in world.parked()] == [spare.id]
    world.luck.wakes_refused = False
    world.run(15)
    world.decide(3)
    world.run(2)
    assert spare.id in {replica.id for replica in world.serving()}


def test_what_is_parked_holds_up_no_target_that_nobody_decided() -> None:
    world = World(rules(parked=1))
    world.run(20)
    world.start_controller()
    world.run(20)
    assert pool(world).target == 1
    assert world.issued(OrderKind.WAKE) == []
    assert len(world.parked()) == 1


def test_wakes_that_a_silent_node_never_began_say_nothing_against_their_snapshot() -> None:
    world = settled(1, parked=2)
    world.nodes["one"].up = False
    world.decide(3)
    world.run(30)
    assert len(world.issued(OrderKind.WAKE)) == 2
    assert "deadline_exceeded" in messages(world)
    assert world.state.memory.quarantined == {}


def test_a_replica_whose_snapshot_may_not_be_used_any_more_is_not_kept_parked() -> None:
    world = settled(1, parked=1)
    node, spare = world.nodes["one"], world.parked()[0].id
    node.snapshots = [replace(each, admitted=False, reason=Reason.SNAPSHOT_CORRUPT.value) for each in node.snapshots]
    node.dirty = True
    world.run(5)
    assert spare not in {replica.id for replica in world.live()}
    assert "may not be used: snapshot_corrupt" in messages(world)


def test_a_hint_of_a_clock_that_is_ahead_is_followed_by_the_next_and_none_lasts_for_ever() -> None:
    world = settled(1, parked=0)

    def hint(parked: int, at: float) -> None:
        asked = PoolHint(parked=parked)
        world.feed(Hinted(hint=ScalingHint(at=at, expires_at=at + 1e9, decode=asked)))

    hint(2, world.now + 1e6)
    world.run(5)
    assert len(world.parked()) == 2
    hint(0, world.now)
    world.run(5)
    assert world.parked() == []
    hint(2, world.now)
    world.run(5)
    world.now += HINT_LASTS_AT_MOST_S
    world.run(5)
    assert world.parked() == []


def test_a_hint_is_heard_after_this_clock_was_set_back() -> None:
    world = settled(1, parked=0)
    world.hint(2)
    world.now -= 100
    world.hint(0)
    assert world.state.hint is not None
    assert world.state.hint.at == world.now


def test_room_is_made_where_it_can_be_used_while_another_node_is_silent() -> None:
    three = replace(rules(parked=4), node_capacity=3)
    prefill = replace(three.pools["decode"], role="prefill", component="prefill", parked=0, min_replicas=0)
    world = World(replace(three, pools={**three.pools, "prefill": prefill}), nodes=("one", "two"))
    world.run(10)
    world.nodes["two"].snapshots = list(world.nodes["one"].snapshots)
    world.feed(Decided(decision=Decision(revision=1, id=0, decode=2, prefill=0)))
    world.run(40)
    assert [sum(replica.live for replica in node.replicas.values()) for node in world.nodes.values()] == [3, 3]
    world.nodes["two"].up = False
    world.run(25)
    world.feed(Decided(decision=Decision(revision=1, id=50, decode=2, prefill=1)))
    world.run(10)
    assert [replica.id in world.nodes["one"].replicas for replica in world.live("prefill")] == [True]
    ended = {order.replica_id for order in world.orders.values() if order.kind is OrderKind.DRAIN}
    assert not ended & set(world.nodes["two"].replicas), "what a silent node has parked is left to it"


def test_what_is_parked_on_a_silent_node_is_not_told_as_parked_until_the_node_is_heard_again() -> None:
    world = World(rules(), nodes=("one", "two"))
    world.run(10)
    world.nodes["two"].snapshots = list(world.nodes["one"].snapshots)
    world.decide(1)
    world.hint(2, lasts_s=1e3)
    world.run(30)
    world.nodes["two"].up = False
    world.run(world.rules.node_silent_s + 1)
    assert (pool(world).parked, pool(world).parked_target, len(world.parked())) == (1, 2, 2)
    world.nodes["two"].up = True
    world.run(5)
    assert pool(world).parked == 2
