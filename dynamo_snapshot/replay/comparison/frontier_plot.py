"""Attainment against GPU-hours: a mark a policy setting, ours joined by a line, the ceiling beside them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import groupby

from dynamo_snapshot.pages.svg import Scale, element, path, text
from dynamo_snapshot.replay.comparison.marks import STATIC, Look, mark
from dynamo_snapshot.replay.comparison.rows import CEILING, OURS, Start
from dynamo_snapshot.replay.comparison.table import seconds
from dynamo_snapshot.replay.comparison.verdict import Point

LEFT, TOP, BOTTOM = 70.0, 34.0, 46.0
LEGEND = 220.0
LEAST_MISS = 0.0005
"""Misses below one in two thousand are drawn as that: the axis of misses is logarithmic."""

_TICKS = (0.0, 0.5, 0.8, 0.9, 0.95, 0.98, 0.99, 0.995, 0.998, 0.999)


def frontier_plot(
    points: Sequence[Point],
    styles: Mapping[str, Look],
    title: str,
    size: tuple[float, float] = (1120.0, 430.0),
    at: tuple[float, float] | None = None,
) -> str:
    """Returns the SVG of one scene's ``points``; there must be at least one.

    Args:
        at: where it lies in a larger plot, which has the legend then.
    """
    width, height = size
    right, bottom = width - 30.0 - (LEGEND if at is None else 0.0), height - BOTTOM
    hours = [point.gpu_hours.mean for point in points]
    shares = [point.attainment.mean for point in points]
    spare = (max(hours) - min(hours)) * 0.05 or 0.1
    x = Scale(max(0.0, min(hours) - spare), max(hours) + spare, LEFT, right)
    floor = max(tick for tick in _TICKS if tick <= min(shares))
    top = min((tick for tick in _TICKS if tick > max(shares)), default=1.0)
    y = Scale(_nines(floor), _nines(top), bottom, TOP)
    parts = [text(LEFT, 16, title, class_="title"), _axes(x, y, floor, top)]
    for policy, dashes, width in ((STATIC, "2 4", 1.2), (CEILING, "1 3", 1.2), (OURS, None, 2.4)):
        parts += _lines([point for point in points if point.policy == policy], styles, x, y, dashes, width)
    # Ours last, so that nothing covers it.
    for point in sorted(points, key=lambda point: point.policy == OURS):
        spot = (x(point.gpu_hours.mean), y(_nines(point.attainment.mean)))
        parts.append(_spread(point, x, y, styles[point.policy]))
        parts.append(mark(styles[point.policy], *spot, start=point.start, tip=_tip(point)))
        if point.policy == STATIC:
            parts.append(text(spot[0], spot[1] - 8, point.knob, class_="tick", text_anchor="middle"))
    if at is not None:
        return element("g", "".join(parts), transform=f"translate({at[0]:.0f} {at[1]:.0f})")
    parts.append(legend(points, styles, right + 30, TOP + 12))
    return element(
        "svg", "".join(parts), viewBox=f"0 0 {width:.0f} {height:.0f}", role="img",
        aria_label=f"Attainment against GPU-hours, {title}",
    )  # fmt: skip


def _nines(attainment: float) -> float:
    """90 % is 1, 99 % is 2, 99.9 % is 3: equal steps for misses that fall tenfold."""
    return -math.log10(max(LEAST_MISS, 1.0 - attainment))


def _axes(x: Scale, y: Scale, floor: float, top: float) -> str:
    bottom, right = y.start, x.end
    parts = []
    for tick in x.ticks(8):
        parts.append(element("line", x1=x(tick), x2=x(tick), y1=TOP, y2=bottom, class_="grid"))
        parts.append(text(x(tick), bottom + 18, f"{tick:g}", class_="tick", text_anchor="middle"))
    for share in (tick for tick in (*_TICKS, 1.0) if floor <= tick <= top):
        height = y(_nines(share))
        parts.append(element("line", x1=LEFT, x2=right, y1=height, y2=height, class_="grid"))
        parts.append(text(LEFT - 8, height + 4, f"{share * 100:g} %", class_="tick", text_anchor="end"))
    parts.append(text((LEFT + right) / 2, bottom + BOTTOM - 8, "GPU-hours", class_="tick", text_anchor="middle"))
    turn = f"rotate(-90 14 {(TOP + bottom) / 2:.0f})"
    label = "requests within the TTFT objective"
    parts.append(text(14, (TOP + bottom) / 2, label, class_="tick", text_anchor="middle", transform=turn))
    return "".join(parts)


def _lines(
    points: Sequence[Point], styles: Mapping[str, Look], x: Scale, y: Scale, dashes: str | None, width: float
) -> list[str]:
    """One line a way of starting, from the cheapest to the dearest."""
    ordered = sorted(points, key=lambda point: (point.startup, point.gpu_hours.mean))
    lines = []
    for _, members in groupby(ordered, key=lambda point: point.startup):
        way = [(point, (x(point.gpu_hours.mean), y(_nines(point.attainment.mean)))) for point in members]
        lines.append(
            element(
                "path", d=path([at for _, at in way]), fill="none", stroke=styles[way[0][0].policy].colour,
                stroke_width=width, stroke_dasharray=dashes,
            )
        )  # fmt: skip
    return lines


def _spread(point: Point, x: Scale, y: Scale, look: Look) -> str:
    """The seeds' 95 % interval, both ways, where it can be seen."""
    hours, share = point.gpu_hours, point.attainment
    across = (x(hours.mean - hours.half_width), x(hours.mean + hours.half_width))
    along = (y(_nines(share.mean - share.half_width)), y(_nines(min(1.0, share.mean + share.half_width))))
    at = (x(hours.mean), y(_nines(share.mean)))
    parts = ""
    if across[1] - across[0] > 2:
        parts += element("line", x1=across[0], x2=across[1], y1=at[1], y2=at[1], stroke=look.colour, stroke_width=0.9)
    if along[0] - along[1] > 2:
        parts += element("line", x1=at[0], x2=at[0], y1=along[0], y2=along[1], stroke=look.colour, stroke_width=0.9)
    return parts


def _tip(point: Point) -> str:
    seeds = f", {len(point.rows)} seeds" if len(point.rows) > 1 else ""
    return (
        f"{point.name}, {point.startup}{seeds}: {point.attainment.mean * 100:.2f} % within TTFT, "
        f"{point.gpu_hours.mean:.2f} GPU-hours, {point.mean('scalings'):.0f} scalings, "
        f"p99 TTFT {seconds(point.mean('ttft_p99_s'))}"
    )


def legend(points: Sequence[Point], styles: Mapping[str, Look], left: float, top: float) -> str:
    """What the marks mean, one below the other from ``top`` on."""
    named = {point.policy for point in points}
    lines = [
        (look, Start.RESTORE, policy + {OURS: " (ours)", CEILING: " (ceiling)"}.get(policy, ""))
        for policy, look in styles.items()
        if policy in named
    ]
    if {point.start for point in points} >= {Start.RESTORE, Start.COLD}:
        plain = Look("var(--soft)", "square")
        lines += [(plain, Start.RESTORE, "filled: restored"), (plain, Start.COLD, "hollow: cold-started")]
    return "".join(
        mark(look, left, top + row * 20 - 4, start=start) + text(left + 14, top + row * 20, label, class_="tick")
        for row, (look, start, label) in enumerate(lines)
    )
