"""How each policy looks in a plot: a colour and a shape of its own; filled: restored, hollow: cold-started."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from dynamo_snapshot.pages.svg import BLUE, GREEN, GREY, ORANGE, PURPLE, SKY, VERMILION, element
from dynamo_snapshot.replay.comparison.rows import CEILING, OURS, Start

STATIC = "static"
OLIVE = "#9A8B00"
"""Okabe and Ito's yellow, dark enough for a mark on white."""

_SHAPES = {
    "circle": "M-4.5 0a4.5 4.5 0 1 0 9 0a4.5 4.5 0 1 0-9 0Z",
    "square": "M-4-4H4V4H-4Z",
    "diamond": "M0-5.5L5.5 0L0 5.5L-5.5 0Z",
    "up": "M0-5L5 4H-5Z",
    "down": "M0 5L5-4H-5Z",
    "cross": "M-5-2H-2V-5H2V-2H5V2H2V5H-2V2H-5Z",
    "hexagon": "M-5 0L-2.5-4.5H2.5L5 0L2.5 4.5H-2.5Z",
    "left": "M-5.5 0L4-5V5Z",
    "right": "M5.5 0L-4-5V5Z",
    "bar": "M-2-5H2V5H-2Z",
    "star": "M0-7L1.8-2.2L6.7-2.2L2.8 .9L4.1 5.7L0 2.9L-4.1 5.7L-2.8 .9L-6.7-2.2L-1.8-2.2Z",
}


@dataclass(frozen=True)
class Look:
    colour: str
    shape: str


_FIXED = {OURS: Look(BLUE, "circle"), STATIC: Look(GREY, "bar"), CEILING: Look("var(--ink)", "star")}
_RIVALS = (
    Look(VERMILION, "square"),
    Look(ORANGE, "diamond"),
    Look(GREEN, "up"),
    Look(PURPLE, "down"),
    Look(SKY, "cross"),
    Look(OLIVE, "hexagon"),
    Look(VERMILION, "left"),
    Look(GREEN, "right"),
)


def looks(policies: Sequence[str]) -> dict[str, Look]:
    """A look for each policy's name, the same in every plot of one set: ours, static and the ceiling are fixed."""
    rivals = sorted(set(policies) - set(_FIXED))
    found = {policy: _RIVALS[index % len(_RIVALS)] for index, policy in enumerate(rivals)}
    return {policy: look for policy, look in (_FIXED | found).items() if policy in policies}


def mark(look: Look, x: float, y: float, start: Start = Start.RESTORE, tip: str | None = None) -> str:
    """The mark at ``x``, ``y``; with a ``tip`` it answers when pointed at."""
    hollow = start is Start.COLD
    return element(
        "path",
        d=_SHAPES[look.shape],
        transform=f"translate({x:.1f} {y:.1f})",
        fill="var(--card)" if hollow else look.colour,
        fill_opacity=0.6 if hollow else None,
        stroke=look.colour,
        stroke_width=1.6 if hollow else 0.8,
        class_="tip" if tip else None,
        data_tip=tip,
        tabindex=0 if tip else None,
    )
