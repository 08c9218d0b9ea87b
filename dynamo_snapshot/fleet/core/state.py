"""What the fleet knows between two events."""

from __future__ import annotations

import msgspec

from dynamo_snapshot.fleet.core.lifecycle import ALIVE, WANTED
from dynamo_snapshot.fleet.core.messages import Memory
from dynamo_snapshot.fleet.core.rules import Rules
from dynamo_snapshot.model import (
    DecisionRecord,
    Instance,
    Order,
    OrderKind,
    ReplicaPhase,
    ReplicaState,
    Reported,
    ScalingHint,
    Value,
    Way,
    WorkerLoad,
)


class Replica(Value, frozen=True):
    """A place in a pool and the worker that fills it, or is to fill it."""

    id: str
    pool: str
    node: str
    way: Way
    state: ReplicaState
    since: float
    deadline: float | None = None
    """When ``state`` is overdue; None: never."""
    ordered_at: float | None = None
    """None: adopted from a report; its order is not known."""
    attempts: int = 0
    """Orders that failed in a row for this place before."""
    snapshot_id: str | None = None
    captures: bool = False
    """Cold-started to be captured."""
    parks: bool = False
    """Made to be parked, and not woken: no part of its pool's numbers."""
    start_order: str | None = None
    """The open order that makes it."""
    capture_order: str | None = None
    capture_tried: bool = False
    """At most one capture is ordered in a life: a source whose capture failed goes on without."""
    stop_order: str | None = None
    stops_tried: tuple[OrderKind, ...] = ()
    phase: ReplicaPhase | None = None
    """The node's newest word; None: it has not reported it yet."""
    capture_began: float | None = None
    """When it became ready for its capture."""
    capture_took: float = 0.0
    """Time between ready-for-snapshot and its release: no part of its start."""
    instance_id: int | None = None
    served_since: float | None = None
    """When it was last found in discovery after it had not been; None: it has never served."""
    reason: str | None = None

    @property
    def counts(self) -> bool:
        """Whether it counts towards its pool's target."""
        return self.state in ALIVE and not self.parks

    @property
    def spare(self) -> bool:
        """Whether it is parked or on its way there."""
        return self.state in WANTED and self.parks


class Node(Value, frozen=True):
    """One node: the orders that stand in its wanted list, and its newest report."""

    name: str
    first_seen: float
    orders: tuple[Order, ...] = ()
    sequence: int = 0
    reported: Reported | None = None
    heard_at: float = 0.0
    """When ``reported`` was written, by the node's clock."""
    prefetched: dict[str, float] = msgspec.field(default_factory=dict)
    """When it was last asked to prefetch, by snapshot."""

    def is_heard(self, now: float, silent_s: float) -> bool:
        """Whether it has reported within ``silent_s`` seconds."""
        return self.reported is not None and now - self.heard_at <= silent_s


class Block(Value, frozen=True):
    """A pool that pauses: its starts after a place used up its attempts, its parking after a parked replica failed.

    Past ``until`` it tries one at a time.
    """

    since: float
    until: float
    pause: float
    reason: str


class PoolState(Value, frozen=True):
    """One pool's target and what stands in its way."""

    target: int
    decided: bool = False
    """Whether the planner, or what the last controller left, gave the target."""
    vacancies: tuple[int, ...] = ()
    """Places that wait for a replacement: how many orders failed for each in a row."""
    block: Block | None = None
    parking_pause: Block | None = None
    wake_failed_at: float | None = None
    capture_seconds: tuple[float, ...] = ()
    waits_for: str = ""
    """Why a deficit is not ordered now."""


class State(Value, frozen=True):
    """Everything. ``step`` returns a new one."""

    rules: Rules
    fence: int = 0
    serial: int = 0
    """The last number used in an id."""
    started_at: float = 0.0
    decision: tuple[int, int] | None = None
    decision_seen: bool = False
    """Whether this controller has had a decision."""
    hint: ScalingHint | None = None
    """The newest; it may have expired."""
    pools: dict[str, PoolState] = msgspec.field(default_factory=dict)
    nodes: dict[str, Node] = msgspec.field(default_factory=dict)
    replicas: dict[str, Replica] = msgspec.field(default_factory=dict)
    instances: tuple[Instance, ...] = ()
    """The last view of discovery that was known."""
    discovery_known: bool = False
    discovery_heard: bool = False
    """Whether this controller has been told anything of discovery yet, be it that it cannot be read."""
    bindings: dict[int, str] = msgspec.field(default_factory=dict)
    """Which replica an instance in ``instances`` is; kept when the replica is gone, as ports are used again."""
    revoking: frozenset[int] = frozenset()
    loads: dict[int, WorkerLoad] = msgspec.field(default_factory=dict)
    snapshot_failures: dict[str, int] = msgspec.field(default_factory=dict)
    """Failed restores in a row, by snapshot."""
    capture_failures: dict[str, int] = msgspec.field(default_factory=dict)
    """Failed captures in a row, by compatibility key."""
    memory: Memory = Memory()
    """What was last remembered; its quarantines and start times are the current ones."""
    records: tuple[DecisionRecord, ...] = ()
    resigned: bool = False


def initial(rules: Rules) -> State:
    """The state before :class:`Started`."""
    return State(rules=rules)
