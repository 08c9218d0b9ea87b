"""Restores as bars, one a case and way: the stages of the one in the middle, up to the slowest, and the limit."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from dynamo_snapshot.local.report.fills import PATTERNS
from dynamo_snapshot.local.report.stages import Stage, middle, stages
from dynamo_snapshot.pages.svg import BLUE, GREEN, GREY, ORANGE, PURPLE, SKY, VERMILION, Scale, element, text

WIDTH, LEFT, RIGHT, BAR, STEP, TOP, FOOT = 1120.0, 190.0, 190.0, 24.0, 36.0, 8.0, 30.0
FILLS = {
    Stage.HOUSE: GREY,
    Stage.CRIU: BLUE,
    Stage.CUDA: GREEN,
    Stage.WEIGHTS: ORANGE,
    Stage.WAKE: SKY,
    Stage.SELF_TEST: PURPLE,
    Stage.UNACCOUNTED: "url(#fill-unaccounted)",
}
_DARK = frozenset({Stage.CRIU, Stage.CUDA})

Row = Mapping[str, Any]


def restore_bars(rows: Sequence[Row]) -> str:
    """Returns the SVG for ``rows`` as ``bench restore`` writes them, on one scale; there must be at least one."""
    x = Scale(0.0, max(_end(row) for row in rows) or 1.0, LEFT, WIDTH - RIGHT)
    bottom = TOP + len(rows) * STEP
    parts = [element("defs", PATTERNS)]
    for tick in x.ticks(8):
        parts.append(element("line", x1=x(tick), x2=x(tick), y1=TOP, y2=bottom, class_="grid"))
        parts.append(text(x(tick), bottom + 18, f"{tick:g} s", class_="tick", text_anchor="middle"))
    parts += [_bar(row, x, TOP + index * STEP) for index, row in enumerate(rows)]
    return element(
        "svg", "".join(parts), viewBox=f"0 0 {WIDTH:.0f} {bottom + FOOT:.0f}", role="img",
        aria_label="Stages of a restore, case by case and way by way",
    )  # fmt: skip


def _end(row: Row) -> float:
    return max([row["limit_s"] or 0.0, *(float(restore["total_s"]) for restore in row["restores"])])


def _bar(row: Row, x: Scale, top: float) -> str:
    name = f"{row['case']} {row['way']}"
    parts = [text(LEFT - 10, top + 16, name, class_="name", text_anchor="end")]
    shown = middle(row)
    if shown is None:
        parts.append(text(LEFT + 6, top + 16, "no restore succeeded", class_="bad"))
        return "".join(parts)
    at = 0.0
    for stage, seconds in stages(shown).items():
        parts.append(_piece(stage, at, seconds, x, top))
        at += seconds
    slowest = max(float(restore["total_s"]) for restore in row["restores"])
    parts.append(_whisker(x(at), x(slowest), top, f"the slowest of {len(row['restores'])}: {slowest:.2f} s"))
    if row["limit_s"] is not None:
        parts.append(_limit(x(row["limit_s"]), top, row["limit_s"]))
    beside = f"{at:.2f} s" + (f", {at / row['limit_s']:.1f} × the limit" if row["limit_s"] else "")
    beside += f", {row['failures']} failed" if row["failures"] else ""
    parts.append(text(WIDTH - RIGHT + 12, top + 16, beside, class_="tick"))
    return "".join(parts)


def _piece(stage: Stage, begin: float, seconds: float, x: Scale, top: float) -> str:
    left, width = x(begin), x(begin + seconds) - x(begin)
    if width < 0.3:
        return ""
    tip = f"{stage}: {seconds * 1000:.0f} ms"
    rect = element(
        "rect", x=left, y=top, width=width, height=BAR, fill=FILLS[stage], stroke="var(--card)", stroke_width=0.8,
        class_="tip", data_tip=tip, tabindex=0,
    )  # fmt: skip
    if stage is Stage.UNACCOUNTED or width < 7 * len(stage) + 8:
        return rect
    return rect + text(left + 5, top + 16, stage.value, class_="inside light" if stage in _DARK else "inside")


def _whisker(begin: float, end: float, top: float, tip: str) -> str:
    middle_y = top + BAR / 2
    if end - begin < 1:
        return ""
    line = element(
        "path", d=f"M{begin:.1f} {middle_y}H{end:.1f}M{end:.1f} {middle_y - 5}V{middle_y + 5}", class_="whisker"
    )
    reach = element("rect", x=begin, y=top, width=end - begin + 3, height=BAR, fill="transparent", class_="tip",
                    data_tip=tip, tabindex=0)  # fmt: skip
    return line + reach


def _limit(at: float, top: float, seconds: float) -> str:
    line = element("line", x1=at, x2=at, y1=top - 5, y2=top + BAR + 5, stroke=VERMILION, class_="limit")
    reach = element("rect", x=at - 4, y=top - 5, width=8, height=BAR + 10, fill="transparent", class_="tip",
                    data_tip=f"this machine's limit: {seconds:.2f} s", tabindex=0)  # fmt: skip
    return line + reach
