"""The timeline: load, decisions and counts, and one bar a replica, over one axis of seconds."""

from __future__ import annotations

from typing import Any

from dynamo_snapshot.local.report.fills import PATTERNS, STATE_FILLS
from dynamo_snapshot.pages.svg import (
    BLUE,
    GREEN,
    ORANGE,
    SKY,
    VERMILION,
    Scale,
    element,
    path,
    text,
)

WIDTH, LEFT, RIGHT, TOP = 1120.0, 130.0, 20.0, 50.0
LOAD_HEIGHT, COUNT_HEIGHT, BAR_HEIGHT, GAP = 110.0, 90.0, 20.0, 34.0


def timeline(result: dict[str, Any]) -> str:
    """Returns the SVG of a run; needs its ``began_at`` and ``ended_at``, whatever else is missing."""
    began, ended = float(result["began_at"]), float(result["ended_at"])
    x = Scale(0.0, max(1.0, ended - began), LEFT, WIDTH - RIGHT)
    replicas = result.get("replicas", [])
    load_top, count_top = TOP, TOP + LOAD_HEIGHT + GAP
    bars_top = count_top + COUNT_HEIGHT + GAP
    bottom = bars_top + len(replicas) * (BAR_HEIGHT + 6)
    parts = [
        element("defs", PATTERNS),
        _axis(x, load_top, bottom),
        _load(result, x, load_top, began),
        _counts(result, x, count_top, began, ended),
        *(
            _bar(replica, x, bars_top + index * (BAR_HEIGHT + 6), began, ended)
            for index, replica in enumerate(replicas)
        ),
        _marks(result, x, load_top, bottom, began),
    ]
    height = bottom + 40
    return element(
        "svg", "".join(parts), viewBox=f"0 0 {WIDTH:.0f} {height:.0f}", role="img",
        aria_label="Load, decisions and replicas over time",
    )  # fmt: skip


def _axis(x: Scale, top: float, bottom: float) -> str:
    lines = []
    for tick in x.ticks(12):
        at = x(tick)
        lines.append(element("line", x1=at, x2=at, y1=top, y2=bottom, class_="grid"))
        lines.append(text(at, bottom + 18, f"{tick:.0f} s", class_="tick", text_anchor="middle"))
    return "".join(lines)


def _load(result: dict[str, Any], x: Scale, top: float, began: float) -> str:
    rows = result.get("load", [])
    if not rows:
        return text(LEFT, top + 20, "no load", class_="tick")
    highest = max(max(row["sent_per_s"], row["in_flight"]) for row in rows) or 1.0
    y = Scale(0.0, highest, top + LOAD_HEIGHT, top)
    sent = [(x(row["at"] - began), y(row["sent_per_s"])) for row in rows]
    flying = [(x(row["at"] - began), y(row["in_flight"])) for row in rows]
    area = f"{path(sent)}L{sent[-1][0]:.1f} {y(0):.1f}L{sent[0][0]:.1f} {y(0):.1f}Z"
    return "".join(
        (
            _label(top, "load", "requests"),
            text(LEFT - 8, y(highest) + 10, f"{highest:.0f}", class_="tick", text_anchor="end"),
            element("path", d=area, fill=SKY, fill_opacity=0.45),
            element("path", d=path(sent), fill="none", stroke=BLUE, stroke_width=1.2),
            element("path", d=path(flying), fill="none", stroke=VERMILION, stroke_width=1.4, stroke_dasharray="4 2"),
            _key(LEFT + 6, top - 8, BLUE, "sent each second"),
            _key(LEFT + 140, top - 8, VERMILION, "in flight", "4 2"),
        )
    )


def _counts(result: dict[str, Any], x: Scale, top: float, began: float, ended: float) -> str:
    rows = result.get("counts", [])
    if not rows:
        return ""
    rows = [*rows, {**rows[-1], "at": ended}]
    highest = max(max(row["target"], row["serving"]) for row in rows) or 1
    y = Scale(0.0, float(highest), top + COUNT_HEIGHT, top)
    target = [(x(row["at"] - began), y(row["target"])) for row in rows]
    serving = [(x(row["at"] - began), y(row["serving"])) for row in rows]
    parts = [_label(top, "replicas", "target, serving")]
    parts += [
        text(LEFT - 8, y(count) + 4, str(count), class_="tick", text_anchor="end") for count in range(0, highest + 1, 2)
    ]
    parts.append(element("path", d=path(serving, steps=True), fill="none", stroke=GREEN, stroke_width=3))
    parts.append(
        element(
            "path", d=path(target, steps=True), fill="none", stroke=ORANGE, stroke_width=1.6, stroke_dasharray="6 3"
        )
    )
    parts.append(_key(LEFT + 6, top - 8, GREEN, "serving"))
    parts.append(_key(LEFT + 90, top - 8, ORANGE, "target", "6 3"))
    parts.append(text(LEFT + 170, top - 4, "▲ decision", class_="tick"))
    for decision in result.get("decisions", []):
        at = x(decision["at"] - began)
        tip = f"{decision['at'] - began:.1f} s: {decision['what']} ({decision['reason']})"
        foot = top + COUNT_HEIGHT
        parts.append(
            element("path", d=f"M{at:.1f} {foot:.1f}l5 10h-10Z", fill=ORANGE, class_="tip", data_tip=tip, tabindex=0)
        )
    return "".join(parts)


def _bar(replica: dict[str, Any], x: Scale, top: float, began: float, ended: float) -> str:
    states = replica.get("states", [])
    exit_ = replica.get("exit")
    end = exit_["at"] if exit_ else ended
    parts = [
        text(LEFT - 8, top + 14, replica["replica"][-16:], class_="name", text_anchor="end"),
    ]
    for index, step in enumerate(states):
        until = states[index + 1]["at"] if index + 1 < len(states) else end
        fill = STATE_FILLS.get(step["state"])
        if fill is None or until <= step["at"]:
            continue
        left, right = x(step["at"] - began), x(until - began)
        tip = f"{replica['replica']} ({replica['way']}): {step['state']} for {until - step['at']:.2f} s"
        parts.append(
            element(
                "rect", x=left, y=top, width=max(1.0, right - left), height=BAR_HEIGHT, fill=fill, rx=2,
                class_="tip", data_tip=tip, tabindex=0,
            )
        )  # fmt: skip
    registered = replica.get("registered_at")
    if registered is not None:
        parts.append(text(x(registered - began), top + 14, "◆", class_="mark", text_anchor="middle"))
    if exit_:
        killed = exit_["code"] < 0
        mark, tip = ("✗", f"ended by signal {-exit_['code']}") if killed else ("□", f"exit status {exit_['code']}")
        parts.append(
            text(x(exit_["at"] - began) + 8, top + 15, mark, class_="mark tip", data_tip=f"{replica['replica']}: {tip}")
        )
    return "".join(parts)


def _marks(result: dict[str, Any], x: Scale, top: float, bottom: float, began: float) -> str:
    parts = []
    for mark in result.get("marks", []):
        at = x(mark["at"] - began)
        head = top - (36 if mark["kind"] == "kill" else 22)
        parts.append(element("line", x1=at, x2=at, y1=head + 4, y2=bottom, class_=f"event {mark['kind']}"))
        parts.append(text(at, head, mark["label"], class_="tick", text_anchor="middle"))
    return "".join(parts)


def _key(x: float, y: float, colour: str, what: str, dashes: str | None = None) -> str:
    """A line as it is drawn, and what it means."""
    line = element("line", x1=x, x2=x + 22, y1=y, y2=y, stroke=colour, stroke_width=2.5, stroke_dasharray=dashes)
    return line + text(x + 28, y + 4, what, class_="tick")


def _label(top: float, title: str, what: str) -> str:
    return text(0, top + 12, title, class_="name") + text(0, top + 28, what, class_="tick")
