"""Sliding windows over a metric's history."""

from __future__ import annotations

from collections import deque


class Averages:
    """The mean of a metric over the last seconds, from averages over successive spans of time.

    Args:
        length_s: the longest window that will be asked for.
    """

    def __init__(self, length_s: float) -> None:
        self._length_s = length_s
        self._spans: deque[tuple[float, float, float]] = deque()

    def add(self, start: float, end: float, value: float) -> None:
        """The metric was ``value`` on average from ``start`` to ``end``; spans come in order of time."""
        if end > start:
            self._spans.append((start, end, value))
        while self._spans and self._spans[0][1] <= end - self._length_s:
            self._spans.popleft()

    def mean(self, now: float, length_s: float | None = None) -> float | None:
        """The time-weighted mean since ``now - length_s``, or since the first span; None: there is none."""
        since = now - (self._length_s if length_s is None else length_s)
        total = weight = 0.0
        for start, end, value in reversed(self._spans):
            overlap = end - max(start, since)
            if overlap <= 0:
                break
            total += overlap * value
            weight += overlap
        return total / weight if weight else None


class Recent:
    """Timed values not older than ``length_s``, and the newest in any case: for a window's extremes."""

    def __init__(self, length_s: float) -> None:
        self._length_s = length_s
        self._values: deque[tuple[float, int]] = deque()

    def add(self, at: float, value: int) -> None:
        self._values.append((at, value))
        while len(self._values) > 1 and self._values[0][0] <= at - self._length_s:
            self._values.popleft()

    def since(self, cutoff: float) -> list[int]:
        """The values after ``cutoff``, oldest first."""
        return [value for at, value in self._values if at > cutoff]

    def highest(self) -> int:
        """Raises ``ValueError`` when nothing was added."""
        return max(value for _, value in self._values)
