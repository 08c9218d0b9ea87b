"""Verdicts in plain sentences."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from dynamo_snapshot.replay.comparison.rows import Scene, Start
from dynamo_snapshot.replay.comparison.verdict import WANTED_SETTINGS, Comparison, Count, Point, Verdict

MOST_NAMED = 3


def verdict_sentence(verdict: Verdict) -> str:
    """Whether this setting of ours stands, against whom it does not, and who cannot be told apart from it."""
    ours = verdict.ours
    what = f"{ours.name}: {ours.attainment.mean * 100:.1f} % at {ours.gpu_hours.mean:.2f} GPU-hours"
    if verdict.beaten_by:
        return f"{what} is beaten by {_names(verdict.beaten_by)}."
    if not verdict.rivals:
        return f"{what}, compared with no rival."
    parts = [f"{what} is beaten by no rival"]
    if verdict.contested_by:
        parts.append(f"these seeds leave open whether by {_names(verdict.contested_by)}")
    if verdict.level_with:
        parts.append(f"as good within the seeds' interval is {_names(verdict.level_with)}")
    return "; ".join(parts) + "."


def scene_sentence(scene: Scene, counts: Mapping[Scene, Count]) -> str:
    """How many of our settings stand in a scene."""
    count = counts[scene]
    if not count.rivals:
        were = "1 setting of ours was" if count.of == 1 else f"{count.of} settings of ours were"
        return f"{scene}: {were} compared with no rival."
    enough = "enough" if count.stand >= WANTED_SETTINGS else f"{WANTED_SETTINGS} are wanted"
    return (
        f"{scene}: {count.stand} of {count.of} settings of ours are beaten by no rival ({enough}), "
        f"{count.clear} of them beyond the seeds' doubt."
    )


def replicas(count: str) -> str:
    """So many replicas, by a fleet's knob."""
    return f"{count} {'replica' if count == '1' else 'replicas'}"


def _names(found: Sequence[Comparison]) -> str:
    strongest = sorted(found, key=lambda comparison: -comparison.attainment.mean)
    named = [_name(comparison.rival) for comparison in strongest[:MOST_NAMED]]
    if len(found) > MOST_NAMED:
        named.append(f"{len(found) - MOST_NAMED} more")
    return ", ".join(named)


def _name(rival: Point) -> str:
    way = "" if rival.start is Start.NONE else f"{rival.startup}, "
    return f"{rival.name} ({way}{rival.attainment.mean * 100:.1f} % at {rival.gpu_hours.mean:.2f})"
