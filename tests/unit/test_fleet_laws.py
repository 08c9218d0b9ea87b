"""The fleet's laws under random misfortune: every step is checked, and a world that heals converges."""

from __future__ import annotations

import random

import pytest
from fleet_world import World, rules
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule
from msgspec.structs import replace
from simulated_node import Luck

from dynamo_snapshot.model import Reason, WorkerLoad


class Misfortune(RuleBasedStateMachine):
    """The world draws its luck; :class:`fleet_world.World` checks the laws at every step."""

    world: World

    @initialize(
        dice=st.randoms(use_true_random=False),
        failing=st.sampled_from([0.0, 0.2, 0.7, 1.0]),
        hanging=st.sampled_from([0.0, 0.2, 0.5]),
        quiet=st.sampled_from([0.0, 0.5]),
        nodes=st.sampled_from([("one",), ("one", "two")]),
        capacity=st.sampled_from([3, 10]),
        maximum=st.sampled_from([3, 6]),
        parked=st.sampled_from([0, 0, 1, 2]),
        settled=st.booleans(),
    )
    def begin(
        self,
        dice: random.Random,
        failing: float,
        hanging: float,
        quiet: float,
        nodes: tuple[str, ...],
        capacity: int,
        maximum: int,
        parked: int,
        settled: bool,
    ) -> None:
        fleet = replace(rules(max_replicas=maximum, parked=parked), node_capacity=capacity)
        luck = Luck(dice=dice, failing=failing, hanging=hanging, unreported_phases=quiet)
        self.world = World(fleet, Luck(dice=dice) if settled else luck, nodes)
        if settled:  # misfortune finds a fleet that has a snapshot, and what it parks
            self.world.run(20)
            self.world.luck = luck

    @rule(number=st.one_of(st.none(), st.integers(-1, 8)))
    def planner_decides(self, number: int | None) -> None:
        self.world.decide(number)

    @rule(parked=st.one_of(st.none(), st.integers(-1, 4)), prefetch=st.booleans(), lasts_s=st.sampled_from([0.5, 40.0]))
    def planner_hints(self, parked: int | None, prefetch: bool, lasts_s: float) -> None:
        self.world.hint(parked, prefetch=prefetch, lasts_s=lasts_s)

    @rule(seconds=st.sampled_from([0.25, 1.0, 5.0, 20.0]))
    def time_passes(self, seconds: float) -> None:
        self.world.run(seconds)

    @rule()
    def controller_is_killed(self) -> None:
        self.world.start_controller()

    @rule(commands=st.integers(0, 3))
    def controller_will_die_between_commands(self, commands: int) -> None:
        self.world.crash_after = commands

    @rule(pick=st.integers(0, 7))
    def worker_crashes(self, pick: int) -> None:
        live = [(node, r) for node in self.world.nodes.values() for r in node.replicas.values() if r.live]
        if live:
            node, replica = live[pick % len(live)]
            node.crash_worker(replica)

    @rule(pick=st.integers(0, 7))
    def worker_loses_its_lease(self, pick: int) -> None:
        serving = self.world.serving()
        if serving:
            self.world.registry.pop(serving[pick % len(serving)].instance_id or 0, None)

    @rule()
    def agent_restarts(self) -> None:
        self.world.nodes["one"].restart()

    @rule(up=st.booleans())
    def agent_is_down_or_up(self, up: bool) -> None:
        self.world.nodes["one"].up = up

    @rule(up=st.booleans())
    def etcd_is_down_or_up(self, up: bool) -> None:
        self.world.set_etcd(up)

    @rule()
    def leases_expire_in_an_outage(self) -> None:
        if not self.world.etcd_up:
            self.world.registry.clear()
            for replica in self.world.live():
                for node in self.world.nodes.values():
                    if replica.id in node.replicas and replica.instance_id is not None:
                        node.crash_worker(replica)

    @rule(pick=st.integers(0, 7), requests=st.integers(0, 5))
    def load_is_measured(self, pick: int, requests: int) -> None:
        serving = self.world.serving()
        if serving:
            instance = serving[pick % len(serving)].instance_id or 0
            self.world.loads[instance] = WorkerLoad(running=requests, queued=0, at=self.world.now)

    @precondition(lambda self: self.world.etcd_up)
    @rule(fails=st.booleans())
    def restores_fail_or_not(self, fails: bool) -> None:
        self.world.luck.restores_fail = fails

    @rule(fail=st.booleans(), refused=st.booleans())
    def wakes_fail_or_not(self, fail: bool, refused: bool) -> None:
        self.world.luck.wakes_fail, self.world.luck.wakes_refused = fail, refused

    @rule(pick=st.integers(0, 7))
    def a_snapshot_is_found_corrupt(self, pick: int) -> None:
        kept = [(node, at) for node in self.world.nodes.values() for at in range(len(node.snapshots))]
        if kept:
            node, at = kept[pick % len(kept)]
            node.snapshots[at] = replace(node.snapshots[at], admitted=False, reason=Reason.SNAPSHOT_CORRUPT.value)
            node.dirty = True

    def teardown(self) -> None:
        if not hasattr(self, "world"):
            return
        world = self.world
        world.heal()
        if world.unacknowledged is not None:
            world.start_controller()
        world.run(300)
        target = world.state.pools["decode"].target
        room = len(world.nodes) * world.rules.node_capacity
        serving, parked = world.serving(), world.parked()
        assert len(serving) == len(world.live()) - len(parked) == min(target, room)
        wanted = world.rules.pools["decode"].parked
        assert len(parked) <= wanted
        for node in world.nodes.values() if len(parked) < wanted else ():
            live = sum(replica.live for replica in node.replicas.values())
            usable = {snapshot.id for snapshot in node.snapshots if snapshot.reason is None}
            unusable = set(world.state.memory.quarantined) >= usable
            assert live == world.rules.node_capacity or unusable, "one more could be parked there"
        good = {snapshot.id for node in world.nodes.values() for snapshot in node.snapshots if snapshot.reason is None}
        for replica in world.state.replicas.values():
            assert replica.snapshot_id in good or not replica.spare, "what is parked can be woken"
        assert world.open_orders() == [], "orders stay in the list after their outcome"
        assert world.unacknowledged is None, "a decision was never acknowledged"
        assert set(world.registry) == {replica.instance_id for replica in serving}


TestMisfortune = Misfortune.TestCase
TestMisfortune.settings = settings(
    max_examples=120, stateful_step_count=25, deadline=None, suppress_health_check=list(HealthCheck)
)
pytestmark = pytest.mark.timeout(600)
