"""A simulated world around the fleet core, in virtual time: nodes, discovery and a planner that misbehave.

:class:`World` checks the laws from outside after every step: by the orders it saw and by what really
runs, not by what the core believes.
"""

from __future__ import annotations

from msgspec.structs import replace
from simulated_node import MAKES, STARTS, STOPS, Luck, Running, SimulatedNode

from dynamo_snapshot.fleet.core import initial, step
from dynamo_snapshot.fleet.core.lifecycle import WANTED
from dynamo_snapshot.fleet.core.messages import (
    Command,
    CompleteDecision,
    Decided,
    DiscoverySeen,
    Event,
    Hinted,
    LoadsSeen,
    Memory,
    NodeReported,
    Remember,
    RevokeLease,
    SetWanted,
    Started,
    Ticked,
)
from dynamo_snapshot.fleet.core.rules import PoolRules, Rules
from dynamo_snapshot.fleet.core.spares import parked_target
from dynamo_snapshot.fleet.core.state import State
from dynamo_snapshot.model import (
    Decision,
    Instance,
    Order,
    OrderKind,
    OrderStatus,
    PoolHint,
    ReplicaPhase,
    ReplicaState,
    Reported,
    ScalingHint,
    Wanted,
    Way,
    WorkerLoad,
    WorkerSpec,
)

SLICE_S = 0.25
LEASE_TTL_S = 10.0
HEARTBEAT_S = 5.0
BEFORE_WAKE = (ReplicaPhase.RESTORING, ReplicaPhase.PARKED)


def rules(**pool_changes: object) -> Rules:
    """A fleet of one pool whose deadlines suit virtual time; ``pool_changes`` are fields of :class:`PoolRules`."""
    pool = PoolRules(
        role="decode",
        component="backend",
        endpoint="generate",
        worker=WorkerSpec(command=("engine",)),
        cold_start_s=30.0,
        restore_s=10.0,
        wake_s=5.0,
        prefetch_s=5.0,
        capture_s=10.0,
        drain_s=10.0,
        kill_s=3.0,
    )
    return Rules(
        fleet="fleet",
        namespace="dynamo",
        pools={"decode": replace(pool, **pool_changes)},
        node_capacity=10,
        block_s=10.0,
        block_limit_s=40.0,
        cold_start_prior_s=8.0,
        restore_prior_s=1.0,
        capture_prior_s=1.0,
    )


class World:
    """One fleet, its controller, its nodes and its discovery."""

    def __init__(self, fleet_rules: Rules, luck: Luck | None = None, nodes: tuple[str, ...] = ("one",)) -> None:
        self.rules = fleet_rules
        self.luck = luck or Luck()
        self.now = 1000.0
        self.keys = {pool: f"key-of-{pool}" for pool in fleet_rules.pools}
        self.etcd_up = True
        self.registry: dict[int, Instance] = {}
        self.next_instance = 1
        self.loads: dict[int, WorkerLoad] = {}
        self.nodes = {name: SimulatedNode(name, self) for name in nodes}
        self.wanted: dict[str, Wanted] = {}
        self.memory = Memory()
        self.fence = 0
        self.unacknowledged: Decision | None = None
        self.completed: list[Decision] = []
        self.revoked: list[int] = []
        self.orders: dict[str, Order] = {}
        self.decisions = 0
        self.crash_after: int | None = None
        """The controller dies after this many more commands."""
        self.reports: dict[str, Reported] = {}
        self.told_discovery = False
        self.view_sent: tuple[Instance, ...] | None = None
        self.state = initial(fleet_rules)
        self.start_controller()

    # The controller

    def start_controller(self) -> None:
        self.fence += 1
        self.state = initial(self.rules)
        self.told_discovery = False
        self.feed(Started(fence=self.fence, memory=self.memory, wanted=tuple(self.wanted.values())))
        for report in list(self.reports.values()):
            self.feed(NodeReported(reported=report))
        if self.luck.dice.random() < 0.5:
            self._tell_discovery()
        if self.unacknowledged is not None:
            self.feed(Decided(decision=self.unacknowledged))

    def feed(self, event: Event) -> None:
        before = self.state
        self.state, commands = step(before, event, self.now)
        self._check_step(before, event, commands)
        for command in commands:
            if self.crash_after is not None:
                if self.crash_after == 0:
                    self.crash_after = None
                    self.start_controller()
                    return
                self.crash_after -= 1
            self._carry_out(command)

    def _carry_out(self, command: Command) -> None:
        match command:
            case SetWanted(wanted=wanted):
                self.wanted[wanted.node] = wanted
                for order in wanted.orders:
                    self.orders.setdefault(order.id, order)
            case Remember(memory=memory):
                self.memory = memory
            case CompleteDecision(decision=decision):
                self.completed.append(decision)
                if decision == self.unacknowledged:
                    self.unacknowledged = None
            case RevokeLease(instance_id=instance_id):
                self._check_revocation(instance_id)
                if self.etcd_up:
                    self.revoked.append(instance_id)
                    self.registry.pop(instance_id, None)

    # The world around it

    def decide(self, decode: int | None) -> None:
        decision = Decision(revision=1, id=self.decisions, decode=decode)
        self.decisions += 1
        self.unacknowledged = decision
        self.feed(Decided(decision=decision))

    def hint(self, parked: int | None, *, prefetch: bool = False, lasts_s: float = 30.0) -> None:
        pool = PoolHint(parked=parked, prefetch=prefetch)
        self.feed(Hinted(hint=ScalingHint(at=self.now, expires_at=self.now + lasts_s, decode=pool)))

    def set_etcd(self, up: bool) -> None:
        self.etcd_up = up

    def register(self, replica: Running, host: str) -> None:
        replica.instance_id = self.next_instance
        self.registry[self.next_instance] = Instance(
            instance_id=self.next_instance,
            namespace="dynamo",
            component="backend",
            endpoint="generate",
            host=host,
            port=replica.port,
        )
        self.next_instance += 1

    def unregister(self, replica: Running) -> None:
        if replica.instance_id is not None and self.etcd_up:
            self.registry.pop(replica.instance_id, None)

    def run(self, seconds: float) -> None:
        """Lets virtual time pass."""
        end = self.now + seconds
        while self.now < end:
            self.now += SLICE_S
            for node in self.nodes.values():
                if node.up:
                    if node.name in self.wanted:
                        node.see(self.wanted[node.name])
                    node.work()
                    node.dirty |= self.now - node.reported_at >= HEARTBEAT_S
                    if node.dirty and self.luck.dice.random() >= self.luck.unreported_phases:
                        self.reports[node.name] = node.report()
                        self.feed(NodeReported(reported=self.reports[node.name]))
            if self.etcd_up:
                self._expire_leases()
            self._tell_discovery()
            self.feed(LoadsSeen(loads={i: replace(load, at=self.now) for i, load in self.loads.items()}))
            self.feed(Ticked())

    def _tell_discovery(self) -> None:
        view = tuple(self.registry.values()) if self.etcd_up else None
        if not self.told_discovery or view != self.view_sent:
            self.told_discovery, self.view_sent = True, view
            self.feed(DiscoverySeen(instances=view))

    def _expire_leases(self) -> None:
        owners = {r.instance_id: r for node in self.nodes.values() for r in node.replicas.values()}
        for instance in list(self.registry):
            owner = owners.get(instance)
            if owner is None or (owner.exit is not None and self.now > owner.exit.at + LEASE_TTL_S):
                del self.registry[instance]

    def heal(self) -> None:
        """From now on everything works."""
        self.luck = Luck()
        self.etcd_up = True
        for node in self.nodes.values():
            node.up = True
            for operation in node.operations.values():
                operation.due, operation.fails = min(operation.due, self.now), operation.fails

    # What is so

    def live(self, pool: str = "decode") -> list[Running]:
        return [r for node in self.nodes.values() for r in node.replicas.values() if r.live and r.pool == pool]

    def serving(self, pool: str = "decode") -> list[Running]:
        return [replica for replica in self.live(pool) if replica.instance_id in self.registry]

    def parked(self, pool: str = "decode") -> list[Running]:
        return [replica for replica in self.live(pool) if replica.phase is ReplicaPhase.PARKED]

    def open_orders(self) -> list[Order]:
        return [order for wanted in self.wanted.values() for order in wanted.orders]

    def issued(self, kind: OrderKind) -> list[Order]:
        return [order for order in self.orders.values() if order.kind is kind]

    # The laws, checked after every step

    def _check_step(self, before: State, event: Event, commands: tuple[Command, ...]) -> None:
        fresh = [
            order
            for command in commands
            if isinstance(command, SetWanted)
            for order in command.wanted.orders
            if order.id not in self.orders
        ]
        wanted = {command.wanted.node: command.wanted for command in commands if isinstance(command, SetWanted)}
        lists = {**self.wanted, **wanted}
        self._check_ids(fresh)
        self._check_orders_stay(wanted)
        self._check_numbers(fresh, lists)
        self._check_unknown(before, event, fresh)
        self._check_withdrawals(before)
        for name, pool in self.state.pools.items():
            limits = self.rules.pools[name]
            assert limits.min_replicas <= pool.target <= limits.max_replicas
        for order in fresh:
            if order.kind in (OrderKind.RESTORE, OrderKind.PARK, OrderKind.PREFETCH):
                assert order.snapshot_id not in self.state.memory.quarantined, "a quarantined snapshot is used"
        for replica in self.state.replicas.values():
            if replica.state is ReplicaState.SERVING:
                shown = {instance.instance_id for instance in self.state.instances}
                assert replica.instance_id in shown, "serving is what discovery says"

    def _check_orders_stay(self, lists: dict[str, Wanted]) -> None:
        """An order that makes a replica stands in the list until its node has said what became of either."""
        for node, wanted in lists.items():
            before = self.wanted[node].orders if node in self.wanted else ()
            left = [o for o in before if o.kind in STARTS and o.id not in {order.id for order in wanted.orders}]
            report = self.reports.get(node)
            ended = {outcome.order_id for outcome in report.outcomes} if report else set()
            exited = (
                {seen.replica_id for seen in report.replicas if seen.phase is ReplicaPhase.EXITED} if report else set()
            )
            killed = {o.replica_id for o in self.orders.values() if o.kind is OrderKind.KILL and o.id in ended}
            for order in left:
                assert order.id in ended or order.replica_id in exited | killed, f"order {order.id} was dropped"

    def _check_ids(self, fresh: list[Order]) -> None:
        ids = [order.id for order in fresh]
        assert len(ids) == len(set(ids)), "an id is used twice"
        replicas = [order.replica_id for order in fresh if order.kind in MAKES]
        known = {order.replica_id for order in self.orders.values() if order.kind in MAKES}
        assert len(replicas) == len(set(replicas)), "a replica is ordered twice"
        assert not known & set(replicas), "a replica is ordered twice"
        assert all(order.fence == self.fence for order in fresh)
        parked = {
            seen.replica_id
            for report in self.reports.values()
            for seen in report.replicas
            if seen.phase is ReplicaPhase.PARKED
        }
        woken = [order.replica_id for order in fresh if order.kind is OrderKind.WAKE]
        assert set(woken) <= parked, "somebody is woken who is not parked"
        assert len(woken) == len(set(woken)), "a replica is woken twice"

    def _check_numbers(self, fresh: list[Order], lists: dict[str, Wanted]) -> None:
        """Never a double order; budgets hold, orders in flight included."""
        open_orders = {order.id: order for wanted in lists.values() for order in wanted.orders}
        ever = {**self.orders, **open_orders}
        stopped = {order.replica_id for order in ever.values() if order.kind in STOPS}
        for pool in self.rules.pools:
            starts = {o.replica_id for o in open_orders.values() if o.kind in STARTS and o.pool == pool}
            parks = {o.replica_id for o in ever.values() if o.kind is OrderKind.PARK and o.pool == pool}
            wakes = {o.replica_id for o in open_orders.values() if o.kind is OrderKind.WAKE}
            committed = set(starts)
            parked = set()
            for report in self.reports.values():
                committed |= {
                    seen.replica_id
                    for seen in report.replicas
                    if seen.phase not in (ReplicaPhase.EXITED, ReplicaPhase.DRAINING) and seen.pool == pool
                }
                parked |= {seen.replica_id for seen in report.replicas if seen.phase in BEFORE_WAKE}
            failed = {
                self.orders[outcome.order_id].replica_id
                for report in self.reports.values()
                for outcome in report.outcomes
                if outcome.status is not OrderStatus.DONE and outcome.order_id in self.orders
            }
            # Who was made to be parked, and is on the way there or there, counts apart until it is woken.
            spare = (committed & parks & (parked | starts)) - wakes
            committed -= stopped | failed | spare
            spare -= stopped | failed
            if any(order.kind is OrderKind.PARK and order.pool == pool for order in fresh):
                wanted = parked_target(self.state, pool, self.now)
                assert len(spare) <= wanted, f"{len(spare)} are parked or on their way there for {wanted}"
            if any(order.kind in STARTS and order.kind is not OrderKind.PARK and order.pool == pool for order in fresh):
                target = self.state.pools[pool].target
                assert len(committed) <= target, f"{len(committed)} are on their way or there for target {target}"
        for node in self.nodes.values():
            really = {replica.id for replica in node.replicas.values() if replica.live}
            ordered = {
                order.replica_id
                for order in (lists[node.name].orders if node.name in lists else ())
                if order.kind in MAKES and order.id not in node.handled
            }
            assert len(really | ordered) <= self.rules.node_capacity, "a node's budget is exceeded"

    def _check_unknown(self, before: State, event: Event, fresh: list[Order]) -> None:
        """Unknown is not zero: nothing goes up or down while discovery cannot be read."""
        for name, pool in self.state.pools.items():
            old = before.pools.get(name)
            if old is not None and pool.target < old.target:
                assert isinstance(event, Decided), "a target fell without a decision"
                assert event.decision.decode is not None, "a target fell on an absent number"
                assert event.decision.decode >= 0, "a target fell on an unknown number"
        if self.state.discovery_known:
            return
        assert not any(order.kind in STARTS for order in fresh), "something is started while discovery is unknown"
        for replica in before.replicas.values():
            after = self.state.replicas.get(replica.id)
            if replica.state in WANTED and after is not None and after.state is ReplicaState.DRAINING:
                assert after.phase is ReplicaPhase.DRAINING, "something is drained while discovery is unknown"

    def _check_withdrawals(self, before: State) -> None:
        """Pending before serving, idle before busy, never below the target."""
        for pool in self.rules.pools:
            withdrawn = [
                r
                for r in before.replicas.values()
                if r.pool == pool
                and r.counts
                and r.id in self.state.replicas
                and self.state.replicas[r.id].state is ReplicaState.DRAINING
                and self.state.replicas[r.id].phase is not ReplicaPhase.DRAINING
                # One whose wake was refused is parked again, and may give way to one that is to serve at once.
                and not (r.way is Way.WAKE and self.state.replicas[r.id].parks)
            ]
            if not withdrawn:
                continue
            left = [r for r in self.state.replicas.values() if r.pool == pool and r.counts]
            target = self.state.pools[pool].target
            assert len(left) >= target, f"{len(left)} are left for target {target}"
            lost_serving = [r for r in withdrawn if r.state is ReplicaState.SERVING and r.served_since is not None]
            if lost_serving:
                assert all(r.state is ReplicaState.SERVING for r in left), (
                    "one that serves goes before one that does not"
                )
                loads = {i: load.running + load.queued for i, load in self.state.loads.items()}
                most = max(loads.get(r.instance_id or 0, 10**6) for r in lost_serving)
                least = min((loads.get(r.instance_id or 0, 10**6) for r in left), default=10**6)
                assert most <= least, "a busy one goes before an idle one"

    def _check_revocation(self, instance_id: int) -> None:
        owners = [r for node in self.nodes.values() for r in node.replicas.values() if r.instance_id == instance_id]
        assert owners, "a lease of nobody is revoked"
        assert all(not replica.live for replica in owners), "the lease of a live worker is revoked"
        reported = {
            seen.replica_id
            for report in self.reports.values()
            for seen in report.replicas
            if seen.phase is ReplicaPhase.EXITED
        }
        assert {owner.id for owner in owners} <= reported, "a lease is revoked without an exit report"
