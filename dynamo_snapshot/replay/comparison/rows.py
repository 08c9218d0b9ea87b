"""One row a run: what was run, and what it came to. The rows of ``docs/benchmarks/policy.json``."""

from __future__ import annotations

from collections.abc import Iterable
from enum import StrEnum

import msgspec

OURS = "snapshot"
CEILING = "clairvoyant"
"""Sees the future: a bound, never a rival."""


class Start(StrEnum):
    """How the replicas of a run came to be."""

    RESTORE = "restore"
    COLD = "cold"


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """Shares are 0 to 1, times seconds. The start setting is ``restore_s`` and ``cold_s``; ``start`` says which
    of the two this policy's replicas took (a restore that fails goes on as a cold start)."""

    trace: str
    half: str
    """``first``, ``second`` or ``whole``."""
    policy: str
    """The family: ``knative-kpa``."""
    knob: str
    """Its settings where they differ from the defaults: ``target=8``; empty: the defaults."""
    start: Start
    startup: str
    """The start-up model, by name."""
    restore_s: float | None
    """None: nothing is restored in this setting."""
    cold_s: float | None
    """None: nothing is cold-started."""
    seed: int
    requests: int
    ttft_attainment: float
    itl_attainment: float
    both_attainment: float
    ttft_p50_s: float
    ttft_p95_s: float
    ttft_p99_s: float
    gpu_hours: float
    scalings: int
    """Changes of the size that was asked for."""
    wall_s: float = 0.0
    """How long the run took on this machine."""
    code: str = ""
    """Fingerprint of policies and simulation; rows of different code are not comparable."""

    @property
    def spec(self) -> str:
        """The policy as ``--policy`` takes it."""
        return f"{self.policy}({self.knob})" if self.knob else self.policy

    @property
    def key(self) -> Key:
        """What makes two rows the same run."""
        return Key(self.trace, self.half, self.spec, self.startup, self.restore_s, self.cold_s, self.seed)


class Key(msgspec.Struct, frozen=True, order=True):
    trace: str
    half: str
    policy: str
    startup: str
    restore_s: float | None
    cold_s: float | None
    seed: int


class Scene(msgspec.Struct, frozen=True):
    """What policies are compared in: one trace, one start setting."""

    trace: str
    half: str
    restore_s: float | None
    cold_s: float | None

    def __str__(self) -> str:
        times = [f"restore {self.restore_s:g} s"] if self.restore_s is not None else []
        times += [f"cold start {self.cold_s:g} s"] if self.cold_s is not None else []
        half = "" if self.half == "whole" else f", {self.half} half"
        return f"{self.trace}{half}: {', '.join(times) or 'no starts'}"


def family(spec: str) -> tuple[str, str]:
    """``knative-kpa(target=8)`` as policy and knob."""
    policy, _, rest = spec.partition("(")
    return policy.strip(), rest.rstrip().removesuffix(")").strip()


def scenes(rows: Iterable[Row]) -> dict[Scene, tuple[Row, ...]]:
    """Rows by what they are compared in, in the order of their first appearance.

    Cold starts of no particular restore time stand beside each restore time of their trace.
    """
    kept = tuple(rows)
    found: dict[Scene, list[Row]] = {}
    for row in kept:
        found.setdefault(Scene(row.trace, row.half, row.restore_s, row.cold_s), []).append(row)
    restored = [scene for scene in found if scene.restore_s is not None]
    for scene in [scene for scene in found if scene.restore_s is None]:
        homes = [home for home in restored if (home.trace, home.half) == (scene.trace, scene.half)]
        for home in homes:
            found[home] += found[scene]
        if homes:
            del found[scene]
    return {scene: tuple(members) for scene, members in found.items()}
