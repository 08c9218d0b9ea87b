"""``snapshot``: this project's own policy, the very object that Dynamo's planner runs.

It is shown ``Signals.observation`` alone: what the planner plugin sees live. Its knobs are the policy's own
fields; the bounds are the setting's.
"""

from __future__ import annotations

from dataclasses import MISSING, fields
from typing import Any, get_type_hints

from dynamo_snapshot.replay.simulation.signals import Signals
from planner.observation import Role
from planner.policy import LoadPolicy, Memory

TICK_S = 1.0
_GIVEN = frozenset({"role", "min_replicas", "max_replicas", "ttft_objective_s", "itl_objective_s"})


def knobs() -> dict[str, tuple[type, object]]:
    """The policy's knobs: type and default by name."""
    types = get_type_hints(LoadPolicy)
    return {
        field.name: (types[field.name], field.default)
        for field in fields(LoadPolicy)
        if field.name not in _GIVEN and field.default is not MISSING
    }


class Snapshot:
    """Runs the policy on observations.

    Raises:
        ValueError: for a knob that is wrong.
    """

    def __init__(
        self, min_replicas: int, max_replicas: int, *, name: str = "snapshot", tick_s: float = TICK_S, **values: Any
    ) -> None:
        self.name = name
        self.interval_s = tick_s
        self._policy = LoadPolicy(role=Role.DECODE, min_replicas=min_replicas, max_replicas=max_replicas, **values)
        self._memory = Memory()

    def decide(self, signals: Signals) -> int | None:
        proposal, self._memory = self._policy.decide(signals.observation, self._memory, signals.now)
        return proposal.replicas
