"""The page of `bench restore`: each case's bars, the figures, and the machine that they were measured on."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from itertools import groupby
from typing import Any

from dynamo_snapshot.local.report.restore_bars import FILLS, Row, restore_bars
from dynamo_snapshot.local.report.stages import Stage, middle
from dynamo_snapshot.pages.html import page, swatch, table
from dynamo_snapshot.pages.svg import VERMILION, element

STYLE = (
    "text.inside { fill: #10222e; font-size: 11px; pointer-events: none; }\ntext.light { fill: #fff; }\n"
    "text.bad { fill: var(--bad); }\n.whisker { stroke: var(--soft); fill: none; stroke-width: 1.2; }\n"
    ".limit { stroke-width: 2; stroke-dasharray: 4 2; }\n.card + .card { margin-top: 12px; }\n"
)
FAR = 4.0
"""Ways this many times slower than the fastest are left out of a second, enlarged picture."""
_MEANINGS = {
    Stage.HOUSE: "house, admission, release",
    Stage.WEIGHTS: "weights, as far as waited for",
    Stage.WAKE: "wake: identity, engine's resume",
}
_HEADER = (
    "case",
    "way",
    "restores",
    "failed",
    "median",
    "p95",
    "limit",
    "image",
    "weights",
    "in page cache",
    "answers",
)


def render(result: Mapping[str, Any]) -> str:
    """Returns the whole page for a result as the command's ``--json`` writes it."""
    parts = [
        "<h1>Restores of a GPU worker</h1>",
        "<p>From the order to the passed self-test, by the agent's own pipelines. A bar is the restore in the middle "
        "of its series, the thin line reaches to the slowest. The dashed line is what this machine allows: the image "
        "read by one thread and the driver's work, or the weights at the rate from pinned memory, whichever takes "
        "longer.</p>",
        _legend(),
    ]
    for (engine, case), members in groupby(result["rows"], key=lambda row: (row["engine"], row["case"])):
        parts.append(f"<h2>{escape(engine)}, {escape(case)}</h2>{''.join(_cards(list(members)))}")
    figures = table(_HEADER, [_cells(row) for row in result["rows"]])
    parts.append(f"<h2>Figures</h2><div class='card'>{figures}</div>{_errors(result['rows'])}")
    machine = escape(json.dumps(result["environment"], indent=2))
    parts.append(f"<h2>Machine</h2><div class='card'><pre>{machine}</pre></div>")
    return page("dynamo-snapshot: restores", "\n".join(parts), STYLE)


def _cards(rows: Sequence[Row]) -> Iterable[str]:
    """All rows on one scale, and, where one dwarfs the others, those once more."""
    yield f"<div class='card'>{restore_bars(rows)}</div>"
    shown = [(row, found["total_s"]) for row in rows if (found := middle(row)) is not None]
    near = [row for row, total in shown if total <= FAR * min(total for _, total in shown)]
    if 0 < len(near) < len(shown):
        yield f"<div class='card'>{restore_bars(near)}<div class='legend'>the same, enlarged</div></div>"


def _legend() -> str:
    items = [f"{swatch(fill)} {escape(_MEANINGS.get(stage, stage.value))}" for stage, fill in FILLS.items()]
    line = element("line", x1=9, x2=9, y1=0, y2=12, stroke=VERMILION, class_="limit")
    items.append(f"{element('svg', line, width=18, height=12)} this machine's limit")
    return f"<div class='legend'>{''.join(f'<span>{item}</span>' for item in items)}</div>"


def _cells(row: Row) -> tuple[str, ...]:
    return (
        row["case"],
        row["way"],
        str(row["repeats"]),
        str(row["failures"]),
        *(_seconds(row[name]) for name in ("median_s", "p95_s", "limit_s")),
        f"{row['image_bytes'] / (1 << 20):.0f} MiB",
        f"{row['weight_bytes'] / (1 << 30):.2f} GiB",
        _cached(row),
        "alike" if len(row["answers"]) == 1 else f"{len(row['answers'])} different",
    )


def _seconds(value: float | None) -> str:
    return "–" if value is None else f"{value:.3f} s"


def _cached(row: Row) -> str:
    """The smallest shares of image and weights that were in the page cache when a restore began."""
    shares = []
    for what, whole in (("image", row["image_bytes"]), ("weights", row["weight_bytes"])):
        found = [restore[f"{what}_cached_bytes"] for restore in row["restores"]]
        if found and whole:
            shares.append(f"{what} {min(1.0, min(found) / whole):.0%}")
    return ", ".join(shares) or "–"


def _errors(rows: Sequence[Row]) -> str:
    failed = [(f"{row['case']} {row['way']}", error) for row in rows for error in row["errors"]]
    if not failed:
        return ""
    return f"<h2>What failed</h2><div class='card'>{table(('series', 'error'), failed)}</div>"
