"""Puts the page together: verdict, figures, timeline, starts, checks, decisions, host."""

from __future__ import annotations

import json
from html import escape
from pathlib import Path
from string import Template
from typing import Any

from dynamo_snapshot.local.report.fills import STATE_FILLS
from dynamo_snapshot.local.report.starts import carried_out, phase_colours, starts
from dynamo_snapshot.local.report.timeline import timeline
from dynamo_snapshot.pages.html import page, swatch, table, tile
from dynamo_snapshot.pages.svg import GREY

BODY = Path(__file__).with_name("page.html")
STYLE = Path(__file__).with_name("page.css")


def render(result: dict[str, Any]) -> str:
    """Returns the whole page for a demo's result as the command's ``--json`` writes it."""
    checks = result["checks"]
    failed = [check["name"] for check in checks if not check["passed"]]
    verdict = f"All {len(checks)} checks passed" if not failed else f"{len(failed)} of {len(checks)} checks failed"
    body = Template(BODY.read_text(encoding="utf-8")).substitute(
        verdict=escape(verdict),
        verdict_class="good" if not failed else "bad",
        mark="✓" if not failed else "✗",
        what=escape(result["what"]),
        tiles="".join(tile(*pair) for pair in _figures(result)),
        timeline=timeline(result),
        legend=_legend(),
        restores=_starts("Every restore, enlarged", result["orders"], "restore"),
        cold_starts=_starts("Cold starts, on a scale of their own", result["orders"], "cold_start"),
        captures=_starts("Captures", result["orders"], "capture"),
        checks=table(("", "check", "value", "bound"), [_check_row(check) for check in checks]),
        decisions=table(("at", "pool", "decision", "because"), _decision_rows(result)),
        environment=escape(json.dumps(result["environment"], indent=2)),
    )
    return page(f"dynamo-snapshot demo: {verdict}", body, STYLE.read_text(encoding="utf-8"))


def _figures(result: dict[str, Any]) -> list[tuple[str, str]]:
    requests, restore, cold = result["requests"], result["restore"], result["cold_start"]
    replacement = result["replacement"]
    return [
        (_seconds(restore["ordered_to_serving_s"]["median"]), "from order to serving, median restore under load"),
        (_seconds(restore["idle_ordered_to_serving_s"]["median"]), "the same on the idle machine"),
        (_seconds(cold["ordered_to_serving_s"]), "from order to serving, cold start"),
        (f"{requests['failed']} of {requests['sent']}", "requests failed"),
        (str(requests["migrated"]), "requests moved away from the killed worker"),
        (_seconds(replacement["serving_s"]), "from the kill to its replacement serving"),
        (str(result["scale_in"]["drained"]), "replicas drained at scale-in"),
        (str(result["left_behind"]), "things left behind"),
    ]


def _seconds(value: float | None) -> str:
    return "–" if value is None else f"{value:.2f} s"


def _legend() -> str:
    items = "".join(f"<span>{swatch(fill)} {state}</span>" for state, fill in STATE_FILLS.items())
    return items + "<span>◆ in discovery</span><span>✗ killed</span><span>□ ended in order</span>"


def _starts(title: str, orders: list[dict[str, Any]], kind: str) -> str:
    rows = carried_out(orders, kind)
    if not rows:
        return ""
    phases = "".join(f"<span>{swatch(fill)} {escape(name)}</span>" for name, fill in phase_colours(rows).items())
    rest = f"<span>{swatch(GREY)} on its way</span>{phases}<span>◆ in discovery</span>"
    return f"<h2>{escape(title)}</h2><div class='card'>{starts(rows, kind)}<div class='legend'>{rest}</div></div>"


def _check_row(check: dict[str, Any]) -> tuple[str, ...]:
    return ("✓" if check["passed"] else "✗", check["name"], str(check["value"]), check["bound"])


def _decision_rows(result: dict[str, Any]) -> list[tuple[str, ...]]:
    began = result["began_at"]
    rows = [(row["at"], row["pool"], row["what"], row["reason"]) for row in result.get("decisions", [])]
    rows += [
        (row["at"], row["role"], f"planner: {row['action']} {row['replicas']}", row["reason"])
        for row in result.get("planner_decisions", [])
    ]
    return [(f"{at - began:.1f} s", *texts) for at, *texts in sorted(rows)]
