"""What the operator wants of the fleet, as the core reads it. Durations are seconds."""

from __future__ import annotations

from dynamo_snapshot.model import Value, WorkerSpec


class PoolRules(Value, frozen=True):
    """One pool."""

    role: str
    """``decode`` or ``prefill``: which of the planner's two numbers is meant for it."""
    component: str
    endpoint: str
    worker: WorkerSpec
    min_replicas: int = 1
    max_replicas: int = 8
    parked: int = 0
    """Replicas to keep parked, unless a hint asks for another number."""
    captures: bool = True
    """Whether the first worker of a compatibility key is captured."""
    minimum_gain_s: float = 1.0
    quarantine_after: int = 2
    max_attempts: int = 3
    cold_start_s: float = 600.0
    restore_s: float = 60.0
    capture_s: float = 300.0
    wake_s: float = 30.0
    prefetch_s: float = 120.0
    drain_s: float = 60.0
    kill_s: float = 10.0


class Rules(Value, frozen=True):
    """The fleet."""

    fleet: str
    namespace: str
    pools: dict[str, PoolRules]
    node_capacity: int = 64
    """Replicas that one node takes, those that are on their way out included."""
    outcome_grace_s: float = 5.0
    """How long an outcome may arrive after its order's deadline, at which the node itself gives up."""
    discover_s: float = 15.0
    """From the node's word that a worker goes on by itself, or from its loss in discovery, to discovery."""
    settle_s: float = 5.0
    """After a start of the controller: nothing is drained before a decision came or this passed."""
    node_wait_s: float = 10.0
    """How long a new node may take to tell its compatibility keys and to admit its snapshots."""
    node_silent_s: float = 20.0
    """A node that has not reported for so long gets no new starts; what it runs stays counted."""
    load_fresh_s: float = 5.0
    """Loads that are older are unknown."""
    proven_s: float = 10.0
    """A replica that served this long was started well: its later failure is the first of a new row."""
    block_s: float = 30.0
    """First pause after a place used up its attempts; it doubles with each further failure."""
    block_limit_s: float = 600.0
    wake_again_s: float = 10.0
    """After a failed wake the pool's places are filled otherwise for so long."""
    prefetch_again_s: float = 300.0
    """A node is not asked for the same snapshot again before: what it read may have gone from memory since."""
    cold_start_prior_s: float = 60.0
    """Expected until measured; likewise the next three."""
    restore_prior_s: float = 2.0
    wake_prior_s: float = 0.5
    capture_prior_s: float = 5.0
