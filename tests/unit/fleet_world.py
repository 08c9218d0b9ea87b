"""A simulated world around the fleet core, in virtual time: nodes, discovery and a planner that misbehave.

:class:`World` checks the laws from outside after every step: by the orders it saw and by what really
runs, not by what the core believes.
"""

from __future__ import annotations

import random
from collections import defaultdict
from dataclasses import dataclass, field

from msgspec.structs import replace

from dynamo_snapshot.fleet.core import initial, step
from dynamo_snapshot.fleet.core.lifecycle import ALIVE
from dynamo_snapshot.fleet.core.messages import (
    Command,
    CompleteDecision,
    Decided,
    DiscoverySeen,
    Event,
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
from dynamo_snapshot.fleet.core.state import State
from dynamo_snapshot.model import (
    Decision,
    Exit,
    Instance,
    Order,
    OrderKind,
    OrderStatus,
    Outcome,
    Reason,
    ReplicaPhase,
    ReplicaReport,
    ReplicaState,
    Reported,
    SnapshotSummary,
    Wanted,
    Way,
    WorkerLoad,
    WorkerSpec,
)

STARTS = (OrderKind.COLD_START, OrderKind.RESTORE)
STOPS = (OrderKind.CANCEL, OrderKind.DRAIN, OrderKind.KILL)
SLICE_S = 0.25
LEASE_TTL_S = 10.0
HEARTBEAT_S = 5.0


def rules(**pool_changes: object) -> Rules:
    """A fleet of one pool whose deadlines suit virtual time; ``pool_changes`` are fields of :class:`PoolRules`."""
    pool = PoolRules(
        role="decode",
        component="backend",
        endpoint="generate",
        worker=WorkerSpec(command=("engine",)),
        cold_start_s=30.0,
        restore_s=10.0,
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


@dataclass
class Luck:
    """How things go. The defaults are a healthy world."""

    dice: random.Random = field(default_factory=lambda: random.Random(0))
    failing: float = 0.0
    """Share of orders that fail."""
    hanging: float = 0.0
    """Share of orders that end only by their deadline."""
    unreported_phases: float = 0.0
    """Share of reports that are skipped; the newest is always told in the end."""
    restores_fail: bool = False
    captures_fail: bool = False
    cold_starts_fail: bool = False
    registers: bool = True
    """Whether released workers reach discovery."""
    boot_s: float = 4.0
    restore_s: float = 0.5
    capture_s: float = 0.5


@dataclass
class Running:
    """One replica on a node, as it really is."""

    id: str
    pool: str
    way: Way
    port: int
    phase: ReplicaPhase
    since: float
    snapshot_id: str | None = None
    capture: bool = False
    exit: Exit | None = None
    instance_id: int | None = None
    stop_at: float | None = None

    @property
    def live(self) -> bool:
        return self.exit is None


@dataclass
class Operation:
    order: Order
    due: float
    fails: Reason | None
    started: float


class SimulatedNode:
    """Does what an agent does, by the same contract: each order once, the highest fence wins, deadlines hold."""

    def __init__(self, name: str, world: World) -> None:
        self.name = name
        self.host = f"host-{name}"
        self.world = world
        self.up = True
        self.fence = 0
        self.sequence = 0
        self.replicas: dict[str, Running] = {}
        self.operations: dict[str, Operation] = {}
        self.outcomes: dict[str, Outcome] = {}
        self.handled: dict[str, int] = defaultdict(int)
        self.snapshots: list[SnapshotSummary] = []
        self.next_port = 20000
        self.dirty = True
        self.reported_at = 0.0

    # What is wanted

    def see(self, wanted: Wanted) -> None:
        if wanted.fence < self.fence:
            return
        self.fence = wanted.fence
        ids = {order.id for order in wanted.orders}
        for gone in set(self.outcomes) - ids:
            del self.outcomes[gone]
            self.dirty = True
        for order in wanted.orders:
            if order.fence >= self.fence and order.id not in self.handled:
                self.handled[order.id] += 1
                self._begin(order)

    def _begin(self, order: Order) -> None:
        luck, now = self.world.luck, self.world.now
        self.dirty = True
        if now > order.deadline:
            self._end(order, now, OrderStatus.FAILED, Reason.DEADLINE_EXCEEDED)
            return
        seconds = {
            OrderKind.COLD_START: luck.boot_s,
            OrderKind.RESTORE: luck.restore_s,
            OrderKind.CAPTURE: luck.capture_s,
        }.get(order.kind, 0.2)
        fails = None
        if order.kind in (*STARTS, OrderKind.CAPTURE) and luck.dice.random() < luck.failing:
            fails = Reason.WORKER_EXITED
        if order.kind is OrderKind.RESTORE and luck.restores_fail:
            fails = Reason.CRIU_RESTORE_FAILED
        if order.kind is OrderKind.CAPTURE and luck.captures_fail:
            fails = Reason.CRIU_DUMP_FAILED
        if order.kind is OrderKind.COLD_START and luck.cold_starts_fail:
            fails = Reason.WORKER_EXITED
        due = now + seconds * (0.5 + luck.dice.random())
        if order.kind in STARTS:
            if luck.dice.random() < luck.hanging:
                due = float("inf")
            way = Way.RESTORE if order.kind is OrderKind.RESTORE else Way.COLD_START
            phase = ReplicaPhase.RESTORING if way is Way.RESTORE else ReplicaPhase.STARTING
            self.replicas[order.replica_id] = Running(
                id=order.replica_id,
                pool=order.pool,
                way=way,
                port=self._port(),
                phase=phase,
                since=now,
                snapshot_id=order.snapshot_id,
                capture=order.capture,
            )
        self.operations[order.id] = Operation(order=order, due=due, fails=fails, started=now)
        if order.kind in STOPS:
            self._begin_stop(order)

    def _begin_stop(self, order: Order) -> None:
        replica = self.replicas.get(order.replica_id)
        if replica is None or not replica.live:
            reason = Reason.UNKNOWN_REPLICA if replica is None else None
            status = OrderStatus.FAILED if replica is None else OrderStatus.DONE
            self._end(order, self.world.now, status, reason)
        elif order.kind is OrderKind.DRAIN:
            self._set_phase(replica, ReplicaPhase.DRAINING)
            self.world.unregister(replica)

    def _port(self) -> int:
        # Ports come again soon: a registration that outlived its process is easily met.
        taken = {replica.port for replica in self.replicas.values() if replica.live}
        while True:
            self.next_port = 20000 + (self.next_port - 20000 + 1) % 12
            if self.next_port not in taken:
                return self.next_port

    # How it goes on

    def work(self) -> None:
        """Carries on with everything that is due."""
        now = self.world.now
        for operation in list(self.operations.values()):
            if operation.order.id not in self.operations:
                continue
            if now > operation.order.deadline:
                self._give_up(operation)
            elif now >= operation.due:
                self._proceed(operation)
        for replica in list(self.replicas.values()):
            if replica.stop_at is not None and now >= replica.stop_at and replica.live:
                self._exit(replica, 0)
            if not replica.live and replica.exit is not None and now > replica.exit.at + 60:
                del self.replicas[replica.id]
                self.dirty = True

    def _give_up(self, operation: Operation) -> None:
        replica = self.replicas.get(operation.order.replica_id)
        if operation.order.kind in STARTS and replica is not None and replica.live:
            self._exit(replica, -9)
        self._end(operation.order, operation.started, OrderStatus.FAILED, Reason.DEADLINE_EXCEEDED)

    def _proceed(self, operation: Operation) -> None:
        order, now, luck = operation.order, self.world.now, self.world.luck
        replica = self.replicas.get(order.replica_id)
        if order.kind in STOPS:
            if replica is not None:
                if order.kind is OrderKind.CANCEL and not self._open_start(replica.id):
                    self._end(order, operation.started, OrderStatus.FAILED, Reason.INTERNAL_ERROR)
                    return
                self._exit(replica, 0 if order.kind is OrderKind.DRAIN else -9)
                for start in [o for o in self.operations.values() if o.order.replica_id == replica.id]:
                    if start.order.kind in STARTS:
                        self._end(start.order, start.started, OrderStatus.CANCELLED, Reason.CANCELLED)
            self._end(order, operation.started, OrderStatus.DONE)
            return
        if replica is None or not replica.live:
            self._end(order, operation.started, OrderStatus.FAILED, Reason.WORKER_EXITED)
            return
        if order.kind is OrderKind.CAPTURE:
            self._capture(operation, replica)
        elif operation.fails is not None:
            self._exit(replica, 1)
            self._end(order, operation.started, OrderStatus.FAILED, operation.fails)
        elif order.kind is OrderKind.COLD_START and order.capture and replica.phase is ReplicaPhase.STARTING:
            self._set_phase(replica, ReplicaPhase.READY_FOR_SNAPSHOT)
            operation.due = now + 5.0  # release_after_s
        elif replica.phase in (ReplicaPhase.STARTING, ReplicaPhase.RESTORING, ReplicaPhase.READY_FOR_SNAPSHOT):
            self._set_phase(replica, ReplicaPhase.RESUMING)
            operation.due = now + 0.1
        elif replica.phase is ReplicaPhase.RESUMING and luck.registers and self.world.etcd_up:
            self._set_phase(replica, ReplicaPhase.REGISTERED)
            self.world.register(replica, self.host)
            self._end(order, operation.started, OrderStatus.DONE)

    def _capture(self, operation: Operation, replica: Running) -> None:
        status, snapshot_id = OrderStatus.DONE, None
        if operation.fails is not None:
            status = OrderStatus.FAILED
        else:
            snapshot_id = f"snapshot-{self.name}-{len(self.snapshots)}"
            self.snapshots.append(
                SnapshotSummary(
                    id=snapshot_id,
                    compatibility_key=self.world.keys[replica.pool],
                    size_bytes=1,
                    created_at=self.world.now,
                    admitted=True,
                )
            )
        for start in self.operations.values():
            if start.order.replica_id == replica.id and start.order.kind in STARTS:
                start.due = min(start.due, self.world.now)
        self._end(operation.order, operation.started, status, operation.fails, snapshot_id)

    def _open_start(self, replica_id: str) -> bool:
        return any(o.order.replica_id == replica_id and o.order.kind in STARTS for o in self.operations.values())

    def _set_phase(self, replica: Running, phase: ReplicaPhase) -> None:
        replica.phase, replica.since = phase, self.world.now
        self.dirty = True

    def _exit(self, replica: Running, code: int) -> None:
        replica.exit = Exit(code=code, at=self.world.now)
        self._set_phase(replica, ReplicaPhase.EXITED)
        if code == 0:
            self.world.unregister(replica)
        for operation in list(self.operations.values()):
            if operation.order.replica_id == replica.id and operation.order.kind in STARTS:
                operation.due, operation.fails = self.world.now, operation.fails or Reason.WORKER_EXITED

    def _end(
        self,
        order: Order,
        started: float,
        status: OrderStatus,
        reason: Reason | None = None,
        snapshot_id: str | None = None,
    ) -> None:
        assert order.id not in self.outcomes, "a second outcome for one order id"
        self.operations.pop(order.id, None)
        self.outcomes[order.id] = Outcome(
            order_id=order.id,
            status=status,
            started_at=started,
            finished_at=self.world.now,
            reason=reason,
            snapshot_id=snapshot_id,
        )
        self.dirty = True

    # What happens to it

    def crash_worker(self, replica: Running) -> None:
        self._exit(replica, -9)

    def restart(self) -> None:
        """The agent's process dies and comes back: what served is adopted, what was on its way has failed."""
        for operation in list(self.operations.values()):
            replica = self.replicas.get(operation.order.replica_id)
            if operation.order.kind in STARTS and replica is not None and replica.live:
                self._exit(replica, -9)
            if operation.order.id in self.operations:
                self._end(operation.order, operation.started, OrderStatus.FAILED, Reason.AGENT_RESTARTED)

    def report(self) -> Reported:
        self.sequence += 1
        self.dirty = False
        self.reported_at = self.world.now
        return Reported(
            node=self.name,
            sequence=self.sequence,
            fence=self.fence,
            at=self.world.now,
            host=self.host,
            compatibility_keys=dict(self.world.keys),
            replicas=tuple(
                ReplicaReport(
                    replica_id=r.id,
                    pool=r.pool,
                    incarnation=r.id,
                    way=r.way,
                    phase=r.phase,
                    since=r.since,
                    rpc_port=r.port,
                    snapshot_id=r.snapshot_id,
                    exit=r.exit,
                )
                for r in self.replicas.values()
            ),
            outcomes=tuple(self.outcomes.values()),
            snapshots=tuple(self.snapshots),
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
            if order.kind is OrderKind.RESTORE:
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
        replicas = [order.replica_id for order in fresh if order.kind in STARTS]
        known = {order.replica_id for order in self.orders.values() if order.kind in STARTS}
        assert len(replicas) == len(set(replicas)), "a replica is ordered twice"
        assert not known & set(replicas), "a replica is ordered twice"
        assert all(order.fence == self.fence for order in fresh)

    def _check_numbers(self, fresh: list[Order], lists: dict[str, Wanted]) -> None:
        """Never a double order; budgets hold, orders in flight included."""
        open_orders = {order.id: order for wanted in lists.values() for order in wanted.orders}
        ever = {**self.orders, **open_orders}
        stopped = {order.replica_id for order in ever.values() if order.kind in STOPS}
        for pool in self.rules.pools:
            committed = {o.replica_id for o in open_orders.values() if o.kind in STARTS and o.pool == pool}
            for report in self.reports.values():
                committed |= {
                    seen.replica_id
                    for seen in report.replicas
                    if seen.phase not in (ReplicaPhase.EXITED, ReplicaPhase.DRAINING) and seen.pool == pool
                }
            failed = {
                self.orders[outcome.order_id].replica_id
                for report in self.reports.values()
                for outcome in report.outcomes
                if outcome.status is not OrderStatus.DONE and outcome.order_id in self.orders
            }
            committed -= stopped | failed
            if any(order.kind in STARTS and order.pool == pool for order in fresh):
                target = self.state.pools[pool].target
                assert len(committed) <= target, f"{len(committed)} are on their way or there for target {target}"
        for node in self.nodes.values():
            really = {replica.id for replica in node.replicas.values() if replica.live}
            ordered = {
                order.replica_id
                for order in (lists[node.name].orders if node.name in lists else ())
                if order.kind in STARTS and order.id not in node.handled
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
            if replica.state in ALIVE and after is not None and after.state is ReplicaState.DRAINING:
                assert after.phase is ReplicaPhase.DRAINING, "something is drained while discovery is unknown"

    def _check_withdrawals(self, before: State) -> None:
        """Pending before serving, idle before busy, never below the target."""
        for pool in self.rules.pools:
            withdrawn = [
                r
                for r in before.replicas.values()
                if r.pool == pool
                and r.state in ALIVE
                and r.id in self.state.replicas
                and self.state.replicas[r.id].state is ReplicaState.DRAINING
                and self.state.replicas[r.id].phase is not ReplicaPhase.DRAINING
            ]
            if not withdrawn:
                continue
            left = [r for r in self.state.replicas.values() if r.pool == pool and r.state in ALIVE]
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
