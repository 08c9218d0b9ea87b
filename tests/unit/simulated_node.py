"""One node of the simulated world: it does what an agent does, by the same contract, as well as its luck lets it."""

from __future__ import annotations

import random
from collections import defaultdict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from dynamo_snapshot.model import (
    Exit,
    Order,
    OrderKind,
    OrderStatus,
    Outcome,
    Reason,
    ReplicaPhase,
    ReplicaReport,
    Reported,
    SnapshotSummary,
    Wanted,
    Way,
)

if TYPE_CHECKING:
    from fleet_world import World

MAKES = (OrderKind.COLD_START, OrderKind.RESTORE, OrderKind.PARK)
"""Orders that make a replica."""
STARTS = (*MAKES, OrderKind.WAKE)
STOPS = (OrderKind.CANCEL, OrderKind.DRAIN, OrderKind.KILL)

UNRELEASED = (
    ReplicaPhase.STARTING, ReplicaPhase.RESTORING, ReplicaPhase.READY_FOR_SNAPSHOT, ReplicaPhase.PARKED,
)  # fmt: skip


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
    wakes_fail: bool = False
    wakes_refused: bool = False
    """For want of room: the replica stays parked."""
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
            OrderKind.PARK: luck.restore_s,
        }.get(order.kind, 0.2)
        fails = None
        if order.kind in (*STARTS, OrderKind.CAPTURE) and luck.dice.random() < luck.failing:
            fails = Reason.WORKER_EXITED
        if order.kind in (OrderKind.RESTORE, OrderKind.PARK) and luck.restores_fail:
            fails = Reason.CRIU_RESTORE_FAILED
        if order.kind is OrderKind.CAPTURE and luck.captures_fail:
            fails = Reason.CRIU_DUMP_FAILED
        if order.kind is OrderKind.COLD_START and luck.cold_starts_fail:
            fails = Reason.WORKER_EXITED
        if order.kind is OrderKind.WAKE and luck.wakes_fail:
            fails = Reason.WORKER_EXITED
        if order.kind is OrderKind.WAKE and luck.wakes_refused:
            fails = Reason.NODE_AT_CAPACITY
        if order.kind is OrderKind.WAKE and (refused := self._refusal(order.replica_id)) is not None:
            self._end(order, now, OrderStatus.FAILED, refused)
            return
        due = now + seconds * (0.5 + luck.dice.random())
        if order.kind in STARTS and luck.dice.random() < luck.hanging:
            due = float("inf")
        if order.kind in MAKES:
            way = Way.COLD_START if order.kind is OrderKind.COLD_START else Way.RESTORE
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

    def _refusal(self, replica_id: str) -> Reason | None:
        replica = self.replicas.get(replica_id)
        if replica is None:
            return Reason.UNKNOWN_REPLICA
        return None if replica.phase is ReplicaPhase.PARKED else Reason.WORKER_NOT_READY

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
        if operation.order.kind in STARTS and replica is not None and replica.live and not self._unreleased(operation):
            self._exit(replica, -9)
        self._end(operation.order, operation.started, OrderStatus.FAILED, Reason.DEADLINE_EXCEEDED)

    def _unreleased(self, operation: Operation) -> bool:
        """A wake that has not let its replica go yet leaves it parked, whatever becomes of it."""
        replica = self.replicas[operation.order.replica_id]
        return operation.order.kind is OrderKind.WAKE and replica.phase is ReplicaPhase.PARKED

    def _proceed(self, operation: Operation) -> None:
        order, now, luck = operation.order, self.world.now, self.world.luck
        replica = self.replicas.get(order.replica_id)
        if order.kind is OrderKind.PREFETCH:
            self._end(order, operation.started, OrderStatus.DONE)
            return
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
        elif operation.fails is Reason.NODE_AT_CAPACITY:
            self._end(order, operation.started, OrderStatus.FAILED, operation.fails)
        elif operation.fails is not None:
            self._exit(replica, 1)
            self._end(order, operation.started, OrderStatus.FAILED, operation.fails)
        elif order.kind is OrderKind.COLD_START and order.capture and replica.phase is ReplicaPhase.STARTING:
            self._set_phase(replica, ReplicaPhase.READY_FOR_SNAPSHOT)
            operation.due = now + 5.0  # release_after_s
        elif order.kind is OrderKind.PARK:
            self._set_phase(replica, ReplicaPhase.PARKED)
            self._end(order, operation.started, OrderStatus.DONE)
        elif replica.phase in UNRELEASED:
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
            made = operation.order.kind in STARTS and replica is not None and replica.live
            if made and replica is not None and not self._unreleased(operation):
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
