"""A few words of SVG: elements, a time axis, and colours that colour-blind readers can tell apart.

The palette is Okabe and Ito's (https://jfly.uni-koeln.de/color/); every meaning also has a pattern, a mark or a word.
"""

from __future__ import annotations

from dataclasses import dataclass
from html import escape

BLUE = "#0072B2"
SKY = "#56B4E9"
GREEN = "#009E73"
YELLOW = "#F0E442"
ORANGE = "#E69F00"
VERMILION = "#D55E00"
PURPLE = "#CC79A7"
GREY = "#9AA0A6"


def element(tag: str, content: str = "", /, **attributes: object) -> str:
    """``<tag a="b">content</tag>``; underscores in names become hyphens, None leaves an attribute out."""
    rendered = "".join(
        f' {name.rstrip("_").replace("_", "-")}="{escape(_number(value), quote=True)}"'
        for name, value in attributes.items()
        if value is not None
    )
    return f"<{tag}{rendered}>{content}</{tag}>" if content else f"<{tag}{rendered}/>"


def text(x: float, y: float, content: str, **attributes: object) -> str:
    return element("text", escape(content), x=x, y=y, **attributes)


def _number(value: object) -> str:
    return f"{value:.2f}".rstrip("0").rstrip(".") if isinstance(value, float) else str(value)


@dataclass(frozen=True)
class Scale:
    """A linear way from ``[low, high]`` to ``[start, end]``."""

    low: float
    high: float
    start: float
    end: float

    def __call__(self, value: float) -> float:
        span = self.high - self.low
        share = (value - self.low) / span if span > 0 else 0.0
        return self.start + min(1.0, max(0.0, share)) * (self.end - self.start)

    def ticks(self, about: int = 8) -> list[float]:
        """Round values within the scale, about that many."""
        span = self.high - self.low
        if span <= 0:
            return [self.low]
        magnitude = 1.0
        while magnitude * 10 <= span / about:
            magnitude *= 10
        while magnitude > span / about:
            magnitude /= 10
        step = next(magnitude * factor for factor in (1, 2, 5, 10) if magnitude * factor >= span / about)
        first = -(-self.low // step) * step
        return [first + index * step for index in range(int((self.high - first) / step + 1e-9) + 1)]


def path(points: list[tuple[float, float]], *, steps: bool = False) -> str:
    """SVG path data through ``points``; with ``steps`` each value holds until the next."""
    if not points:
        return ""
    parts = [f"M{points[0][0]:.1f} {points[0][1]:.1f}"]
    for x, y in points[1:]:
        parts.append(f"H{x:.1f}V{y:.1f}" if steps else f"L{x:.1f} {y:.1f}")
    return "".join(parts)


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
    "resuming": "url(#fill-resuming)",
    "serving": GREEN,
    "draining": "url(#fill-draining)",
    "failed": "url(#fill-failed)",
}
PHASE_COLOURS = (BLUE, ORANGE, GREEN, SKY, PURPLE, YELLOW, VERMILION)
