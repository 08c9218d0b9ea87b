"""Replicas over time, one lane a policy, over the arrivals that they answered."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from dynamo_snapshot.pages.svg import ORANGE, SKY, Scale, element, path, text
from dynamo_snapshot.replay.comparison.lanes import Lane, Size
from dynamo_snapshot.replay.comparison.marks import Look, mark

WIDTH, LEFT, RIGHT, TOP = 1120.0, 250.0, 20.0, 44.0
LANE, GAP = 64.0, 14.0
FOOT = 28.0
MOST_BINS = 400
MOST_LETTERS = 29


def replicas_plot(
    lanes: Sequence[Lane], arrivals: Sequence[float], duration_s: float, styles: Mapping[str, Look], title: str
) -> str:
    """Returns the SVG of ``lanes``, which share one scale; there must be at least one.

    Args:
        arrivals: when requests came, seconds into the run.
    """
    x = Scale(0.0, max(1.0, duration_s), LEFT, WIDTH - RIGHT)
    most = max((size.ready + size.starting for lane in lanes for size in lane.sizes), default=1) or 1
    rates = arrival_rates(arrivals, duration_s)
    bottom = TOP + len(lanes) * (LANE + GAP)
    parts = [text(0, 16, title, class_="title"), _legend(max((rate for _, rate in rates), default=0.0))]
    for tick in x.ticks(12):
        parts.append(element("line", x1=x(tick), x2=x(tick), y1=TOP, y2=bottom - GAP, class_="grid"))
        parts.append(text(x(tick), bottom + 6, f"{tick:g} s", class_="tick", text_anchor="middle"))
    for index, lane in enumerate(lanes):
        parts.append(_lane(lane, rates, TOP + index * (LANE + GAP), x, most, duration_s, styles[lane.row.policy]))
    return element(
        "svg", "".join(parts), viewBox=f"0 0 {WIDTH:.0f} {bottom + FOOT - GAP:.0f}", role="img",
        aria_label=f"Replicas over time, {title}",
    )  # fmt: skip


def arrival_rates(arrivals: Sequence[float], duration_s: float) -> list[tuple[float, float]]:
    """Requests a second by bins of at least five seconds: (middle of the bin, rate)."""
    bin_s = max(5.0, duration_s / MOST_BINS)
    counts = [0] * (int(duration_s / bin_s) + 1)
    for at in arrivals:
        counts[min(len(counts) - 1, int(at / bin_s))] += 1
    return [((index + 0.5) * bin_s, count / bin_s) for index, count in enumerate(counts)]


def _lane(
    lane: Lane, rates: Sequence[tuple[float, float]], top: float, x: Scale, most: int, duration_s: float, look: Look
) -> str:
    row, bottom = lane.row, top + LANE
    y = Scale(0.0, float(most), bottom, top)
    load = Scale(0.0, max((rate for _, rate in rates), default=1.0) or 1.0, bottom, top)
    sizes = lane.sizes or (Size(0.0, 0, 0),)
    ends = (*(size.at for size in sizes[1:]), duration_s)
    ready = [(x(size.at), y(size.ready)) for size in sizes] + [(x(duration_s), y(sizes[-1].ready))]
    parts = [
        mark(look, 7, top + 12, row.start),
        text(20, top + 16, _shortened(row.spec), class_="name tip", data_tip=row.spec),
        text(20, top + 32, f"{row.startup[:20]} · {row.scalings} scalings", class_="tick"),
        text(20, top + 48, f"{row.ttft_attainment * 100:.2f} % · {row.gpu_hours:.2f} GPU-h", class_="tick"),
        text(LEFT - 8, top + 9, str(most), class_="tick", text_anchor="end"),
        text(LEFT - 8, bottom, "0", class_="tick", text_anchor="end"),
        element("path", d=_area([(x(at), load(rate)) for at, rate in rates], bottom), fill=SKY, fill_opacity=0.4),
    ]
    parts += [
        element(
            "rect", x=x(size.at), y=y(size.ready + size.starting), width=max(0.6, x(end) - x(size.at)),
            height=y(size.ready) - y(size.ready + size.starting), fill=ORANGE, fill_opacity=0.75,
        )
        for size, end in zip(sizes, ends, strict=True)
        if size.starting
    ]  # fmt: skip
    parts.append(element("path", d=path(ready, steps=True), fill="none", stroke="var(--ink)", stroke_width=1.5))
    return "".join(parts)


def _shortened(spec: str) -> str:
    return spec if len(spec) <= MOST_LETTERS else spec[: MOST_LETTERS - 1] + "…"


def _area(points: Sequence[tuple[float, float]], bottom: float) -> str:
    if not points:
        return ""
    return f"{path(list(points))}L{points[-1][0]:.1f} {bottom:.1f}L{points[0][0]:.1f} {bottom:.1f}Z"


def _legend(peak: float) -> str:
    parts, left = [], LEFT
    for fill, opacity, label in (
        (SKY, 0.4, f"requests that came, highest {peak:.1f}/s"),
        (ORANGE, 0.75, "replicas on their way"),
    ):
        parts.append(element("rect", x=left, y=24, width=18, height=10, fill=fill, fill_opacity=opacity))
        parts.append(text(left + 24, 33, label, class_="tick"))
        left += 60 + 6.2 * len(label)
    parts.append(element("line", x1=left, x2=left + 18, y1=29, y2=29, stroke="var(--ink)", stroke_width=1.5))
    parts.append(text(left + 24, 33, "ready replicas", class_="tick"))
    return "".join(parts)
