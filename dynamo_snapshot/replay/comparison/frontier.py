"""Which points no other one beats, and which of them to take."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from dynamo_snapshot.replay.comparison.verdict import Point


def frontier(points: Iterable[Point]) -> tuple[Point, ...]:
    """The points than which none attains at least as much for at most as many GPU-hours, cheapest first.

    By the means; of equal points the first.
    """
    best: list[Point] = []
    for point in sorted(points, key=lambda point: (point.gpu_hours.mean, -point.attainment.mean)):
        if not best or point.attainment.mean > best[-1].attainment.mean:
            best.append(point)
    return tuple(best)


def cheapest(points: Sequence[Point], attainment: float) -> Point | None:
    """The cheapest point whose whole interval attains that share (0 to 1); None: none does."""
    good = [point for point in points if point.attainment.mean - point.attainment.half_width >= attainment]
    return min(good, key=lambda point: point.gpu_hours.mean, default=None)


def most_attaining(points: Sequence[Point], gpu_hours: float | None = None) -> Point | None:
    """The point that attains most, within so many GPU-hours; of equals the cheapest. None: none is within."""
    within = [point for point in points if gpu_hours is None or point.gpu_hours.mean <= gpu_hours]
    return max(within, key=lambda point: (point.attainment.mean, -point.gpu_hours.mean), default=None)
