"""What a replica's states and phases look like: a colour, and a pattern for who cannot tell the colours apart."""

from __future__ import annotations

from dynamo_snapshot.pages.svg import BLUE, GREEN, GREY, ORANGE, PURPLE, SKY, VERMILION, YELLOW, element


def _pattern(name: str, ground: str, figure: str, turn: int = 0) -> str:
    content = element("rect", width=6, height=6, fill=ground) + figure
    return element(
        "pattern", content, id=f"fill-{name}", width=6, height=6, patternUnits="userSpaceOnUse",
        patternTransform=f"rotate({turn})",
    )  # fmt: skip


def _line(data: str, colour: str, width: float) -> str:
    return element("path", d=data, stroke=colour, stroke_width=width)


PATTERNS = "".join(
    (
        _pattern("starting", YELLOW, _line("M0 0V6", "#8a7d00", 2), 45),
        _pattern("restoring", ORANGE, _line("M0 0V6", "#8a5a00", 2), -45),
        _pattern("parked", SKY, element("circle", cx=3, cy=3, r=1.4, fill=BLUE)),
        _pattern("resuming", SKY, _line("M0 3H6", BLUE, 1.5)),
        _pattern("draining", PURPLE, element("circle", cx=3, cy=3, r=1.4, fill="#fff")),
        _pattern("failed", VERMILION, _line("M0 0V6M0 0H6", "#fff", 1.2)),
        _pattern("unaccounted", "none", _line("M0 0V6", GREY, 2), 45),
    )
)
"""Definitions that fills below refer to."""

STATE_FILLS = {
    "ordered": GREY,
    "starting": "url(#fill-starting)",
    "restoring": "url(#fill-restoring)",
    "parked": "url(#fill-parked)",
    "resuming": "url(#fill-resuming)",
    "serving": GREEN,
    "draining": "url(#fill-draining)",
    "failed": "url(#fill-failed)",
}
PHASE_COLOURS = (BLUE, ORANGE, GREEN, SKY, PURPLE, YELLOW, VERMILION)
