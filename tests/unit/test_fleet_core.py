"""The fleet's rules one by one, in virtual time."""

from __future__ import annotations

from typing import Any

import pytest
from fleet_world import World, rules
from msgspec.structs import replace
from simulated_node import Luck

from dynamo_snapshot.fleet.core import State, initial, step
from dynamo_snapshot.fleet.core.messages import (
    CompleteDecision,
    Decided,
    DiscoverySeen,
    Memory,
    NodeReported,
    Quarantine,
    Remember,
    Resign,
    RevokeLease,
    SetWanted,
    Started,
    Ticked,
)
from dynamo_snapshot.fleet.core.rules import Rules
from dynamo_snapshot.fleet.status import fleet_status
from dynamo_snapshot.model import (
    Decision,
    Exit,
    Instance,
    Order,
    OrderKind,
    OrderStatus,
    Outcome,
    PoolStatus,
    Reason,
    ReplicaPhase,
    ReplicaReport,
    ReplicaState,
    Reported,
    StartTimes,
    Wanted,
    Way,
    WorkerLoad,
)


def settled(number: int, fleet: Rules | None = None, luck: Luck | None = None) -> World:
    """A world in which ``number`` replicas serve and a snapshot exists."""
    world = World(fleet or rules(), luck)
    world.run(15)
    world.decide(number)
    world.run(10)
    assert len(world.serving()) == number
    return world


def until_unachievable(world: World) -> PoolStatus:
    """Lets time pass until the fleet says that it cannot reach its target."""
    for _ in range(400):
        world.run(0.25)
        if pool(world).unachievable_reason is not None:
            return pool(world)
    pytest.fail("nothing was ever unachievable")


def pool(world: World) -> PoolStatus:
    return fleet_status(world.state, world.now).pools[0]


# Up


def test_the_first_worker_is_cold_and_captured_and_the_rest_are_restored() -> None:
    world = settled(4)
    assert [order.capture for order in world.issued(OrderKind.COLD_START)] == [True]
    assert len(world.issued(OrderKind.CAPTURE)) == 1
    assert [order.snapshot_id for order in world.issued(OrderKind.RESTORE)] == ["snapshot-one-0"] * 3


def test_a_decision_is_an_order_in_the_same_step() -> None:
    world = settled(1)
    state, commands = step(world.state, Decided(decision=Decision(revision=1, id=99, decode=3)), world.now)
    lists = [command.wanted for command in commands if isinstance(command, SetWanted)]
    assert [order.kind for wanted in lists for order in wanted.orders] == [OrderKind.RESTORE] * 2
    assert isinstance(commands[0], SetWanted), "what is waited for comes first"
    assert state.pools["decode"].target == 3


def test_the_same_demand_repeated_orders_nothing_more() -> None:
    world = settled(1, luck=Luck(restore_s=5.0))
    for _ in range(10):
        world.decide(4)
        world.run(0.5)
    assert len(world.issued(OrderKind.RESTORE)) == 3


def test_targets_keep_to_the_pool_s_bounds() -> None:
    world = settled(1, rules(min_replicas=1, max_replicas=3))
    world.decide(50)
    world.run(5)
    assert len(world.serving()) == 3
    world.decide(0)
    world.run(5)
    assert len(world.serving()) == 1
    assert "asks for 50" in " ".join(record.reason for record in world.state.records)


def test_confirmed_zero_drains_a_pool_that_allows_it() -> None:
    world = settled(2, rules(min_replicas=0))
    world.decide(0)
    world.run(5)
    assert world.live() == []


@pytest.mark.parametrize("number", [None, -1])
def test_an_unknown_number_holds_the_target(number: int | None) -> None:
    world = settled(3)
    world.decide(number)
    world.run(10)
    assert len(world.serving()) == 3


def test_a_repeated_decision_changes_nothing_but_is_acknowledged_again() -> None:
    world = settled(3)
    decision = Decision(revision=1, id=0, decode=1)  # the id that `settled` has used
    state, commands = step(world.state, Decided(decision=decision), world.now)
    assert commands[0] == CompleteDecision(decision=decision)
    assert state.pools == world.state.pools
    assert not any(isinstance(command, SetWanted) for command in commands)


def test_a_restarted_planner_begins_its_ids_anew_and_is_heard() -> None:
    world = settled(3)
    world.feed(Decided(decision=Decision(revision=900, id=0, decode=1)))
    world.run(5)
    assert len(world.serving()) == 1


def test_two_pools_take_the_planner_s_two_numbers() -> None:
    one = rules().pools["decode"]
    fleet = replace(rules(), pools={"decode": one, "prefill": replace(one, role="prefill", component="prefill")})
    state, _ = step(initial(fleet), Started(fence=1), 0.0)
    state, _ = step(state, Decided(decision=Decision(revision=1, id=0, prefill=2, decode=4)), 0.0)
    assert {name: pool.target for name, pool in state.pools.items()} == {"decode": 4, "prefill": 2}
    state, _ = step(state, Decided(decision=Decision(revision=1, id=1, prefill=5)), 0.0)
    assert {name: pool.target for name, pool in state.pools.items()} == {"decode": 4, "prefill": 5}


# Ways


def test_a_wait_for_the_first_snapshot_where_that_is_sooner() -> None:
    world = World(rules(), Luck(boot_s=6.0))
    world.run(1)
    world.decide(3)
    world.run(0.25)
    assert len(world.issued(OrderKind.COLD_START)) == 3, "at the beginning a cold start is as soon"
    late = World(rules(), Luck(boot_s=6.0))
    late.run(4)
    late.decide(3)
    late.run(0.25)
    assert len(late.issued(OrderKind.COLD_START)) == 1, "late in its boot the snapshot is sooner"
    assert "sooner than a cold start" in late.state.pools["decode"].waits_for
    late.run(20)
    assert len(late.issued(OrderKind.RESTORE)) == 2
    assert len(late.serving()) == 3


def test_nobody_waits_for_ever_for_a_snapshot_that_does_not_come() -> None:
    world = World(rules(cold_start_s=200.0), Luck(boot_s=100.0))
    world.run(5)
    world.decide(3)
    world.run(0.25)
    assert len(world.issued(OrderKind.COLD_START)) == 1
    world.run(30)
    assert len(world.issued(OrderKind.COLD_START)) == 3


def test_no_capture_where_a_restore_would_not_gain_enough() -> None:
    world = World(rules(minimum_gain_s=30.0))
    world.run(15)
    assert [order.capture for order in world.issued(OrderKind.COLD_START)] == [False]
    assert any("would gain" in record.reason for record in world.state.records)


def test_no_capture_where_the_policy_is_never() -> None:
    world = settled(3, rules(captures=False))
    assert not any(order.capture for order in world.orders.values())
    assert world.issued(OrderKind.RESTORE) == []


def test_cold_starts_where_restores_proved_slower() -> None:
    slow = (
        StartTimes(pool="decode", way=Way.RESTORE, seconds=(9.0, 9.0, 9.0)),
        StartTimes(pool="decode", way=Way.COLD_START, seconds=(4.0, 4.0, 4.0)),
    )
    world = settled(1)
    world.state = replace(world.state, memory=replace(world.state.memory, start_times=slow))
    world.decide(2)
    assert [order.capture for order in world.issued(OrderKind.COLD_START)] == [True, False]


def test_the_time_of_a_capture_is_no_part_of_a_cold_start() -> None:
    world = World(rules(), Luck(boot_s=4.0, capture_s=6.0))
    world.run(30)
    cold = [entry for entry in world.state.memory.start_times if entry.way is Way.COLD_START]
    assert len(cold) == 1
    assert cold[0].seconds[0] < 7.0


def test_another_key_is_captured_again() -> None:
    world = settled(2)
    world.keys["decode"] = "another-key"
    world.nodes["one"].dirty = True
    world.run(1)
    world.decide(3)
    world.run(15)
    assert [order.capture for order in world.issued(OrderKind.COLD_START)] == [True, True]
    world.decide(4)
    world.run(5)
    assert world.issued(OrderKind.RESTORE)[-1].snapshot_id == "snapshot-one-1"


@pytest.mark.parametrize("flaw", [{"reason": "snapshot_corrupt"}, {"admitted": False}])
def test_a_snapshot_that_is_not_admitted_or_has_a_reason_is_not_used(flaw: dict[str, Any]) -> None:
    world = settled(1)
    node = world.nodes["one"]
    node.snapshots = [replace(node.snapshots[0], **flaw)]
    node.dirty = True
    world.run(1)
    world.decide(2)
    world.run(1)
    assert world.issued(OrderKind.RESTORE) == []


def test_a_new_node_is_given_time_to_tell_its_key_but_not_for_ever() -> None:
    world = World(rules())
    key = world.keys.pop("decode")
    world.run(5)
    assert world.orders == {}
    assert world.state.pools["decode"].waits_for.startswith("node one is working out which snapshots fit it")
    world.run(10)
    assert len(world.issued(OrderKind.COLD_START)) == 1
    world.keys["decode"] = key


# Failures


def test_a_dead_worker_is_replaced_and_revoked_in_the_step_of_its_report() -> None:
    world = settled(3)
    node = world.nodes["one"]
    dead = world.serving()[0]
    node.crash_worker(dead)
    report = node.report()
    world.reports["one"] = report
    before = len(world.orders)
    world.feed(NodeReported(reported=report))
    assert world.revoked == [dead.instance_id]
    assert len(world.orders) == before + 1
    world.run(5)
    assert len(world.serving()) == 3


def test_no_lease_is_revoked_on_anything_but_an_exit_report() -> None:
    world = settled(3)
    world.registry.pop(world.serving()[0].instance_id or 0)
    world.run(60)
    assert len(world.serving()) == 3
    assert world.revoked == []


def test_while_discovery_is_unknown_its_last_view_moves_and_revokes_nothing() -> None:
    world = settled(1)
    dead = world.serving()[0]
    view = DiscoverySeen(instances=tuple(world.registry.values()))
    state, _ = step(world.state, DiscoverySeen(instances=None), world.now)
    world.nodes["one"].crash_worker(dead)
    state, commands = step(state, NodeReported(reported=world.nodes["one"].report()), world.now)
    assert not any(isinstance(command, RevokeLease) for command in commands)
    _, commands = step(state, view, world.now)
    revoked = [command.instance_id for command in commands if isinstance(command, RevokeLease)]
    assert revoked == [dead.instance_id]


def test_a_pool_is_said_to_be_held_only_where_and_while_discovery_holds_it() -> None:
    def holds(state: State) -> list[str]:
        return [record.reason for record in state.records if record.what == "no order now"]

    fleet = rules()
    state, _ = step(initial(fleet), Started(fence=1), 1000.0)
    state, _ = step(state, Ticked(), 1000.0 + fleet.settle_s - 0.1)
    assert holds(state) == [], "every controller starts so"
    slow, _ = step(state, Ticked(), 1000.0 + fleet.settle_s)
    assert holds(slow) == ["discovery has not been read yet: numbers are held"]
    unknown, _ = step(state, DiscoverySeen(instances=None), 1001.0)
    assert holds(unknown) == ["discovery cannot be read: numbers are held"]

    world = settled(1)
    before = len(holds(world.state))
    world.set_etcd(False)
    world.run(world.rules.settle_s)
    assert len(holds(world.state)) == before, "nothing is wanted that is held"


def test_who_left_discovery_but_lives_is_given_time_then_killed_and_replaced() -> None:
    world = settled(2)
    lost = world.serving()[0]
    instance = lost.instance_id or 0
    kept = world.registry.pop(instance)
    world.run(world.rules.discover_s - 2)
    assert world.issued(OrderKind.KILL) == []
    assert world.state.replicas[lost.id].state is ReplicaState.RESUMING
    world.registry[instance] = kept
    world.run(1)
    assert world.state.replicas[lost.id].state is ReplicaState.SERVING
    world.registry.pop(instance)
    world.run(world.rules.discover_s + 5)
    assert [order.replica_id for order in world.issued(OrderKind.KILL)] == [lost.id]
    assert len(world.serving()) == len(world.live()) == 2


def test_unknown_discovery_holds_everything_and_then_all_are_replaced() -> None:
    world = settled(3)
    world.set_etcd(False)
    world.run(1)
    for replica in world.serving():
        world.nodes["one"].crash_worker(replica)
    orders = len(world.orders)
    world.run(45)
    assert len(world.orders) == orders
    world.registry.clear()
    world.set_etcd(True)
    world.run(10)
    assert len(world.serving()) == 3
    assert all(order.kind is OrderKind.RESTORE for order in list(world.orders.values())[orders:])


def test_a_snapshot_that_keeps_failing_is_quarantined_and_cold_starts_follow() -> None:
    world = settled(1)
    world.luck.restores_fail = True
    world.decide(2)
    world.run(20)
    assert len(world.issued(OrderKind.RESTORE)) == 2
    assert list(fleet_status(world.state, world.now).quarantined) == ["snapshot-one-0"]
    assert len(world.serving()) == 2
    assert [order.kind for order in world.orders.values() if order.kind is OrderKind.COLD_START][1:]


def test_failures_in_a_row_are_forgotten_when_a_restore_serves() -> None:
    world = settled(1)
    for _ in range(3):
        world.luck.restores_fail = True
        world.decide(2)
        world.run(0.75)
        world.luck.restores_fail = False
        world.run(10)
        world.decide(1)
        world.run(5)
    assert world.state.memory.quarantined == {}


def test_a_corrupt_snapshot_is_not_tried_twice() -> None:
    world = settled(1)
    node = world.nodes["one"]
    world.decide(2)
    node.see(world.wanted["one"])
    for operation in node.operations.values():
        operation.fails = Reason.SNAPSHOT_CORRUPT
    world.run(3)
    assert [entry.reason for entry in world.state.memory.quarantined.values()] == [Reason.SNAPSHOT_CORRUPT]


@pytest.mark.parametrize("reason", [Reason.AGENT_RESTARTED, Reason.PORT_IN_USE, Reason.DISK_FULL, Reason.DISK_FAILED])
def test_what_is_not_the_snapshot_s_fault_does_not_quarantine_it(reason: Reason) -> None:
    world = settled(1)
    node = world.nodes["one"]
    for _ in range(2):
        world.decide(2)
        node.see(world.wanted["one"])
        for operation in node.operations.values():
            operation.fails = reason
        world.run(5)
        world.decide(1)
        world.run(5)
    assert world.state.memory.quarantined == {}


def test_a_node_that_never_answers_does_not_put_its_snapshot_under_quarantine() -> None:
    world = settled(1)
    world.decide(3)
    world.nodes["one"].up = False
    world.run(world.rules.pools["decode"].restore_s + world.rules.outcome_grace_s + 1)
    failed = [replica for replica in world.state.replicas.values() if replica.state is ReplicaState.FAILED]
    assert [replica.reason for replica in failed] == [Reason.DEADLINE_EXCEEDED] * 2
    assert world.state.snapshot_failures == {}
    assert world.state.memory.quarantined == {}


def test_a_restore_that_hangs_in_the_node_is_its_snapshot_s_fault() -> None:
    world = settled(1)
    world.luck.hanging = 1.0
    world.decide(2)
    world.run(world.rules.pools["decode"].restore_s + world.rules.outcome_grace_s + 1)
    assert world.state.snapshot_failures == {"snapshot-one-0": 1}


def test_a_key_whose_captures_keep_failing_is_not_captured_for_ever() -> None:
    world = World(rules(), Luck(captures_fail=True))
    world.run(30)
    for number in (2, 3, 4, 5):
        world.decide(number)
        world.run(20)
    assert len(world.serving()) == 5
    assert len(world.issued(OrderKind.CAPTURE)) == 2


def at_its_capture() -> tuple[World, ReplicaReport, Order, Order]:
    """A first worker for which a capture is ordered: the world, its report, the start order and the capture order."""
    world = World(rules())
    while not world.issued(OrderKind.CAPTURE):
        world.run(0.25)
    start, capture = world.open_orders()
    assert (start.kind, capture.kind) == (OrderKind.COLD_START, OrderKind.CAPTURE)
    return world, world.reports["one"].replicas[0], start, capture


def failed(order: Order, at: float, reason: Reason) -> Outcome:
    return Outcome(order_id=order.id, status=OrderStatus.FAILED, started_at=at, finished_at=at, reason=reason)


def test_a_capture_that_takes_its_worker_along_counts_as_failed_once() -> None:
    world, seen, start, capture = at_its_capture()
    gone = replace(seen, phase=ReplicaPhase.EXITED, exit=Exit(code=-9, at=world.now))
    ended = failed(start, world.now, Reason.WORKER_EXITED), failed(capture, world.now, Reason.CRIU_DUMP_FAILED)
    for outcomes in (ended[:1], ended, ended[::-1]):
        report = replace(world.reports["one"], replicas=(gone,), outcomes=outcomes)
        state, _ = step(world.state, NodeReported(reported=report), world.now)
        assert seen.replica_id not in state.replicas
        assert state.capture_failures == {"key-of-decode": 1}


@pytest.mark.parametrize("reason", [Reason.AGENT_RESTARTED, Reason.DISK_FULL])
def test_a_capture_that_failed_for_what_passes_may_be_tried_again(reason: Reason) -> None:
    world, _, _, capture = at_its_capture()
    report = replace(world.reports["one"], outcomes=(failed(capture, world.now, reason),))
    state, _ = step(world.state, NodeReported(reported=report), world.now)
    assert state.capture_failures == {}
    assert not any(order.kind is OrderKind.CAPTURE for order in state.nodes["one"].orders)


def test_what_fails_while_discovery_is_unknown_is_nobody_s_fault() -> None:
    world = settled(1, luck=Luck(restore_s=2.0))
    world.decide(3)
    world.run(0.5)
    world.set_etcd(False)
    world.luck.restores_fail = True
    for operation in world.nodes["one"].operations.values():
        operation.fails = Reason.WORKER_EXITED
    world.run(5)
    assert world.state.memory.quarantined == {}
    assert world.state.snapshot_failures == {}
    assert world.state.pools["decode"].vacancies == (0, 0)
    world.luck.restores_fail = False
    world.set_etcd(True)
    world.run(5)
    assert len(world.serving()) == 3


def test_what_cannot_start_is_reported_unachievable_and_tried_again_ever_more_rarely() -> None:
    world = settled(2)
    world.luck.restores_fail = world.luck.cold_starts_fail = True
    world.decide(4)
    status = until_unachievable(world)
    assert status.target == 4
    assert status.achievable <= 3
    world.run(5)
    status = pool(world)
    assert status.achievable == 2
    assert status.unachievable_reason == Reason.WORKER_EXITED
    assert len(world.serving()) == 2, "what serves goes on serving"
    world.run(300)
    attempts = [order.issued_at for order in world.orders.values() if order.kind is OrderKind.COLD_START]
    gaps = [later - earlier for earlier, later in zip(attempts[-4:], attempts[-3:], strict=False)]
    assert min(gaps) >= world.rules.block_limit_s
    world.luck.restores_fail = world.luck.cold_starts_fail = False
    world.run(90)
    assert len(world.serving()) == 4
    assert pool(world).unachievable_reason is None
    assert world.state.pools["decode"].block is None


def test_a_limit_is_lifted_for_a_trial_though_nobody_asks_for_more_now() -> None:
    world = settled(2)
    world.luck.restores_fail = world.luck.cold_starts_fail = True
    world.decide(4)
    until_unachievable(world)
    world.run(5)
    world.decide(2)
    world.run(world.rules.block_limit_s)
    assert pool(world).unachievable_reason is None
    world.luck.restores_fail = world.luck.cold_starts_fail = False
    world.decide(4)
    world.run(0.25)
    status = pool(world)
    assert (status.pending, status.achievable) == (1, 3)
    world.run(60)
    assert len(world.serving()) == 4


def test_a_target_lowered_to_what_is_achievable_does_not_hide_the_limit_while_starts_pause() -> None:
    world = settled(2)
    world.luck.restores_fail = world.luck.cold_starts_fail = True
    world.decide(4)
    until_unachievable(world)
    world.run(5)
    world.decide(pool(world).achievable)
    world.run(1)
    assert pool(world).target == pool(world).achievable == 2
    assert pool(world).unachievable_reason == Reason.WORKER_EXITED


def test_retries_are_bounded_and_the_last_is_cold() -> None:
    world = settled(1, rules(quarantine_after=9))
    world.luck.restores_fail = world.luck.cold_starts_fail = True
    world.decide(2)
    world.run(9)
    kinds = [order.kind for order in list(world.orders.values())[2:]]
    assert kinds[:3] == [OrderKind.RESTORE, OrderKind.RESTORE, OrderKind.COLD_START]


def test_a_worker_that_dies_soon_after_each_start_is_not_restarted_for_ever() -> None:
    world = settled(2)
    orders = len(world.orders)
    for _ in range(80):
        for replica in world.serving()[1:]:
            world.nodes["one"].crash_worker(replica)
        world.run(1)
    assert len(world.orders) - orders < 15
    until_unachievable(world)


def test_a_worker_that_a_signal_ended_is_told_as_that_and_not_as_a_status() -> None:
    world = settled(1)
    world.run(15)
    world.nodes["one"].crash_worker(world.serving()[0])
    world.run(1)
    reasons = [record.reason for record in fleet_status(world.state, world.now).decisions]
    assert "worker_exited: ended by signal 9" in reasons


def test_a_full_node_is_named_and_frees_nobody() -> None:
    world = World(replace(rules(), node_capacity=3))
    world.run(15)
    world.decide(5)
    world.run(10)
    assert len(world.serving()) == 3
    status = pool(world)
    assert (status.target, status.achievable, status.unachievable_reason) == (5, 3, Reason.NODE_AT_CAPACITY)


def test_who_drains_still_takes_up_its_node() -> None:
    world = settled(2, replace(rules(), node_capacity=2))
    world.decide(1)
    node = world.nodes["one"]
    node.see(world.wanted["one"])
    for operation in node.operations.values():
        operation.due = world.now + 3  # it finishes what is in flight
    world.decide(2)
    orders = len(world.orders)
    world.run(2)
    assert len(world.orders) == orders
    assert world.state.pools["decode"].waits_for == Reason.NODE_AT_CAPACITY
    world.run(5)
    assert len(world.serving()) == len(world.live()) == 2


def test_a_hung_start_is_killed_at_its_deadline_and_replaced() -> None:
    world = settled(1)
    world.luck.hanging = 1.0
    world.decide(2)
    world.run(1)
    world.luck.hanging = 0.0
    world.run(30)
    assert len(world.serving()) == len(world.live()) == 2


def test_a_silent_node_gets_no_starts_and_keeps_what_it_has() -> None:
    world = settled(2)
    world.nodes["one"].up = False
    world.run(world.rules.node_silent_s + 10)
    orders = len(world.orders)
    world.decide(4)
    world.run(10)
    assert len(world.orders) == orders
    assert pool(world).serving == 2
    world.nodes["one"].up = True
    world.run(10)
    assert len(world.serving()) == 4


def test_a_deadline_is_a_transition_also_when_the_node_says_nothing() -> None:
    world = settled(1)
    world.decide(2)
    world.nodes["one"].up = False
    late = next(replica for replica in world.state.replicas.values() if replica.state is ReplicaState.ORDERED)
    world.run(world.rules.pools["decode"].restore_s + world.rules.outcome_grace_s + 1)
    assert world.state.replicas[late.id].state is ReplicaState.FAILED
    assert world.state.replicas[late.id].reason == Reason.DEADLINE_EXCEEDED
    assert [order.replica_id for order in world.issued(OrderKind.KILL)] == [late.id]


# Down


def test_pending_replicas_go_before_those_that_serve() -> None:
    world = settled(2, luck=Luck(restore_s=5.0))
    served = {replica.id for replica in world.serving()}
    world.decide(5)
    world.run(1)
    world.decide(2)
    world.run(5)
    assert {replica.id for replica in world.serving()} == served
    assert {order.kind for order in world.orders.values() if order.replica_id not in served} == {
        OrderKind.RESTORE,
        OrderKind.CANCEL,
    }


def test_who_has_not_registered_goes_before_an_idle_one_that_serves() -> None:
    world = settled(2)
    served = {replica.id for replica in world.serving()}
    for replica in world.serving():
        world.loads[replica.instance_id or 0] = WorkerLoad(running=0, queued=0, at=world.now)
    world.luck.registers = False
    world.decide(3)
    world.run(3)
    late = next(replica for replica in world.state.replicas.values() if replica.id not in served)
    assert late.state is ReplicaState.RESUMING
    world.decide(2)
    assert world.state.replicas[late.id].state is ReplicaState.DRAINING
    assert {replica.id for replica in world.serving()} == served


def test_idle_goes_before_busy_the_least_loaded_before_the_most_and_unknown_last() -> None:
    world = settled(4)
    a, b, c, d = world.serving()
    for replica, requests in ((a, 5), (b, 0), (c, 2)):
        world.loads[replica.instance_id or 0] = WorkerLoad(running=requests, queued=0, at=world.now)
    world.run(1)
    gone: list[set[str]] = []
    for number in (3, 2, 1):
        world.decide(number)
        world.run(5)
        gone.append({a.id, b.id, c.id, d.id} - {replica.id for replica in world.serving()} - set().union(*gone))
    assert gone == [{b.id}, {c.id}, {a.id}]


def test_a_stale_load_is_unknown() -> None:
    world = settled(2)
    busy, quiet = world.serving()
    old = WorkerLoad(running=0, queued=0, at=world.now - 60)
    state = replace(
        world.state,
        loads={
            quiet.instance_id or 0: old,
            busy.instance_id or 0: WorkerLoad(running=3, queued=0, at=world.now),
        },
    )
    state, _ = step(state, Decided(decision=Decision(revision=1, id=50, decode=1)), world.now)
    assert state.replicas[busy.id].state is ReplicaState.DRAINING


def test_a_worker_that_drains_by_itself_is_replaced_and_not_killed() -> None:
    world = settled(2)
    node = world.nodes["one"]
    leaver = world.serving()[0]
    leaver.phase = ReplicaPhase.DRAINING
    leaver.stop_at = world.now + 3
    node.dirty = True
    world.run(2)
    assert world.state.replicas[leaver.id].state is ReplicaState.DRAINING
    assert len(world.serving()) == 3
    world.run(5)
    assert len(world.serving()) == len(world.live()) == 2
    assert world.issued(OrderKind.KILL) == []


def test_a_drain_that_takes_too_long_ends_in_a_kill() -> None:
    world = settled(2)
    world.decide(1)
    node = world.nodes["one"]
    node.see(world.wanted["one"])
    for operation in node.operations.values():
        operation.due = float("inf")
    world.run(30)
    assert len(world.issued(OrderKind.KILL)) == 1
    assert len(world.live()) == 1


def test_a_kill_that_is_never_answered_is_repeated_without_the_state_growing() -> None:
    world = settled(2)
    world.decide(1)
    world.nodes["one"].up = False
    world.run(120)
    stuck = next(replica for replica in world.state.replicas.values() if replica.state is ReplicaState.FAILED)
    assert len(world.issued(OrderKind.KILL)) > 2
    assert stuck.stops_tried == (OrderKind.DRAIN, OrderKind.KILL)


# Over restarts


def test_a_new_controller_knows_targets_quarantines_and_times() -> None:
    world = settled(3)
    world.memory = replace(
        world.memory, quarantined={"snapshot-one-0": Quarantine(compatibility_key="key-of-decode", reason="x")}
    )
    times = world.memory.start_times
    world.start_controller()
    world.run(1)
    assert pool(world).target == 3
    assert world.state.memory.start_times == times
    world.decide(4)
    world.run(1)
    assert len(world.issued(OrderKind.RESTORE)) == 2, "a quarantine outlives the controller"


def test_without_a_remembered_target_what_lives_holds_it_up() -> None:
    world = settled(3)
    world.memory = Memory()
    world.decisions = 0
    world.start_controller()
    world.run(60)
    assert len(world.serving()) == 3
    assert pool(world).target == 3


def test_a_new_controller_drains_nothing_until_its_decision_came_or_some_time_passed() -> None:
    world = settled(3)
    world.memory = replace(world.memory, targets={"decode": 1})  # the last target was not remembered in time
    world.start_controller()
    world.run(world.rules.settle_s - 1)
    assert len(world.serving()) == 3
    world.run(10)
    assert len(world.serving()) == 1


def test_orders_in_flight_keep_their_ids_and_get_the_new_fence() -> None:
    world = settled(1, luck=Luck(restore_s=5.0))
    world.decide(3)
    world.run(1)
    before = {order.id for order in world.open_orders()}
    assert len(before) == 2
    world.start_controller()
    assert {order.id for order in world.open_orders()} == before
    assert {order.fence for order in world.open_orders()} == {world.fence}
    world.run(15)
    assert len(world.serving()) == 3
    assert len(world.issued(OrderKind.RESTORE)) == 2


def test_an_order_that_no_node_has_seen_yet_counts_for_the_next_controller() -> None:
    world = settled(1)
    world.decide(3)  # written into the wanted list; the node has not looked yet
    state, _ = step(
        initial(world.rules), Started(fence=9, memory=world.memory, wanted=(world.wanted["one"],)), world.now
    )
    state, _ = step(state, DiscoverySeen(instances=tuple(world.registry.values())), world.now)
    state, commands = step(state, NodeReported(reported=world.reports["one"]), world.now)
    orders = [order for c in commands if isinstance(c, SetWanted) for order in c.wanted.orders]
    assert orders == []
    assert len(state.nodes["one"].orders) == 2


def test_a_replica_of_a_pool_that_is_gone_is_drained() -> None:
    world = settled(2)
    renamed = replace(world.rules, pools={"other": replace(world.rules.pools["decode"], role="prefill")})
    state, _ = step(initial(renamed), Started(fence=9), world.now)
    state, _ = step(state, DiscoverySeen(instances=tuple(world.registry.values())), world.now)
    report = replace(world.nodes["one"].report(), compatibility_keys={"other": "key"})
    state, commands = step(state, NodeReported(reported=report), world.now)
    orders = [order for c in commands if isinstance(c, SetWanted) for order in c.wanted.orders]
    drained = {order.replica_id for order in orders if order.kind is OrderKind.DRAIN}
    assert drained == {replica.id for replica in world.live()}


def test_a_node_that_obeys_a_higher_fence_makes_it_resign_and_act_no_more() -> None:
    world = settled(1)
    report = Reported(node="one", sequence=99, fence=world.fence + 1, at=world.now)
    state, commands = step(world.state, NodeReported(reported=report), world.now)
    assert commands[0] == Resign(fence=world.fence + 1)
    assert not any(isinstance(command, SetWanted) for command in commands)
    assert step(state, Decided(decision=Decision(revision=1, id=77, decode=5)), world.now) == (state, ())


def test_a_node_that_still_obeys_the_last_controller_is_told_again() -> None:
    world = settled(1)
    world.decide(2)  # written, and overwritten by a predecessor that did not know yet that it was one
    open_orders = world.state.nodes["one"].orders
    report = replace(world.reports["one"], fence=world.fence - 1, at=world.now)
    _, commands = step(world.state, NodeReported(reported=report), world.now)
    lists = [command.wanted for command in commands if isinstance(command, SetWanted)]
    assert [(wanted.fence, wanted.orders) for wanted in lists] == [(world.fence, open_orders)]
    _, commands = step(world.state, NodeReported(reported=replace(report, fence=world.fence)), world.now)
    assert not any(isinstance(command, SetWanted) for command in commands)


def test_a_port_that_is_used_again_is_not_mistaken() -> None:
    world = settled(1)
    node = world.nodes["one"]
    dead = world.serving()[0]
    world.set_etcd(False)
    world.run(1)
    node.crash_worker(dead)
    node.next_port = dead.port - 1  # its successor gets the same port, its registration is still there
    world.run(1)
    world.set_etcd(True)
    world.luck.registers = False
    world.run(2)
    successor = next(replica for replica in world.live() if replica.id != dead.id)
    assert successor.port == dead.port
    assert world.state.replicas[successor.id].state is not ReplicaState.SERVING
    world.luck.registers = True
    world.run(5)
    assert [replica.id for replica in world.serving()] == [successor.id]


def test_a_registration_that_outlived_its_process_is_nobody_else_s_after_a_restart_either() -> None:
    world = settled(1)
    dead = world.serving()[0]
    world.nodes["one"].crash_worker(dead)
    stale = world.nodes["one"].report()
    exited = next(seen for seen in stale.replicas if seen.replica_id == dead.id)
    successor = replace(exited, replica_id="decode-8-8", incarnation="x", phase=ReplicaPhase.RESUMING, exit=None)
    report = replace(stale, replicas=(exited, successor), outcomes=())
    instances = DiscoverySeen(instances=(instance_of(dead.instance_id or 0, dead.port),))
    state, _ = step(initial(world.rules), Started(fence=9), world.now)
    state, _ = step(state, NodeReported(reported=report), world.now)
    state, _ = step(state, instances, world.now)
    assert state.replicas[successor.replica_id].state is ReplicaState.RESUMING
    registered = replace(report, replicas=(exited, replace(successor, phase=ReplicaPhase.REGISTERED)))
    state, _ = step(state, NodeReported(reported=registered), world.now)
    assert state.replicas[successor.replica_id].state is ReplicaState.SERVING


def test_an_instance_stays_its_first_owner_s_when_the_report_has_forgotten_it() -> None:
    world = settled(1)
    dead = world.serving()[0]
    report = world.reports["one"]
    successor = replace(report.replicas[0], replica_id="decode-8-8", incarnation="x", phase=ReplicaPhase.REGISTERED)
    state, _ = step(world.state, NodeReported(reported=replace(report, replicas=(successor,))), world.now)
    assert dead.port == successor.rpc_port
    assert state.replicas[successor.replica_id].state is not ReplicaState.SERVING


def test_a_failed_start_whose_replica_lives_is_killed_before_it_is_forgotten() -> None:
    world = settled(1)
    world.decide(2)
    order = next(order for order in world.open_orders() if order.kind is OrderKind.RESTORE)
    report = world.reports["one"]
    half = replace(report.replicas[0], replica_id=order.replica_id, phase=ReplicaPhase.RESTORING, rpc_port=29999)
    outcome = Outcome(
        order_id=order.id,
        status=OrderStatus.FAILED,
        started_at=world.now,
        finished_at=world.now,
        reason=Reason.PHASE_TIMED_OUT,
    )
    event = NodeReported(reported=replace(report, replicas=(*report.replicas, half), outcomes=(outcome,)))
    state, commands = step(world.state, event, world.now)
    assert state.replicas[half.replica_id].state is ReplicaState.FAILED
    kills = [o for c in commands if isinstance(c, SetWanted) for o in c.wanted.orders if o.kind is OrderKind.KILL]
    assert [kill.replica_id for kill in kills] == [half.replica_id]


def test_what_a_decision_changes_is_remembered() -> None:
    world = settled(1)
    _, commands = step(world.state, Decided(decision=Decision(revision=5, id=6, decode=3)), world.now)
    memories = [command.memory for command in commands if isinstance(command, Remember)]
    assert [(memory.targets, memory.decision) for memory in memories] == [({"decode": 3}, (5, 6))]
    assert commands.index(Remember(memory=memories[0])) < next(
        index for index, command in enumerate(commands) if isinstance(command, CompleteDecision)
    ), "first remembered, then acknowledged"


def instance_of(instance_id: int, port: int) -> Instance:
    return Instance(
        instance_id=instance_id,
        namespace="dynamo",
        component="backend",
        endpoint="generate",
        host="host-one",
        port=port,
    )


def test_a_new_controller_lets_nothing_expire_before_it_has_heard_the_node() -> None:
    world = settled(1)
    world.decide(2)
    late = world.now + world.rules.pools["decode"].restore_s + world.rules.outcome_grace_s + 1
    state, _ = step(initial(world.rules), Started(fence=9, memory=world.memory, wanted=(world.wanted["one"],)), late)
    state, _ = step(state, Ticked(), late + 1)
    assert [replica.state for replica in state.replicas.values()] == [ReplicaState.ORDERED]
    state, _ = step(state, Ticked(), late + world.rules.settle_s)
    assert [replica.state for replica in state.replicas.values()] == [ReplicaState.FAILED]


def test_a_new_controller_orders_nothing_before_every_known_node_was_heard() -> None:
    world = settled(1)
    other = Wanted(node="two", fence=1, sequence=1)
    legacy = Started(fence=9, memory=replace(world.memory, targets={"decode": 3}), wanted=(world.wanted["one"], other))
    state, _ = step(initial(world.rules), legacy, world.now)
    state, _ = step(state, DiscoverySeen(instances=tuple(world.registry.values())), world.now)
    state, _ = step(state, NodeReported(reported=world.reports["one"]), world.now)
    assert state.nodes["one"].orders == ()
    report = replace(world.reports["one"], at=world.now + world.rules.settle_s)
    state, _ = step(state, NodeReported(reported=report), world.now + world.rules.settle_s)
    assert len(state.nodes["one"].orders) == 2


def test_who_waits_for_discovery_is_not_late_while_it_is_unknown() -> None:
    world = settled(2)
    lost = world.serving()[0]
    kept = world.registry.pop(lost.instance_id or 0)
    world.run(1)
    world.set_etcd(False)
    world.run(world.rules.discover_s * 2)
    assert world.state.replicas[lost.id].state is ReplicaState.RESUMING
    world.set_etcd(True)
    world.run(world.rules.discover_s - 2)
    assert world.state.replicas[lost.id].state is ReplicaState.RESUMING, "it has its time again"
    world.registry[kept.instance_id] = kept
    world.run(1)
    assert world.state.replicas[lost.id].state is ReplicaState.SERVING
    assert world.issued(OrderKind.KILL) == []


def test_who_serves_counts_though_its_node_does_not_know_it_and_who_does_not_is_replaced() -> None:
    world = settled(2)
    first, second = world.live()
    report = replace(world.reports["one"], replicas=())
    state, _ = step(world.state, NodeReported(reported=report), world.now)
    assert {replica.state for replica in state.replicas.values()} == {ReplicaState.SERVING}
    left = DiscoverySeen(instances=(world.registry[first.instance_id or 0],))
    state, _ = step(state, left, world.now)
    state, commands = step(state, NodeReported(reported=report), world.now)
    assert second.id not in state.replicas
    assert state.memory.quarantined == {}
    orders = [order for c in commands if isinstance(c, SetWanted) for order in c.wanted.orders]
    assert [order.kind for order in orders] == [OrderKind.RESTORE]


def test_a_drain_that_failed_ends_in_a_kill_at_once() -> None:
    world = settled(2)
    world.decide(1)
    order = next(order for order in world.open_orders() if order.kind is OrderKind.DRAIN)
    outcome = Outcome(
        order_id=order.id,
        status=OrderStatus.FAILED,
        started_at=world.now,
        finished_at=world.now,
        reason=Reason.HOLDER_FAILED,
    )
    event = NodeReported(reported=replace(world.reports["one"], outcomes=(outcome,)))
    _, commands = step(world.state, event, world.now)
    kills = [o for c in commands if isinstance(c, SetWanted) for o in c.wanted.orders if o.kind is OrderKind.KILL]
    assert [kill.replica_id for kill in kills] == [order.replica_id]


def test_what_no_node_has_seen_goes_before_what_serves() -> None:
    world = settled(2)
    world.nodes["one"].up = False
    world.decide(3)
    ordered = next(r.id for r in world.state.replicas.values() if r.state is ReplicaState.ORDERED)
    world.decide(2)
    assert [order.replica_id for order in world.issued(OrderKind.CANCEL)] == [ordered]
    assert world.issued(OrderKind.DRAIN) == []


def test_a_cancellation_that_found_nothing_leaves_the_start_until_its_own_outcome() -> None:
    world = settled(1)
    world.decide(2)
    start = next(order for order in world.open_orders() if order.kind is OrderKind.RESTORE)
    world.decide(1)
    cancel = next(order for order in world.open_orders() if order.kind is OrderKind.CANCEL)
    done = Outcome(order_id=cancel.id, status=OrderStatus.DONE, started_at=world.now, finished_at=world.now)
    report = replace(world.reports["one"], outcomes=(done,))
    state, _ = step(world.state, NodeReported(reported=report), world.now)
    assert [order.id for order in state.nodes["one"].orders] == [start.id], "the node may be about to carry it out"
    report = replace(report, outcomes=(replace(done, order_id=start.id, status=OrderStatus.CANCELLED),))
    state, _ = step(state, NodeReported(reported=report), world.now)
    assert state.nodes["one"].orders == ()
    assert start.replica_id not in state.replicas


def test_who_was_ready_before_its_cancellation_is_drained() -> None:
    world = settled(1)
    world.decide(2)
    start = next(order for order in world.open_orders() if order.kind is OrderKind.RESTORE)
    world.decide(1)
    cancel = next(order for order in world.open_orders() if order.kind is OrderKind.CANCEL)
    report = world.reports["one"]
    ready = replace(report.replicas[0], replica_id=start.replica_id, phase=ReplicaPhase.REGISTERED, rpc_port=29999)
    done = Outcome(order_id=start.id, status=OrderStatus.DONE, started_at=world.now, finished_at=world.now)
    late = replace(done, order_id=cancel.id, status=OrderStatus.FAILED, reason=Reason.CANCELLED)
    event = NodeReported(reported=replace(report, replicas=(*report.replicas, ready), outcomes=(done, late)))
    state, commands = step(world.state, event, world.now)
    orders = [order for c in commands if isinstance(c, SetWanted) for order in c.wanted.orders]
    assert [(order.kind, order.replica_id) for order in orders] == [(OrderKind.DRAIN, start.replica_id)]
    assert state.replicas[start.replica_id].state is ReplicaState.DRAINING


def test_who_took_its_endpoint_out_serves_no_more_though_other_endpoints_of_it_are_left() -> None:
    world = settled(1)
    registration = next(iter(world.registry.values()))
    other = replace(registration, endpoint="clear_kv_blocks")
    state, _ = step(world.state, DiscoverySeen(instances=(other, registration)), world.now)
    assert [replica.state for replica in state.replicas.values()] == [ReplicaState.SERVING]
    state, _ = step(state, DiscoverySeen(instances=(other,)), world.now)
    assert [replica.state for replica in state.replicas.values()] == [ReplicaState.RESUMING]
    state, _ = step(state, DiscoverySeen(instances=(other, registration)), world.now)
    assert [replica.state for replica in state.replicas.values()] == [ReplicaState.SERVING]


def test_an_address_that_two_nodes_tell_is_nobody_s() -> None:
    world = settled(1)
    twin = replace(world.reports["one"], node="two")
    seen = replace(twin.replicas[0], replica_id="decode-8-8")
    state, _ = step(initial(world.rules), Started(fence=9), world.now)
    for report in (world.reports["one"], replace(twin, replicas=(seen,))):
        state, _ = step(state, NodeReported(reported=report), world.now)
    state, _ = step(state, DiscoverySeen(instances=tuple(world.registry.values())), world.now)
    assert state.bindings == {}
    assert not any(replica.state is ReplicaState.SERVING for replica in state.replicas.values())
