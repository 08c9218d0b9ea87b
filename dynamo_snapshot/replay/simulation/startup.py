"""How long a replica takes from its order to serving, drawn anew for each start.

A restore's time is lognormal about its median with the spread of the measured ones (Qwen3-8B on an H200:
median 2.20 s, p95 2.60 s, ``docs/benchmarks``), and so is a cold start's. A restore that fails does so when
it would have been done, and the replica is cold-started after it, as the fleet does.
"""

from __future__ import annotations

import math
import random
import re
import statistics
from typing import NamedTuple

import msgspec

from dynamo_snapshot.model import Way

SPREAD = 0.10
"""Standard deviation of the logarithm: ln(2.60 / 2.20) / 1.645."""
COLD_S = 45.0
"""What a failed restore falls back to where nothing else is said."""

_NORMAL = statistics.NormalDist()
_NUMBER = r"\d+(?:\.\d+)?"
_SHORT = re.compile(rf"(?P<way>restore|cold)-(?P<seconds>{_NUMBER})s")
_LONG = re.compile(rf"(?P<way>restore|cold)\((?P<seconds>{_NUMBER})(?P<rest>(?:,\w+={_NUMBER})*)\)")


class Attempt(NamedTuple):
    """One order of one way; a failed one is followed by another."""

    way: Way
    seconds: float
    succeeds: bool


class StartupModel(msgspec.Struct, frozen=True, kw_only=True):
    """Start-up times of one pool on one kind of node."""

    name: str
    restore_s: float | None = None
    """Median; None: there is no snapshot, every start is cold."""
    cold_s: float = COLD_S
    """Median."""
    failures: float = 0.0
    """Share of restores that fail, 0 to 1."""
    spread: float = SPREAD
    """Standard deviation of the logarithm of each time; 0: every start takes the median."""

    def __post_init__(self) -> None:
        checks = {
            "restore_s must be a positive number": self.restore_s is None or 0 < self.restore_s < math.inf,
            "cold_s must be 0 or more": 0 <= self.cold_s < math.inf,
            "failures must be from 0 to 1": 0 <= self.failures <= 1,
            "spread must be from 0 to 2": 0 <= self.spread <= 2,
        }
        broken = [rule for rule, holds in checks.items() if not holds]
        if broken:
            raise ValueError(f"start-up model {self.name}: {'; '.join(broken)}")

    def draw(self, dice: random.Random) -> tuple[Attempt, ...]:
        """Returns what one start goes through, the last attempt being the one that succeeds."""
        restore = self._time(self.restore_s, dice) if self.restore_s is not None else None
        fails = dice.random() < self.failures
        cold = Attempt(Way.COLD_START, self._time(self.cold_s, dice), True)
        if restore is None:
            return (cold,)
        if fails:
            return (Attempt(Way.RESTORE, restore, False), cold)
        return (Attempt(Way.RESTORE, restore, True),)

    @property
    def typical_s(self) -> float:
        """The median of a start that goes well."""
        return self.cold_s if self.restore_s is None else self.restore_s

    def quantile_s(self, share: float) -> float:
        """Seconds within which ``share`` (0 to 1, exclusive) of the starts that go well are done."""
        return self.typical_s * math.exp(self.spread * _NORMAL.inv_cdf(share))

    def _time(self, median: float, dice: random.Random) -> float:
        return median * math.exp(self.spread * dice.gauss(0.0, 1.0))


def startup_model(spec: str) -> StartupModel:
    """Reads ``restore-2s``, ``cold-45s``, or ``restore(2,cold=45,failures=0.02,spread=0.1)`` and ``cold(45)``.

    Raises:
        ValueError: says what was expected.
    """
    text = spec.replace(" ", "")
    found = _SHORT.fullmatch(text) or _LONG.fullmatch(text)
    if found is None:
        raise ValueError(
            f"start-up model {spec!r}: expected restore-<seconds>s, cold-<seconds>s, "
            "restore(<seconds>,cold=<seconds>,failures=<share>,spread=<number>) or cold(<seconds>,spread=<number>)"
        )
    settings = dict(setting.split("=") for setting in (found.groupdict().get("rest") or "").split(",") if setting)
    restores = found["way"] == "restore"
    unknown = sorted(settings.keys() - ({"cold", "failures", "spread"} if restores else {"spread"}))
    if unknown:
        raise ValueError(f"start-up model {spec!r}: {unknown[0]} is not known for {found['way']}")
    seconds = float(found["seconds"])
    return StartupModel(
        name=text,
        restore_s=seconds if restores else None,
        cold_s=float(settings.get("cold", COLD_S)) if restores else seconds,
        failures=float(settings.get("failures", 0.0)),
        spread=float(settings.get("spread", SPREAD)),
    )
