"""Which setting of ours to take on a trace, in a plain sentence: pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from dynamo_snapshot.replay.comparison.frontier import cheapest, most_attaining
from dynamo_snapshot.replay.comparison.marks import STATIC
from dynamo_snapshot.replay.comparison.rows import OURS
from dynamo_snapshot.replay.comparison.verdict import Point
from dynamo_snapshot.replay.comparison.wording import replicas


@dataclass(frozen=True)
class Wish:
    """What the user wants: the cheapest setting that attains so much, or the best one within so many GPU-hours."""

    attainment: float = 0.99
    """Share of requests whose first token is in time, 0 to 1."""
    gpu_hours: float | None = None


@dataclass(frozen=True)
class Advice:
    """``take`` is None where nothing of ours was within the budget."""

    take: Point | None
    sentence: str


def advise(points: Sequence[Point], wish: Wish, objective_s: float) -> Advice:
    """Recommends one of our settings in ``points`` (of one scene), with a static fleet beside it.

    Args:
        objective_s: the TTFT objective, for the sentence.
    """
    ours = [point for point in points if point.policy == OURS]
    if wish.gpu_hours is not None:
        best = most_attaining(ours, wish.gpu_hours)
        if best is None:
            least = min(ours, key=lambda point: point.gpu_hours.mean)
            return Advice(
                None,
                f"No setting stays within {wish.gpu_hours:g} GPU-hours: the cheapest, {_setting(least)}, "
                f"takes {least.gpu_hours.mean:.2f}.",
            )
        return Advice(best, f"Take {_setting(best)}: {_result(best, objective_s)}. {_beside(best, points)}")
    good = cheapest(ours, wish.attainment)
    if good is not None:
        return Advice(good, f"Take {_setting(good)}: {_result(good, objective_s)}. {_beside(good, points)}")
    best = most_attaining(ours)
    assert best is not None
    return Advice(
        best,
        f"No setting keeps {wish.attainment * 100:g} %. The best is {_setting(best)}: {_result(best, objective_s)}. "
        f"{_beside(best, points)}",
    )


def _setting(point: Point) -> str:
    return point.knob or "the defaults"


def _result(point: Point, objective_s: float) -> str:
    return (
        f"{point.attainment.mean * 100:.1f} % of the requests have their first token within {objective_s:g} s, "
        f"for {point.gpu_hours.mean:.2f} GPU-hours"
    )


def _beside(point: Point, points: Sequence[Point]) -> str:
    """What a fleet of constant size needs for the same."""
    fleets = [other for other in points if other.policy == STATIC]
    if not fleets:
        return ""
    equal = cheapest(fleets, point.attainment.mean)
    if equal is None:
        return "No fleet of constant size within the bounds keeps as many."
    times = equal.gpu_hours.mean / point.gpu_hours.mean
    compared = f"{times:.1f} times as much" if times > 1 else "no more than that: take the constant size here"
    return f"To keep as many, a fleet of constant size needs {replicas(equal.knob)}, {compared}."
