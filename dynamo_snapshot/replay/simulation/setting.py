"""What is the same for every policy in a comparison: the engine, the router, the bounds and the objectives."""

from __future__ import annotations

from enum import StrEnum

import msgspec

from dynamo_snapshot.replay.simulation.timing import EngineTiming


class Router(StrEnum):
    """Which ready replica gets a request that comes; it is never moved to another afterwards."""

    ROUND_ROBIN = "round-robin"
    """One after the other: Dynamo's default."""
    LEAST_LOADED = "least-loaded"
    """The one with the fewest requests, as Dynamo's frontend with ``--router-mode least-loaded``.

    A replica that has just started gets every request until it has as many as the others: it can fall behind.
    """
    SHARED_QUEUE = "shared-queue"
    """Requests wait in one queue, and an engine takes them when it has room in its next pass."""


class Setting(msgspec.Struct, frozen=True, kw_only=True):
    """One pool of aggregated replicas with one GPU each."""

    name: str = "default"
    engine: EngineTiming = EngineTiming()
    router: Router = Router.ROUND_ROBIN
    min_replicas: int = 1
    max_replicas: int = 16
    initial_replicas: int = 1
    """Ready when the trace begins, if the policy does not ask for another number at its first tick."""
    ttft_objective_s: float = 1.5
    itl_objective_s: float = 0.2
    """For a request's mean time between tokens."""
    drain_limit_s: float = 600.0
    """After the trace's end the run goes on until all is finished, at most for so long."""

    def __post_init__(self) -> None:
        checks = {
            "min_replicas must be at least 1": self.min_replicas >= 1,
            "max_replicas must be at least min_replicas": self.max_replicas >= self.min_replicas,
            "initial_replicas must be within the bounds": self.bounded(self.initial_replicas) == self.initial_replicas,
            "objectives must be positive": self.ttft_objective_s > 0 and self.itl_objective_s > 0,
            "drain_limit_s must be 0 or more": self.drain_limit_s >= 0,
        }
        broken = [rule for rule, holds in checks.items() if not holds]
        if broken:
            raise ValueError(f"setting {self.name}: {'; '.join(broken)}")

    def bounded(self, replicas: int) -> int:
        """``replicas`` within the bounds."""
        return max(self.min_replicas, min(self.max_replicas, replicas))
