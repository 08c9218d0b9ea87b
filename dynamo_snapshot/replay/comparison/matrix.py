"""The whole matrix: every policy with every setting of its sweep, on every trace, restored and cold-started.

It is run in two rounds. In the first, ours and the ceiling run with all seeds and each rival with one; in the
second, each rival that came near ours, and each one's defaults, run with the seeds that are left. What is far
behind ours needs no interval.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import msgspec

from dynamo_snapshot.replay.comparison.halves import Half
from dynamo_snapshot.replay.comparison.rows import CEILING, OURS, Key, Row, scenes
from dynamo_snapshot.replay.comparison.runs import NO_START, Run, runs
from dynamo_snapshot.replay.comparison.sources import Source
from dynamo_snapshot.replay.comparison.verdict import Point, points
from dynamo_snapshot.replay.policies import catalog
from dynamo_snapshot.replay.simulation.setting import Setting

START_SETTINGS = ((2.0, 45.0), (8.0, 100.0))
"""Restore and cold-start times, seconds: a small model and a large one, as measured."""
VALUES_SHOWN = {OURS: ("miss_cost_s", "miss_cost_s="), "static": ("replicas", "")}
NEAR_ATTAINMENT = 0.02
NEAR_HOURS = 1.05
"""A rival is near one of ours if it attains at most so much less and costs at most so many times as much."""


@dataclass(frozen=True)
class Matrix:
    """What is to be run. ``policies`` are families; ``settings`` go by the name of the trace."""

    sources: Sequence[Source]
    half: Half
    policies: Sequence[str]
    seeds: int
    settings: Mapping[str, Setting]

    def first_round(self) -> tuple[Run, ...]:
        """Raises ``configuration_invalid`` for a policy that does not exist."""
        restores = [f"restore-{restore_s:g}s" for restore_s, _ in START_SETTINGS]
        colds = [f"cold-{cold_s:g}s" for _, cold_s in START_SETTINGS]
        bound = [policy for policy in self.policies if policy in (OURS, CEILING)]
        rivals = [policy for policy in self.policies if policy not in (OURS, CEILING)]
        return self._runs(bound, restores, self.seeds) + self._runs(rivals, restores + colds, 1)

    def second_round(self, rows: Iterable[Row]) -> tuple[Run, ...]:
        """All seeds of the rivals that ``rows`` of the first round show to be near ours."""
        near = contenders(rows)
        startups = sorted({startup for _, _, startup in near} - {NO_START})
        rivals = [policy for policy in self.policies if policy not in (OURS, CEILING)]
        return tuple(
            run
            for run in self._runs(rivals, startups, self.seeds)
            if run.seed > 0 and (run.source.name, run.policy, run.startup) in near
        )

    def _runs(self, families: Sequence[str], startups: Sequence[str], seeds: int) -> tuple[Run, ...]:
        specs = [spec for family in families for spec in swept(family)]
        if not specs or not startups:
            return ()
        return runs(self.sources, self.half, specs, startups, seeds, self.settings)


def swept(policy: str) -> list[str]:
    """The settings of a policy's sweep; of ours and of a static fleet the default is called by its value too."""
    specs = catalog.sweep(policy)
    if policy not in VALUES_SHOWN:
        return specs
    knob, shown = VALUES_SHOWN[policy]
    default = f"{policy}({shown}{catalog.knobs(policy)[knob]})"
    return [default if spec == policy else spec for spec in specs]


def missing(wanted: Iterable[Run], there: Iterable[Row]) -> tuple[Run, ...]:
    """The runs of ``wanted`` that no row came from."""
    known: set[Key] = {row.key for row in there}
    return tuple(run for run in wanted if run.key not in known)


def in_each_setting(row: Row) -> tuple[Row, ...]:
    """``row`` once for each start setting that it belongs to."""
    return tuple(
        msgspec.structs.replace(row, restore_s=restore_s, cold_s=cold_s)
        for restore_s, cold_s in START_SETTINGS
        if row.restore_s in (None, restore_s) and row.cold_s in (None, cold_s)
    )


def contenders(rows: Iterable[Row]) -> set[tuple[str, str, str]]:
    """Trace, policy with settings, and start-up model of the rivals that need all seeds."""
    found = set()
    for scene, members in scenes(rows).items():
        there = points(members)
        ours = [point for point in there if point.policy == OURS]
        for point in there:
            if point.policy not in (OURS, CEILING) and (not point.knob or any(_near(point, one) for one in ours)):
                found.add((scene.trace, point.name, point.startup))
    return found


def _near(rival: Point, ours: Point) -> bool:
    return (
        rival.attainment.mean >= ours.attainment.mean - NEAR_ATTAINMENT
        and rival.gpu_hours.mean <= ours.gpu_hours.mean * NEAR_HOURS
    )
