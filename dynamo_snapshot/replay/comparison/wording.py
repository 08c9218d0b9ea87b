"""Verdicts in plain sentences."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from dynamo_snapshot.replay.comparison.rows import Scene
from dynamo_snapshot.replay.comparison.verdict import WANTED_SETTINGS, Comparison, Verdict

MOST_NAMED = 3


def verdict_sentence(verdict: Verdict) -> str:
    """Whether this setting of ours stands, against whom it does not, and who cannot be told apart from it."""
    ours = verdict.ours
    what = f"{ours.name}: {ours.attainment.mean * 100:.1f} % at {ours.gpu_hours.mean:.2f} GPU-hours"
    if verdict.beaten_by:
        return f"{what} is beaten by {_names(verdict.beaten_by)}."
    level = f"; cannot be told apart from {_names(verdict.level_with)}" if verdict.level_with else ""
    return f"{what} is beaten by no rival{level}."


def scene_sentence(scene: Scene, counts: Mapping[Scene, tuple[int, int]]) -> str:
    """How many of our settings stand in a scene."""
    stand, of = counts[scene]
    enough = "enough" if stand >= WANTED_SETTINGS else f"{WANTED_SETTINGS} are wanted"
    return f"{scene}: {stand} of {of} settings of ours are beaten by no rival ({enough})."


def _names(found: Sequence[Comparison]) -> str:
    strongest = sorted(found, key=lambda comparison: -comparison.attainment.mean)
    named = [
        f"{comparison.rival.name} ({comparison.rival.start}, {comparison.rival.attainment.mean * 100:.1f} % at "
        f"{comparison.rival.gpu_hours.mean:.2f})"
        for comparison in strongest[:MOST_NAMED]
    ]
    if len(found) > MOST_NAMED:
        named.append(f"{len(found) - MOST_NAMED} more")
    return ", ".join(named)
