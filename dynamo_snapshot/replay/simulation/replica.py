"""A replica in the simulation, from its order to its end."""

from __future__ import annotations

import random
from collections import deque
from enum import StrEnum

from dynamo_snapshot.model import Way
from dynamo_snapshot.replay.simulation.engine import Engine
from dynamo_snapshot.replay.simulation.startup import Attempt


class Phase(StrEnum):
    STARTING = "starting"
    READY = "ready"
    DRAINING = "draining"
    STOPPED = "stopped"


class Replica:
    """A GPU is charged from ``ordered_at`` until ``stopped_at``."""

    __slots__ = (
        "attempt_at",
        "attempts",
        "busy_before",
        "engine",
        "name",
        "ordered_at",
        "phase",
        "ready_at",
        "scheduled",
        "stopped_at",
    )

    def __init__(self, name: str, ordered_at: float, attempts: tuple[Attempt, ...], engine: Engine) -> None:
        self.name = name
        self.ordered_at = ordered_at
        self.attempts = deque(attempts)
        """The running one, and what will follow it."""
        self.attempt_at = ordered_at
        self.engine = engine
        self.phase = Phase.STARTING
        self.ready_at: float | None = None
        self.stopped_at: float | None = None
        self.busy_before = 0.0
        """Seconds in forward passes up to the tick before."""
        self.scheduled = 0
        """The number of its event in the pool's; 0: there is none."""

    def __repr__(self) -> str:
        return f"<Replica {self.name} {self.phase}: {self.in_flight} in flight>"

    @property
    def way(self) -> Way:
        return self.attempts[0].way

    @property
    def attempt_ends_at(self) -> float:
        return self.attempt_at + self.attempts[0].seconds

    @property
    def in_flight(self) -> int:
        """Requests it was given and has not finished."""
        return self.engine.running + (0 if self.engine.shares_queue else len(self.engine.queue))

    def loss(self) -> tuple[int, float, float]:
        """What it costs to lose it, the least first; the fleet's rule (``fleet/core/victims.py``)."""
        if self.phase is Phase.STARTING:
            return (0 if self.way is Way.COLD_START else 1), 0, -self.ordered_at
        return 2, self.in_flight, -self.ordered_at


def dice(seed: int, ordinal: int) -> random.Random:
    """For one start: the same for the same seed and ordinal, whatever else a policy did."""
    return random.Random(f"{seed}/{ordinal}")
