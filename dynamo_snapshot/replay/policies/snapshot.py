"""``snapshot``: this project's own policy, the very object that Dynamo's planner runs.

It is shown ``Signals.observation`` alone: what the planner plugin sees live. Its knobs are the policy's own
fields; bounds and objectives are the setting's, as an operator would give them.
"""

from __future__ import annotations

from dataclasses import fields
from typing import Any, get_type_hints

from dynamo_snapshot.replay.simulation.setting import Setting
from dynamo_snapshot.replay.simulation.signals import Signals
from planner.observation import Role
from planner.policy import LoadPolicy, Memory

TICK_S = 1.0
"""The planner's default."""
_FROM_SETTING = frozenset({"role", "min_replicas", "max_replicas", "ttft_objective_s", "itl_objective_s"})


def knobs() -> dict[str, tuple[type, object]]:
    """The policy's knobs: type and default by name."""
    types = get_type_hints(LoadPolicy)
    own = {
        field.name: (types[field.name], field.default)
        for field in fields(LoadPolicy)
        if field.name not in _FROM_SETTING
    }
    return {**own, "tick_s": (float, TICK_S)}


class Snapshot:
    """Runs the policy on observations.

    Raises:
        ValueError: for a knob that is wrong.
    """

    def __init__(self, setting: Setting, *, name: str = "snapshot", tick_s: float = TICK_S, **values: Any) -> None:
        if not 0 < tick_s <= 60:
            raise ValueError("tick_s must be above 0 and at most 60")
        self.name = name
        self.interval_s = tick_s
        # As planner.config does it: metrics are stale after three ticks without news.
        values.setdefault("stale_after_s", max(5.0, 3 * tick_s))
        self._policy = LoadPolicy(
            role=Role.DECODE,
            min_replicas=setting.min_replicas,
            max_replicas=setting.max_replicas,
            ttft_objective_s=setting.ttft_objective_s,
            itl_objective_s=setting.itl_objective_s,
            **values,
        )
        self._memory = Memory()

    def decide(self, signals: Signals) -> int | None:
        proposal, self._memory = self._policy.decide(signals.observation, self._memory, signals.now)
        return proposal.replicas
