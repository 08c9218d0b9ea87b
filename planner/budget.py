"""What is bought first when pools together want more GPUs than there are: a pure function.

Each pool keeps its minimum. Then, one replica at a time, the one that saves the most for its GPUs, by the misses
that it averts less what it costs, while there are GPUs for it. Pools that predict nothing come after those that
save, in turn by the share of their wish that they have.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from planner.outlook import Choice

Name = TypeVar("Name", bound=Hashable)


@dataclass(frozen=True)
class Want:
    """One pool's wish."""

    replicas: int
    minimum: int
    gpus: int
    """Of one replica, at least 1."""
    choices: Sequence[Choice] = ()
    """Sizes with predicted misses, the smallest first; empty: none were predicted."""
    miss_cost_s: float = 1.0
    """GPU-seconds that a miss is worth."""
    replica_cost: float = 0.0
    """GPU-seconds that a replica costs in a second; 0: misses alone count."""

    @property
    def least(self) -> int:
        """What it is given whatever the budget is."""
        return min(self.replicas, self.minimum)

    def misses(self, replicas: int) -> float | None:
        """Predicted requests a second that miss their objective with ``replicas``; None: not predicted."""
        known = [choice.misses for choice in self.choices if choice.replicas <= replicas]
        return known[-1] if known else (self.choices[0].misses if self.choices else None)


def allocate(wants: Mapping[Name, Want], gpus: int) -> dict[Name, int]:
    """Returns replicas by pool: what is wanted where ``gpus`` are enough, else what saves the most.

    Minimums are given even where they alone exceed the budget: they are the user's word, as the budget is, and
    a pool without a replica serves nobody.
    """
    given = {name: want.least for name, want in wants.items()}
    left = gpus - sum(given[name] * want.gpus for name, want in wants.items())
    while True:
        open_wishes = [name for name, want in wants.items() if given[name] < want.replicas and want.gpus <= left]
        if not open_wishes:
            return given
        best = max(open_wishes, key=lambda name: (_worth(wants[name], given[name]), -_share(wants[name], given[name])))
        given[best] += 1
        left -= wants[best].gpus


def _worth(want: Want, replicas: int) -> float:
    """GPU-seconds a second that more replicas save for each GPU, at the best step from here; 0: not predicted."""
    now = want.misses(replicas)
    if now is None:
        return 0.0
    averted = max((now - (want.misses(size) or 0.0)) / (size - replicas) for size in _steps(want, replicas))
    return (want.miss_cost_s * averted - want.replica_cost) / want.gpus


def _steps(want: Want, replicas: int) -> set[int]:
    between = {choice.replicas for choice in want.choices if replicas < choice.replicas < want.replicas}
    return between | {want.replicas}


def _share(want: Want, replicas: int) -> float:
    return replicas / want.replicas
