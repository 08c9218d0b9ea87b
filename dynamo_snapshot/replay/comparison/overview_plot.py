"""All frontiers of the matrix in one SVG file of its own, light or dark as its reader's system is."""

from __future__ import annotations

from collections.abc import Sequence

from dynamo_snapshot.pages.svg import element, text
from dynamo_snapshot.replay.comparison.frontier_plot import LEGEND, frontier_plot, legend
from dynamo_snapshot.replay.comparison.marks import looks
from dynamo_snapshot.replay.comparison.rows import Row, scenes
from dynamo_snapshot.replay.comparison.verdict import points

PANEL = (600.0, 380.0)
COLUMNS = 2
MARGIN, HEAD = 20.0, 46.0
STYLE = (
    "svg{--ink:#1c2024;--soft:#60646c;--line:#e3e5e8;--card:#fff}"
    "@media(prefers-color-scheme:dark){svg{--ink:#e8eaed;--soft:#a0a6ad;--line:#30353b;--card:#1c2024}}"
    "text{fill:var(--ink);font:12px system-ui,sans-serif}text.tick{fill:var(--soft);font-size:11px}"
    "text.title{font-size:13px;font-weight:600}.grid{stroke:var(--line);stroke-width:1}"
)


def overview(rows: Sequence[Row], title: str) -> str:
    """Returns an SVG document with one panel a scene; there must be a row."""
    styles = looks([row.policy for row in rows])
    panels = scenes(rows)
    lines = -(-len(panels) // COLUMNS)
    width = COLUMNS * PANEL[0] + LEGEND + MARGIN
    height = HEAD + lines * PANEL[1] + MARGIN
    parts = [
        element("style", STYLE),
        element("rect", width=width, height=height, fill="var(--card)"),
        text(MARGIN, 26, title, class_="title"),
        legend(points(rows), styles, COLUMNS * PANEL[0] + MARGIN, HEAD + 46),
    ]
    for index, (scene, members) in enumerate(panels.items()):
        at = (index % COLUMNS * PANEL[0], HEAD + index // COLUMNS * PANEL[1])
        parts.append(frontier_plot(points(members), styles, str(scene), PANEL, at))
    body = "".join(parts)
    return element("svg", body, xmlns="http://www.w3.org/2000/svg", viewBox=f"0 0 {width:.0f} {height:.0f}") + "\n"
