"""What the policy sees: plain values, whatever Dynamo version and transport brought them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from types import MappingProxyType


class Role(StrEnum):
    """Dynamo's two sub-components; *decode* also stands for aggregated workers."""

    DECODE = "decode"
    PREFILL = "prefill"


@dataclass(frozen=True, slots=True)
class EngineSample:
    """The newest forward-pass metrics of one data-parallel rank of one worker.

    ``running`` and ``queued`` are requests, the other counts tokens or requests as they say; each is None
    where the message could not be read, lacked it or held something that is not a count (NaN, negative,
    another schema version).
    """

    worker_id: str
    dp_rank: int
    sequence: int
    running: float | None
    queued: float | None
    pass_s: float | None = None
    """Seconds that the newest forward pass took; 0 where the engine has told that it is idle."""
    prefill_tokens: float | None = None
    """Tokens that were prefilled in that pass."""
    prefill_kv_tokens: float | None = None
    decode_requests: float | None = None
    decode_kv_tokens: float | None = None
    """Context of all requests that were decoded in that pass."""
    queued_tokens: float | None = None
    """Prompt tokens of requests that wait for their prefill."""


@dataclass(frozen=True)
class Starting:
    """A replica on its way: not in discovery yet."""

    way: str
    """``restore``, ``cold_start`` or ``wake``."""
    age_s: float
    """Seconds since it was ordered."""


@dataclass(frozen=True)
class PoolView:
    """What a fresh FleetStatus says of this role's pool."""

    target: int
    achievable: int
    unachievable_reason: str | None = None
    not_serving: frozenset[str] = frozenset()
    """Worker ids the fleet knows and that do not serve: on their way, draining, stopped, failed."""
    discovery_known: bool = True
    starting: tuple[Starting, ...] = ()
    start_times: Mapping[str, tuple[float, ...]] = field(default_factory=lambda: MappingProxyType({}))
    """By way: measured seconds from order to serving, newest last."""
    parked: int = 0
    """Replicas that are ready to be woken."""

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
