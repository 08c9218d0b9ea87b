"""Requests that miss their objective because their replica happens to be busy, though the pool as a whole is not.

A router that deals requests out one after the other gives each of ``n`` replicas every ``n``-th: what comes to
one is the more regular the more there are. Each is then a queue of its own, whose waiting times follow from how
busy it is, how regularly work comes and how unequal prompts are (the approximations of Kraemer and
Langenbach-Belz for GI/G/1). A request is late when its wait and its own prefill exceed the objective.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

BUSIEST = 0.999
NEGLIGIBLE = 1e-6
"""A share of late requests that is as good as none; larger sizes are not looked at."""
STEEP = 1.3
"""How much faster waiting for a slot falls off than behind one server (fitted: 1 to 2)."""


class Queue(Protocol):
    """Requests that wait at one replica of several."""

    def late(self, busy: float, replicas: float, behind_s: float = 0.0) -> float:
        """The share of requests that are late.

        Args:
            busy: of a replica's time, the share that is taken.
            behind_s: how long requests wait besides, for work that came before.
        """


class Prompt(NamedTuple):
    """Some of the requests: the time of their prefill, and their share of all."""

    prefill_s: float
    share: float


@dataclass(frozen=True)
class Prompts:
    """What prompts are like; those that cannot meet the objective on an idle replica do not count as late."""

    sizes: tuple[Prompt, ...]
    objective_s: float
    """For wait and prefill together."""
    bursts: float = 1.0
    """Variance of the requests that come in a second divided by their mean: 1 where they come independently."""
    left: tuple[tuple[float, float], ...] = field(init=False)
    """(what a prompt leaves of the objective, share), of those that can meet it."""
    mean_s: float = field(init=False)
    unequal: float = field(init=False)
    """Squared coefficient of variation of prefill times."""

    def __post_init__(self) -> None:
        mean = sum(size * share for size, share in self.sizes)
        square = sum(size * size * share for size, share in self.sizes)
        left = ((self.objective_s - size, share) for size, share in self.sizes)
        object.__setattr__(self, "left", tuple(one for one in left if one[0] > 0))
        object.__setattr__(self, "mean_s", mean)
        object.__setattr__(self, "unequal", max(0.0, square / mean**2 - 1) if mean else 0.0)

    def late(self, busy: float, replicas: float, behind_s: float = 0.0) -> float:
        """See :class:`Queue`."""
        waits = rate = 0.0
        if busy > 0 and self.mean_s:
            waits, wait_s = self._wait(min(busy, BUSIEST), self.bursts / max(1.0, replicas))
            rate = 1 / wait_s
        late = 0.0
        for left_s, share in self.left:
            late += share if left_s <= behind_s else share * waits * math.exp((behind_s - left_s) * rate)
        return min(1.0, late)

    def _wait(self, busy: float, irregular: float) -> tuple[float, float]:
        """(share of requests that wait, how long those wait in the mean)."""
        unequal = self.unequal
        if irregular <= 1:
            waits = busy + (irregular - 1) * busy * (1 - busy) * (1 + irregular + busy * unequal) / (
                1 + busy * (unequal - 1) + busy**2 * (4 * irregular + unequal)
            )
            damped = math.exp(-2 * (1 - busy) / (3 * busy) * (1 - irregular) ** 2 / (irregular + unequal))
        else:
            waits = busy + (irregular - 1) * busy * (1 - busy) * 4 * busy / (
                irregular + busy**2 * (4 * irregular + unequal)
            )
            damped = math.exp(-(1 - busy) * (irregular - 1) / (irregular + 4 * unequal))
        wait_s = busy / (1 - busy) * (irregular + unequal) / 2 * self.mean_s * damped
        waits = min(1.0, max(1e-9, waits))
        return waits, max(1e-9, wait_s / waits)


@dataclass(frozen=True)
class Slotted:
    """Requests that wait for one of the slots of their replica: only when all are taken does one wait."""

    slots: float
    request_s: float
    """Replica-seconds that a request takes."""
    slack_s: float
    """How long one may wait."""

    def late(self, busy: float, replicas: float, behind_s: float = 0.0) -> float:
        """See :class:`Queue`; Sakasegawa's approximation of Erlang's formula."""
        if behind_s >= self.slack_s or busy >= 1:
            return 1.0
        if busy <= 0:
            return 0.0
        waits = busy if self.slots == 1 else busy ** (math.sqrt(2 * (self.slots + 1)) - 1)
        return waits * math.exp(-(1 / busy - 1) * (self.slack_s - behind_s) / self.request_s * STEEP)


class Busy(NamedTuple):
    """A queue, and what comes."""

    queue: Queue
    requests: float
    """A second."""
    work: float
    """Replica-seconds a second."""


@dataclass
class Waiting:
    """What may be busy; the worst counts."""

    queues: tuple[Busy, ...] = ()
    _known: dict[int, float] = field(default_factory=dict, compare=False, repr=False)
    _enough: float = field(default=math.inf, compare=False, repr=False)

    def misses(self, replicas: int) -> float:
        """Requests a second that miss their objective so."""
        if not replicas or replicas > self._enough:
            return 0.0
        if replicas not in self._known:
            late = [one.queue.late(one.work / replicas, replicas) for one in self.queues]
            if max(late, default=0.0) < NEGLIGIBLE:
                self._enough = replicas
            rates = (one.requests * share for one, share in zip(self.queues, late, strict=True))
            self._known[replicas] = max(rates, default=0.0)
        return self._known[replicas]
