"""The page of a comparison: what was compared, the frontier, the table and replicas over time, scene by scene."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from dynamo_snapshot.pages.html import page, table
from dynamo_snapshot.replay.comparison.frontier_plot import frontier_plot
from dynamo_snapshot.replay.comparison.lanes import Lane
from dynamo_snapshot.replay.comparison.marks import looks
from dynamo_snapshot.replay.comparison.replicas_plot import replicas_plot
from dynamo_snapshot.replay.comparison.rows import Row, scenes
from dynamo_snapshot.replay.comparison.table import HEADER, cells, ordered
from dynamo_snapshot.replay.comparison.verdict import Verdict, points, verdicts
from dynamo_snapshot.replay.comparison.wording import verdict_sentence

STYLE = "text.title { font-size: 13px; font-weight: 600; }\n.scene { margin-top: 14px; }\n"

MOST_LANES = 24

Arrivals = Mapping[tuple[str, str], Sequence[float]]
"""By trace and half: when requests came, seconds into the run."""


def render(
    rows: Sequence[Row], lanes: Sequence[Lane], arrivals: Arrivals, durations: Mapping[tuple[str, str], float],
    about: Mapping[str, Any],
) -> str:  # fmt: skip
    """Returns the whole page.

    Args:
        lanes: the runs whose sizes are known; drawn with the scene that they belong to.
        durations: by trace and half, seconds.
        about: settings and environment, shown as JSON at the end.
    """
    styles = looks([row.policy for row in rows])
    found = verdicts(rows)
    parts = [
        "<h1>Scaling policies on request traces</h1>",
        "<p>A point is one policy with one setting: how many requests had their first token within the objective, "
        "and what the replicas cost, from the order to the stop. Up and to the left is better.</p>",
    ]
    for scene, members in scenes(rows).items():
        title = str(scene)
        parts.append(f"<h2>{escape(title)}</h2>")
        parts.append(f"<div class='card'>{frontier_plot(points(members), styles, title)}</div>")
        parts += _verdicts([verdict for verdict in found if verdict.scene == scene])
        parts.append(f"<div class='card scene'>{table(HEADER, [cells(point) for point in ordered(members)])}</div>")
        where = (scene.trace, scene.half)
        drawn = _of_scene(lanes, members)
        if drawn:
            plot = replicas_plot(drawn, arrivals[where], durations[where], styles, "Replicas over time")
            parts.append(f"<div class='card scene'>{plot}</div>")
    parts.append(
        f"<h2>Settings and machine</h2><div class='card'><pre>{escape(json.dumps(about, indent=2))}</pre></div>"
    )
    return page("dynamo-snapshot: scaling policies compared", "\n".join(parts), STYLE)


def _verdicts(found: Sequence[Verdict]) -> list[str]:
    return [_verdict(verdict) for verdict in found]


def _verdict(verdict: Verdict) -> str:
    said = escape(verdict_sentence(verdict))
    if not verdict.rivals:
        return f"<p>{said}</p>"
    return f"<p class='{'good' if verdict.stands else 'bad'}'>{'✓' if verdict.stands else '✗'} {said}</p>"


def _of_scene(lanes: Sequence[Lane], members: Sequence[Row]) -> list[Lane]:
    """The lanes of a scene; of too many the first of each policy and way of starting."""
    known = {member.key for member in members}
    there = [lane for lane in lanes if lane.row.key in known]
    if len(there) <= MOST_LANES:
        return there
    firsts = {(lane.row.policy, lane.row.startup): lane for lane in reversed(there)}
    return [lane for lane in there if firsts[lane.row.policy, lane.row.startup] is lane]
