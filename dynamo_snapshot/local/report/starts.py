"""Each replica's start enlarged: from its order to serving, phase by phase, with what no phase claims."""

from __future__ import annotations

from typing import Any

from dynamo_snapshot.local.report.fills import PATTERNS, PHASE_COLOURS
from dynamo_snapshot.pages.svg import GREY, Scale, element, text

WIDTH, LEFT, RIGHT, BAR, STEP = 1120.0, 130.0, 130.0, 20.0, 28.0


def carried_out(orders: list[dict[str, Any]], kind: str) -> list[dict[str, Any]]:
    """The orders of ``kind`` that have an outcome with phases."""
    return [order for order in orders if order["kind"] == kind and order.get("phases")]


def starts(rows: list[dict[str, Any]], kind: str) -> str:
    """Returns the SVG for ``rows``, orders of ``kind``, on one scale; there must be at least one."""
    longest = max(_length(order) for order in rows)
    x = Scale(0.0, longest, LEFT, WIDTH - RIGHT)
    colours = phase_colours(rows)
    height = len(rows) * STEP + 34
    parts = [element("defs", PATTERNS)]
    for tick in x.ticks(8):
        parts.append(element("line", x1=x(tick), x2=x(tick), y1=0, y2=height - 26, class_="grid"))
        parts.append(text(x(tick), height - 10, f"{tick:g} s", class_="tick", text_anchor="middle"))
    parts += [_row(order, x, index * STEP + 4, colours) for index, order in enumerate(rows)]
    label = f"Phases of every {kind}"
    return element("svg", "".join(parts), viewBox=f"0 0 {WIDTH:.0f} {height:.0f}", role="img", aria_label=label)


def phase_colours(rows: list[dict[str, Any]]) -> dict[str, str]:
    """A colour for each phase name, in the order of their first appearance."""
    names: dict[str, str] = {}
    for order in rows:
        for phase in order["phases"]:
            names.setdefault(phase["name"], PHASE_COLOURS[len(names) % len(PHASE_COLOURS)])
    return names


def _length(order: dict[str, Any]) -> float:
    finished = float(order["finished_at"] - order["issued_at"])
    return max(finished, order.get("ordered_to_serving_s") or 0.0)


def _row(order: dict[str, Any], x: Scale, top: float, colours: dict[str, str]) -> str:
    parts = [text(LEFT - 8, top + 14, order["replica"][-16:], class_="name", text_anchor="end")]
    at = order["started_at"] - order["issued_at"]
    parts.append(_piece(x, 0.0, at, top, GREY, f"order on its way: {at * 1000:.0f} ms", "→"))
    for phase in order["phases"]:
        seconds = phase["seconds"]
        tip = f"{phase['name']}: {seconds * 1000:.0f} ms"
        parts.append(_piece(x, at, at + seconds, top, colours[phase["name"]], tip, phase["name"]))
        at += seconds
    rest = order["unaccounted_s"]
    parts.append(_piece(x, at, at + rest, top, "url(#fill-unaccounted)", f"unaccounted: {rest * 1000:.0f} ms", ""))
    serving = order.get("ordered_to_serving_s")
    if serving is not None:
        parts.append(text(x(serving), top + 14, "◆", class_="mark", text_anchor="middle"))
    idle = order.get("idle_cpu")
    beside = f"{serving:.2f} s" if serving is not None else ""
    beside += f", CPU {idle:.0%} idle" if idle is not None else ""
    parts.append(text(WIDTH - RIGHT + 10, top + 14, beside, class_="tick"))
    return "".join(parts)


def _piece(x: Scale, begin: float, end: float, top: float, fill: str, tip: str, label: str) -> str:
    left, width = x(begin), x(end) - x(begin)
    if width < 0.3:
        return ""
    rect = element(
        "rect", x=left, y=top, width=width, height=BAR, fill=fill, stroke="#fff", stroke_width=0.6,
        class_="tip", data_tip=tip, tabindex=0,
    )  # fmt: skip
    return rect + (text(left + 4, top + 14, label, class_="inside") if width > 7 * len(label) + 8 and label else "")
