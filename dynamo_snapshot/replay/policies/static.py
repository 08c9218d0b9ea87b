"""``static``: always the same number of replicas; what most people run, and the real rival."""

from __future__ import annotations

from dataclasses import dataclass

from dynamo_snapshot.replay.policies.knobs import check
from dynamo_snapshot.replay.simulation.signals import Signals


@dataclass(frozen=True)
class StaticKnobs:
    replicas: int = 4

    def __post_init__(self) -> None:
        check({"replicas must be at least 1": self.replicas >= 1})


class Static:
    """Asks for ``replicas``, whatever happens."""

    def __init__(self, knobs: StaticKnobs = StaticKnobs(), *, name: str = "static") -> None:
        self.name = name
        self.interval_s = 60.0
        self.knobs = knobs

    def decide(self, signals: Signals) -> int | None:
        return self.knobs.replicas
