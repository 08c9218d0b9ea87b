"""Who beats whom, from rows alone: pure."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from dynamo_snapshot.replay.comparison.estimate import Estimate, difference, estimate
from dynamo_snapshot.replay.comparison.rows import CEILING, OURS, Row, Scene, Start, scenes

WANTED_SETTINGS = 3
"""So many settings of our one cost knob must stand unbeaten."""


@dataclass(frozen=True)
class Point:
    """One policy, one setting of it, one way of starting, in one scene: all its seeds."""

    policy: str
    knob: str
    start: Start
    startup: str
    rows: tuple[Row, ...]

    @property
    def name(self) -> str:
        return self.rows[0].spec

    @property
    def attainments(self) -> list[float]:
        return [row.ttft_attainment for row in self.rows]

    @property
    def hours(self) -> list[float]:
        return [row.gpu_hours for row in self.rows]

    @property
    def attainment(self) -> Estimate:
        return estimate(self.attainments)

    @property
    def gpu_hours(self) -> Estimate:
        return estimate(self.hours)

    def mean(self, field: str) -> float:
        """The mean over the seeds of one of :class:`Row`'s numbers; infinite where one is None."""
        values = [getattr(row, field) for row in self.rows]
        return sum(math.inf if value is None else float(value) for value in values) / len(values)


@dataclass(frozen=True)
class Comparison:
    """A rival beside one setting of ours; both differences are positive where the rival is better."""

    rival: Point
    attainment: Estimate
    """Rival less ours."""
    gpu_hours: Estimate
    """Ours less rival."""

    @property
    def beats(self) -> bool:
        """At least as good in both, and better in one of them by more than the seeds' interval."""
        return self.attainment.mean >= 0 and self.gpu_hours.mean >= 0 and self._better_in_one

    @property
    def contests(self) -> bool:
        """Better in one beyond the interval, and worse in the other only within it: more seeds would tell."""
        return not self.beats and self._better_in_one and not self._worse_in_one

    @property
    def level(self) -> bool:
        """Within the interval in both."""
        return not self._better_in_one and not self._worse_in_one

    @property
    def _better_in_one(self) -> bool:
        return self.attainment.above_zero or self.gpu_hours.above_zero

    @property
    def _worse_in_one(self) -> bool:
        return self.attainment.below_zero or self.gpu_hours.below_zero


@dataclass(frozen=True)
class Verdict:
    """One setting of our knob in one scene."""

    scene: Scene
    ours: Point
    beaten_by: tuple[Comparison, ...]
    contested_by: tuple[Comparison, ...]
    level_with: tuple[Comparison, ...]
    rivals: int
    """How many it was compared with; 0: that it stands says nothing."""

    @property
    def stands(self) -> bool:
        return not self.beaten_by

    @property
    def clear(self) -> bool:
        """Stands, and every rival is proven worse in one of the two: wide intervals do not help."""
        return not self.beaten_by and not self.contested_by and not self.level_with


def points(rows: Iterable[Row]) -> tuple[Point, ...]:
    """The rows of one scene, seeds put together."""
    found: dict[tuple[str, str, str], list[Row]] = {}
    for row in rows:
        found.setdefault((row.policy, row.knob, row.startup), []).append(row)
    return tuple(
        Point(policy, knob, members[0].start, startup, tuple(sorted(members, key=lambda row: row.seed)))
        for (policy, knob, startup), members in found.items()
    )


def verdicts(rows: Iterable[Row], ours: str = OURS) -> tuple[Verdict, ...]:
    """One verdict a scene and setting of our knob: is there any rival, static ones included, that beats it?

    Rivals count with cold starts and with restores alike; the ceiling is none.
    """
    return tuple(verdict for scene, members in scenes(rows).items() for verdict in _of_scene(scene, members, ours))


class Count(NamedTuple):
    """Settings of ours in one scene: how many stand, how many of them clearly, of how many, among how many rivals."""

    stand: int
    clear: int
    of: int
    rivals: int


def unbeaten(found: Sequence[Verdict]) -> dict[Scene, Count]:
    """Counts the settings of ours that stand, by scene."""
    counts: dict[Scene, Count] = {}
    for verdict in found:
        before = counts.get(verdict.scene, Count(0, 0, 0, 0))
        counts[verdict.scene] = Count(
            before.stand + verdict.stands, before.clear + verdict.clear, before.of + 1, verdict.rivals
        )
    return counts


def _of_scene(scene: Scene, members: Sequence[Row], ours: str) -> Iterable[Verdict]:
    there = points(members)
    rivals = [point for point in there if point.policy not in (ours, CEILING)]
    for point in there:
        if point.policy != ours or (point.start is Start.COLD and scene.restore_s is not None):
            continue
        found = [compare(rival, point) for rival in rivals]
        yield Verdict(
            scene,
            point,
            beaten_by=tuple(comparison for comparison in found if comparison.beats),
            contested_by=tuple(comparison for comparison in found if comparison.contests),
            level_with=tuple(comparison for comparison in found if comparison.level),
            rivals=len(rivals),
        )


def compare(rival: Point, ours: Point) -> Comparison:
    return Comparison(rival, difference(rival.attainments, ours.attainments), difference(ours.hours, rival.hours))
