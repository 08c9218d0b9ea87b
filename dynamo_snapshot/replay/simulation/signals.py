"""What a scaling policy is shown at one tick of a simulation, and what such a policy is."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

from planner.observation import Observation


@dataclass(frozen=True)
class Signals:
    """One pool at one tick; averages are over the time since the tick before.

    A policy reads what its original has in production and nothing else: ours ``observation`` alone.
    """

    now: float
    """Seconds since the trace began."""
    ready: int
    """Replicas that are routed to."""
    starting: int
    """Ordered, not ready yet."""
    draining: int
    """Not routed to any more, still busy with what they have."""
    target: int
    """The size last asked for."""
    observe: Callable[[], Observation]
    """Looks at the pool as it is: for :attr:`observation`."""
    in_flight: float = 0.0
    """Mean number of requests in the system, waiting and running."""
    waiting: int = 0
    """Requests without a first token, at the tick."""
    arrivals: int = 0
    """Requests that came."""
    input_tokens: int = 0
    """Prompt tokens of those requests."""
    finished: int = 0
    output_tokens: int = 0
    """Tokens that the finished requests were given."""
    busy: float = 0.0
    """Mean share of time in which a ready replica was in a forward pass, 0 to 1 (GPU utilization as DCGM tells it)."""

    @cached_property
    def observation(self) -> Observation:
        """What the planner plugin would see: newest forward-pass metrics of ready workers, and FleetStatus.

        Only made for a policy that reads it, which it does in its tick: later the pool is another.
        """
        return self.observe()


class Policy(Protocol):
    """Decides the size of one pool. One object a run: it may remember."""

    name: str
    """As ``--policy`` names it, with its settings where they differ from the defaults: ``knative-kpa(target=8)``."""
    interval_s: float
    """Seconds between two ticks."""

    def decide(self, signals: Signals) -> int | None:
        """Returns how many replicas there should be; None: as before. The bounds are applied by the caller."""
