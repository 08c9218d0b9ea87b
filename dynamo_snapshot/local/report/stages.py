"""Where the time of one restore went, in the words of a reader: the pipeline's phases, and the worker's own account."""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import Any

from dynamo_snapshot.agent.pipelines.phases import PIPELINES, RESTORE, Share


class Stage(StrEnum):
    """In the order in which they happen."""

    HOUSE = "house"
    """All that this project does around the others' work: admission, house, adoption, release."""
    CRIU = "CRIU"
    CUDA = "CUDA"
    WEIGHTS = "weights"
    """What the worker waited for them; a loader fills them beside CRIU and CUDA."""
    WAKE = "wake"
    """All else from the worker's release to its self-test."""
    SELF_TEST = "self-test"
    UNACCOUNTED = "unaccounted"


_STAGE_OF_SHARE = {
    Share.OWN: Stage.HOUSE,
    Share.WAIT: Stage.HOUSE,
    Share.VERIFY: Stage.HOUSE,
    Share.CRIU: Stage.CRIU,
    Share.DRIVER: Stage.CUDA,
    Share.ENGINE: Stage.WAKE,
}
_STAGE_OF_PHASE = {spec.name: _STAGE_OF_SHARE[spec.share] for spec in PIPELINES[RESTORE]}
IN_THE_WORKER = {Stage.WEIGHTS: "weights_s", Stage.SELF_TEST: "answer_s"}
"""What an engine's evidence says of its own time, all of it within the wake."""


def stages(restore: Mapping[str, Any]) -> dict[Stage, float]:
    """Returns the seconds of each stage of a restore as ``bench restore`` writes it; they add up to its ``total_s``."""
    seconds = dict.fromkeys(Stage, 0.0)
    for name, spent in restore["phases"].items():
        if name in _STAGE_OF_PHASE:
            seconds[_STAGE_OF_PHASE[name]] += spent
    for stage, evidence in IN_THE_WORKER.items():
        spent = min(float(restore["evidence"].get(evidence, 0.0)), seconds[Stage.WAKE])
        seconds[stage] += spent
        seconds[Stage.WAKE] -= spent
    seconds[Stage.UNACCOUNTED] = max(0.0, restore["total_s"] - sum(seconds.values()))
    return seconds


def middle(row: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """Returns the restore in the middle of a row by its total; of two the faster; None where none succeeded."""
    ordered = sorted(row["restores"], key=lambda restore: float(restore["total_s"]))
    found: Mapping[str, Any] | None = ordered[(len(ordered) - 1) // 2] if ordered else None
    return found
