"""What the policy sees: plain values, whatever Dynamo version and transport brought them."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Role(StrEnum):
    """Dynamo's two sub-components; *decode* also stands for aggregated workers."""

    DECODE = "decode"
    PREFILL = "prefill"


@dataclass(frozen=True)
class EngineSample:
    """The newest forward-pass metrics of one data-parallel rank of one worker.

    ``running`` and ``queued`` are requests; either is None where the message could not be read or
    held something that is not a count (NaN, negative, another schema version).
    """

    worker_id: str
    dp_rank: int
    sequence: int
    running: float | None
    queued: float | None


@dataclass(frozen=True)
class PoolView:
    """What a fresh FleetStatus says of this role's pool."""

    target: int
    achievable: int
    unachievable_reason: str | None = None
    not_serving: frozenset[str] = frozenset()
    """Worker ids the fleet knows and that do not serve: draining, stopped, failed."""
    discovery_known: bool = True

    @property
    def limit(self) -> int | None:
        """The most replicas worth asking for; None: nothing stands in the way.

        Without an obstacle ``achievable`` merely repeats the present target and limits nothing.
        """
        if self.unachievable_reason is None and self.achievable >= self.target:
            return None
        return self.achievable


@dataclass(frozen=True)
class Observation:
    """One role at one tick. ``ready`` is the number of workers in discovery; None: unknown."""

    ready: int | None = None
    samples: tuple[EngineSample, ...] = ()
    pool: PoolView | None = None
    """None: there is no FleetStatus, or it is stale."""
