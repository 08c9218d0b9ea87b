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
