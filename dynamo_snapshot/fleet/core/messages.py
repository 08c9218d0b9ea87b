"""What the core is told, and what it wants done: data only."""

from __future__ import annotations

from typing import TypeAlias

import msgspec

from dynamo_snapshot.model import Decision, Instance, Reported, ScalingHint, StartTimes, Value, Wanted, WorkerLoad


class Quarantine(Value, frozen=True):
    """Why a snapshot is not used any more, and the compatibility key it had."""

    compatibility_key: str
    reason: str


class Memory(Value, frozen=True):
    """What outlives a controller, besides the wanted lists."""

    targets: dict[str, int] = msgspec.field(default_factory=dict)
    decision: tuple[int, int] | None = None
    """(revision, id) of the last decision that was taken up."""
    quarantined: dict[str, Quarantine] = msgspec.field(default_factory=dict)
    start_times: tuple[StartTimes, ...] = ()


# What the core is told


class Started(Value, frozen=True):
    """A controller begins, with what its predecessor left. Always the first event."""

    fence: int
    memory: Memory = Memory()
    wanted: tuple[Wanted, ...] = ()


class Decided(Value, frozen=True):
    """The planner wants other numbers."""

    decision: Decision


class Hinted(Value, frozen=True):
    """The planner would have something ready; it may say so again and again."""

    hint: ScalingHint


class NodeReported(Value, frozen=True):
    reported: Reported


class DiscoverySeen(Value, frozen=True):
    instances: tuple[Instance, ...] | None
    """None: unknown."""


class LoadsSeen(Value, frozen=True):
    """The newest load of every instance that tells it, by instance id."""

    loads: dict[int, WorkerLoad]


class Ticked(Value, frozen=True):
    """Time has passed."""


Event: TypeAlias = Started | Decided | Hinted | NodeReported | DiscoverySeen | LoadsSeen | Ticked


# What the core wants done; each is safe to repeat


class SetWanted(Value, frozen=True):
    """Replace the wanted list of a node."""

    wanted: Wanted


class RevokeLease(Value, frozen=True):
    """Take an instance out of discovery; its node has reported the exit of its process."""

    instance_id: int
    replica_id: str


class CompleteDecision(Value, frozen=True):
    """Acknowledge a decision to the planner, so that it goes on deciding."""

    decision: Decision


class Remember(Value, frozen=True):
    """Keep this for the next controller."""

    memory: Memory


class PublishStatus(Value, frozen=True):
    """Something visible has changed."""


class Resign(Value, frozen=True):
    """Another controller is in charge: stop, and change nothing more."""

    fence: int
    """The other's."""


Command: TypeAlias = SetWanted | RevokeLease | CompleteDecision | Remember | PublishStatus | Resign
