"""The domain types that planner, fleet and agent exchange.

Everything here is a value: no I/O, no clock, and no import of another module of this project.
Times are wall-clock seconds since the epoch, durations are seconds, sizes are bytes. Every type
encodes to JSON with :func:`encode` and back with :func:`decode`, which validates.
"""

from __future__ import annotations

from enum import StrEnum
from typing import TypeVar

import msgspec


class Value(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Base of every type here: immutable, compared by content, JSON without default fields."""


T = TypeVar("T")


def encode(value: object) -> bytes:
    """Returns ``value`` as one line of JSON (UTF-8, no trailing newline)."""
    return msgspec.json.encode(value)


def decode(data: bytes | str, kind: type[T]) -> T:
    """Returns the ``kind`` that ``data`` encodes; raises ``msgspec.ValidationError`` naming the path."""
    return msgspec.json.decode(data, type=kind)


class Reason(StrEnum):
    """Stable codes: the same in logs, events, metrics, status and exit messages."""

    # the host and its configuration
    CONFIGURATION_INVALID = "configuration_invalid"
    CRIU_MISSING = "criu_missing"
    CRIU_TOO_OLD = "criu_too_old"
    NOT_PRIVILEGED = "not_privileged"
    PORT_IN_USE = "port_in_use"
    SERVER_UNREACHABLE = "server_unreachable"
    PROCESS_DIED = "process_died"
    DISK_FULL = "disk_full"
    DISK_FAILED = "disk_failed"
    RUNTIME_DIR_IN_USE = "runtime_dir_in_use"
    FILE_IN_USE = "file_in_use"
    STATE_CORRUPT = "state_corrupt"
    # orders
    DEADLINE_EXCEEDED = "deadline_exceeded"
    CANCELLED = "cancelled"
    STALE_FENCE = "stale_fence"
    UNKNOWN_REPLICA = "unknown_replica"
    AGENT_RESTARTED = "agent_restarted"
    NODE_AT_CAPACITY = "node_at_capacity"
    # capture and restore
    WORKER_NOT_READY = "worker_not_ready"
    DISCOVERABLE_AT_CAPTURE = "discoverable_at_capture"
    CRIU_DUMP_FAILED = "criu_dump_failed"
    CRIU_RESTORE_FAILED = "criu_restore_failed"
    HOLDER_FAILED = "holder_failed"
    PHASE_TIMED_OUT = "phase_timed_out"
    WORKER_EXITED = "worker_exited"
    # GPUs
    CUDA_MISSING = "cuda_missing"
    CUDA_PROBE_FAILED = "cuda_probe_failed"
    CUDA_LOCK_TIMEOUT = "cuda_lock_timeout"
    CUDA_CHECKPOINT_FAILED = "cuda_checkpoint_failed"
    CUDA_RESTORE_FAILED = "cuda_restore_failed"
    CUDA_HELPER_DIED = "cuda_helper_died"
    COLLECTIVE_ALIVE = "collective_alive"
    DRIVER_MISMATCH = "driver_mismatch"
    GPU_COUNT_MISMATCH = "gpu_count_mismatch"
    GPU_MODEL_MISMATCH = "gpu_model_mismatch"
    GPU_OUT_OF_MEMORY = "gpu_out_of_memory"
    GPU_UUID_UNMAPPED = "gpu_uuid_unmapped"
    MIG_UNSUPPORTED = "mig_unsupported"
    LOADER_DIED = "loader_died"
    WEIGHTS_CORRUPT = "weights_corrupt"
    WEIGHTS_LOAD_FAILED = "weights_load_failed"
    # snapshots
    SNAPSHOT_MISSING = "snapshot_missing"
    SNAPSHOT_CORRUPT = "snapshot_corrupt"
    SNAPSHOT_CHANGED = "snapshot_changed"
    SNAPSHOT_INCOMPATIBLE = "snapshot_incompatible"
    SNAPSHOT_IN_USE = "snapshot_in_use"
    SNAPSHOT_QUARANTINED = "snapshot_quarantined"
    # anything else: a bug, reported with its text
    INTERNAL_ERROR = "internal_error"


class OrderKind(StrEnum):
    """What the fleet can want of a node."""

    COLD_START = "cold_start"
    RESTORE = "restore"
    CAPTURE = "capture"
    PARK = "park"
    """A restore that stops short of resuming: out of discovery, weights off the GPU, until it is woken."""
    WAKE = "wake"
    """Let a parked replica go on to serving."""
    PREFETCH = "prefetch"
    """Read a snapshot's images and weight segments into memory, for restores to come."""
    DRAIN = "drain"
    KILL = "kill"
    CANCEL = "cancel"


class Order(Value, frozen=True):
    """One thing wanted of one node, carried out once.

    ``fence`` is the token of the controller that wrote it; a node ignores orders below the highest
    fence it has seen. ``deadline`` is when the fleet gives the order up. ``replica_id`` names the
    replica to make (``cold_start``, ``restore``, ``park``) or to act on (the others); a ``prefetch`` has
    no replica, but a name of its own there, for a ``cancel`` to name.
    """

    id: str
    kind: OrderKind
    replica_id: str
    pool: str
    fence: int
    issued_at: float
    deadline: float
    snapshot_id: str | None = None
    """restore, park, prefetch: which snapshot."""
    capture: bool = False
    """cold_start: stop at ready-for-snapshot and wait for a ``capture`` order (or its absence)."""
    reason: str = ""
    """Why the fleet wants it, for people."""


class WorkerSpec(Value, frozen=True):
    """How a pool's worker is started: what a cold start runs and what a restore must match."""

    command: tuple[str, ...]
    environment: dict[str, str] = {}
    """Set for a cold start and part of the compatibility key."""
    incarnation_environment: dict[str, str] = {}
    """Where the servers are; applied at cold start and again through the restore context. Not part of the key."""
    model_path: str | None = None
    """The model's folder; its files' identity is part of the compatibility key."""
    memory_limit_bytes: int | None = None
    drain_timeout_s: float = 30.0
    boot_timeout_s: float = 600.0
    gpus: int = 0
    """How many GPUs the node assigns to each; 0: none."""


class Wanted(Value, frozen=True):
    """All that the fleet wants of one node: a retained message, replaced as a whole."""

    node: str
    fence: int
    sequence: int
    workers: dict[str, WorkerSpec] = {}
    """The worker of each pool, by pool name."""
    orders: tuple[Order, ...] = ()


class Phase(Value, frozen=True):
    """One named phase of a pipeline and how long it took."""

    name: str
    seconds: float


class OrderStatus(StrEnum):
    DONE = "done"
    FAILED = "failed"
    CANCELLED = "cancelled"


class Outcome(Value, frozen=True):
    """How an order ended. It stays in the report until the order has left the wanted list."""

    order_id: str
    status: OrderStatus
    started_at: float
    finished_at: float
    reason: str | None = None
    message: str = ""
    phases: tuple[Phase, ...] = ()
    unaccounted_s: float = 0.0
    """Wall time between start and finish that no phase claims."""
    idle_cpu: float | None = None
    """Share of the host's CPU time that was idle in the second before the order, 0 to 1; None: unknown."""
    snapshot_id: str | None = None
    """capture: what was published."""


class Way(StrEnum):
    """How a replica's incarnation came to be."""

    COLD_START = "cold_start"
    RESTORE = "restore"
    WAKE = "wake"
    """Restored and parked before it was wanted, and woken when it was; a node calls that a restore still."""


class ReplicaPhase(StrEnum):
    """What a node knows of a replica. Whether it serves is for discovery to say."""

    STARTING = "starting"
    """Cold: the holder runs, the engine boots."""
    READY_FOR_SNAPSHOT = "ready_for_snapshot"
    CAPTURING = "capturing"
    RESTORING = "restoring"
    PARKED = "parked"
    """Restored, with its identity; it waits to be woken before it resumes."""
    RESUMING = "resuming"
    """Released: identity, resume and self-test are the worker's own."""
    REGISTERED = "registered"
    """The worker says that it has registered."""
    DRAINING = "draining"
    EXITED = "exited"


class Exit(Value, frozen=True):
    """How a worker ended: ``code`` as a shell would say it, negative for a signal."""

    code: int
    at: float
    reason: str | None = None
    """The reason the worker gave before it went, or the agent's for ending it; None: it gave none."""
    message: str = ""


class ReplicaReport(Value, frozen=True):
    """One replica as its node sees it."""

    replica_id: str
    pool: str
    incarnation: str
    way: Way
    phase: ReplicaPhase
    since: float
    """When ``phase`` began."""
    rpc_port: int
    """The TCP port the worker was given; it shows in its instance's transport address."""
    pid: int | None = None
    """Of the worker's root process, in the node's pid namespace."""
    snapshot_id: str | None = None
    self_test_at: float | None = None
    """When this incarnation passed its self-test, by the worker's wall clock."""
    evidence: dict[str, str] = {}
    """What the worker tells of itself: first random number, engine, …"""
    exit: Exit | None = None


class SnapshotSummary(Value, frozen=True):
    """A published snapshot as its node reports it."""

    id: str
    compatibility_key: str
    size_bytes: int
    created_at: float
    admitted: bool
    """Digested in full by this node and unchanged since."""
    reason: str | None = None
    """Why it may not be used."""


class Reported(Value, frozen=True):
    """All that one node reports: a retained message, replaced as a whole."""

    node: str
    sequence: int
    fence: int
    """The highest fence this node has seen."""
    at: float
    host: str = "127.0.0.1"
    """The address its workers advertise."""
    compatibility_keys: dict[str, str] = {}
    """By pool: the key that a snapshot must have to stand in for a cold start of that pool here, now."""
    replicas: tuple[ReplicaReport, ...] = ()
    outcomes: tuple[Outcome, ...] = ()
    snapshots: tuple[SnapshotSummary, ...] = ()


class Instance(Value, frozen=True):
    """One registered worker endpoint, as discovery shows it."""

    instance_id: int
    namespace: str
    component: str
    endpoint: str
    host: str
    port: int
    """Of the transport address; it equals the ``rpc_port`` the agent gave the incarnation."""


class WorkerLoad(Value, frozen=True):
    """Requests on one instance, from its forward-pass metrics."""

    running: int
    queued: int
    at: float


class Decision(Value, frozen=True):
    """One scaling decision of the planner. ``None`` means: it says nothing of that role."""

    revision: int
    """etcd's create revision of the decision key: ids repeat after a planner restart, (revision, id) does not."""
    id: int
    prefill: int | None = None
    decode: int | None = None


class PoolHint(Value, frozen=True):
    """What the planner would have ready in one pool beside what serves."""

    parked: int | None = None
    """Replicas to keep parked, in place of the pool's own setting; None: no opinion."""
    prefetch: bool = False
    """Whether nodes should have the snapshot that a restore would use in memory."""


class ScalingHint(Value, frozen=True):
    """Goes beside the planner's decisions, by role as they do. Nothing is wrong without it; the newest counts."""

    at: float
    expires_at: float
    """From then on it says nothing."""
    prefill: PoolHint | None = None
    decode: PoolHint | None = None


class ReplicaState(StrEnum):
    """The fleet's view of a replica."""

    ORDERED = "ordered"
    STARTING = "starting"
    RESTORING = "restoring"
    PARKED = "parked"
    """Kept ready, out of discovery: not part of the pool's numbers until it is woken."""
    RESUMING = "resuming"
    SERVING = "serving"
    DRAINING = "draining"
    STOPPED = "stopped"
    FAILED = "failed"


class ReplicaStatus(Value, frozen=True):
    """One replica in a :class:`FleetStatus`."""

    replica_id: str
    pool: str
    node: str
    state: ReplicaState
    since: float
    way: Way
    parks: bool = False
    """Parked, or on its way there: no part of its pool's numbers, and no capacity that comes by itself."""
    instance_id: int | None = None
    load: WorkerLoad | None = None
    reason: str | None = None
    ordered_at: float | None = None
    """When the fleet first wanted it; None: adopted from a report."""


class StartTimes(Value, frozen=True):
    """Measured seconds from order to serving, newest last, at most the last 32."""

    pool: str
    way: Way
    snapshot_id: str | None = None
    node: str | None = None
    seconds: tuple[float, ...] = ()


class PoolStatus(Value, frozen=True):
    """One pool in a :class:`FleetStatus`."""

    pool: str
    role: str
    target: int
    achievable: int
    """The most replicas this pool can reach now: ``target`` unless something stands in the way."""
    serving: int
    pending: int
    draining: int
    parked: int = 0
    """Ready to be woken; beside ``serving`` and ``pending``, which do not count them."""
    parked_target: int = 0
    unachievable_reason: str | None = None
    snapshot_id: str | None = None
    """The snapshot that a restore would use now."""


class DecisionRecord(Value, frozen=True):
    """A change of target or a way chosen, with its reason."""

    at: float
    pool: str
    what: str
    reason: str


class FleetStatus(Value, frozen=True):
    """The fleet at one moment: for the planner plugin, the live view and anyone who reads NATS."""

    fleet: str
    at: float
    fence: int
    pools: tuple[PoolStatus, ...] = ()
    replicas: tuple[ReplicaStatus, ...] = ()
    start_times: tuple[StartTimes, ...] = ()
    snapshot_bytes: dict[str, int] = {}
    """Snapshot id to its size, for the snapshots that nodes report."""
    quarantined: dict[str, str] = {}
    """Snapshot id to the reason of its quarantine."""
    decisions: tuple[DecisionRecord, ...] = ()
    """Newest last, at most the last 50."""
    discovery_known: bool = True
    """False while discovery cannot be read: counts are the last known ones."""
