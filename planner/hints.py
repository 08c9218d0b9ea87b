"""What to have ready beside what serves: from proposals to hints for the fleet, pure.

A replica that is parked, or a snapshot that lies in memory, costs next to nothing beside one that serves, and
makes the next start faster. So both are for what may come but is not worth a replica that waits for it: futures
that the forecast knows and the proposal leaves to chance.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from types import MappingProxyType

from dynamo_snapshot.model import PoolHint, ScalingHint
from planner.forecast import Forecast
from planner.observation import Role
from planner.policy import Proposal
from planner.window import NeedWindow

PARKED_SHARE = 0.1
"""A parked replica is taken to cost this share of one that serves: it holds host memory, and no GPU to itself."""
KEPT_S = 60.0
"""What was worth having ready within this time is kept ready: parking and giving up has its own cost."""
LASTS_S = 60.0
"""A hint ends by itself when its planner has gone."""
AGAIN_S = 20.0
"""One that has not changed is told again, for a fleet controller that has begun anew."""


class Hinting(StrEnum):
    """What is asked for beside the decisions."""

    NONE = "none"
    PREFETCH = "prefetch"
    """Snapshots read into memory when a start is probable."""
    PARK = "park"
    """That, and parked replicas for what may come beyond what serves."""


@dataclass(frozen=True)
class HintMemory:
    """What is carried from one tick to the next."""

    windows: Mapping[Role, NeedWindow] = field(default_factory=lambda: MappingProxyType({}))
    hints: Mapping[Role, PoolHint] = field(default_factory=lambda: MappingProxyType({}))
    told_at: float | None = None
    """When a hint was last given; None: never."""


@dataclass(frozen=True)
class HintPolicy:
    """The user's choice, and how many may be parked.

    Raises:
        ValueError: where ``parked_most`` is negative.
    """

    hinting: Hinting = Hinting.NONE
    miss_replica_s: Mapping[Role, float] = field(default_factory=lambda: MappingProxyType({}))
    """Seconds of one replica that a missed request is worth, as in each role's policy."""
    parked_least: Mapping[Role, int] = field(default_factory=lambda: MappingProxyType({}))
    """What the pool keeps parked by its own setting: a hint never asks for fewer."""
    parked_most: int = 2

    def __post_init__(self) -> None:
        if self.parked_most < 0:
            raise ValueError("parked_most must be 0 or more")

    def hint(
        self, proposals: Mapping[Role, Proposal], memory: HintMemory, now: float, wall: float
    ) -> tuple[ScalingHint | None, HintMemory]:
        """Returns the hint to give now, if it says anything new or the last one was long ago.

        Args:
            now: seconds of a clock that never goes back.
            wall: seconds since the epoch, for the hint.
        """
        if self.hinting is Hinting.NONE:
            return None, memory
        windows, hints = dict(memory.windows), dict(memory.hints)
        for role, proposal in proposals.items():
            if proposal.forecast is None or proposal.replicas is None:
                continue  # what is unknown changes nothing
            more = self.beyond(proposal.forecast, self.miss_replica_s.get(role, 0.0)) - proposal.replicas
            windows[role] = windows.get(role, NeedWindow()).add(now, max(0, more), KEPT_S)
            hints[role] = self._pool_hint(role, windows[role].highest)
        changed = hints != dict(memory.hints)
        memory = replace(memory, windows=windows, hints=hints)
        if not hints or not (changed or memory.told_at is None or now - memory.told_at >= AGAIN_S):
            return None, memory
        hint = ScalingHint(
            at=wall, expires_at=wall + LASTS_S, prefill=hints.get(Role.PREFILL), decode=hints.get(Role.DECODE)
        )
        return hint, replace(memory, told_at=now)

    def beyond(self, forecast: Forecast, miss_replica_s: float) -> int:
        """The size that would be worth having if a further replica cost :data:`PARKED_SHARE` of one that serves."""
        cheap = min(
            forecast.choices,
            key=lambda choice: (PARKED_SHARE * choice.replicas + miss_replica_s * choice.misses, choice.replicas),
        )
        return max(cheap.replicas, forecast.rise, forecast.keep)

    def _pool_hint(self, role: Role, more: int) -> PoolHint:
        if self.hinting is Hinting.PREFETCH:
            return PoolHint(prefetch=more > 0)
        least = self.parked_least.get(role, 0)
        return PoolHint(parked=max(least, min(self.parked_most, more)), prefetch=more > 0)


NO_HINTS = HintPolicy()
