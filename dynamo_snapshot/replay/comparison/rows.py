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
    NONE = "none"
    """They were there from the beginning."""


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
    """The start-up model, by name; ``none`` where nothing is started."""
    restore_s: float | None
    """None: the row stands beside every restore time."""
    cold_s: float | None
    """None: likewise."""
    seed: int
    requests: int
    ttft_attainment: float
    itl_attainment: float
    both_attainment: float
    ttft_p50_s: float | None
    ttft_p95_s: float | None
    ttft_p99_s: float | None
    """None: that request never had a token."""
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
        return spec_of(self.policy, self.knob)

    @property
    def key(self) -> Key:
        return Key(self.trace, self.half, self.spec, self.startup, self.seed)


class Key(msgspec.Struct, frozen=True, order=True):
    """What makes two rows the same run; one run may stand in several start settings."""

    trace: str
    half: str
    policy: str
    startup: str
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


def spec_of(policy: str, knob: str) -> str:
    return f"{policy}({knob})" if knob else policy


def scenes(rows: Iterable[Row]) -> dict[Scene, tuple[Row, ...]]:
    """Rows by what they are compared in, in the order of their first appearance.

    A row without a restore time or a cold-start time stands in each setting of its trace that it fits.
    """
    found: dict[Scene, list[Row]] = {}
    for row in rows:
        found.setdefault(Scene(row.trace, row.half, row.restore_s, row.cold_s), []).append(row)
    kept = {scene: list(members) for scene, members in found.items() if _is_setting(scene, found)}
    for scene, members in found.items():
        for home in kept:
            if home != scene and scene not in kept and _fits(scene, home):
                kept[home] += members
    return {scene: tuple(members) for scene, members in kept.items()}


def _is_setting(scene: Scene, among: Iterable[Scene]) -> bool:
    """Whether no other scene of its trace says more."""
    return not any(_says(other) > _says(scene) and _fits(scene, other) for other in among)


def _says(scene: Scene) -> int:
    # A restore time says more than a cold-start time: cold starts stand beside restores, not restores beside them.
    return 2 * (scene.restore_s is not None) + (scene.cold_s is not None)


def _fits(scene: Scene, home: Scene) -> bool:
    same = (scene.trace, scene.half) == (home.trace, home.half)
    restores = scene.restore_s is None or scene.restore_s == home.restore_s
    return same and restores and (scene.cold_s is None or home.cold_s is None or scene.cold_s == home.cold_s)
