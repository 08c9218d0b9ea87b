"""What a run gives: its row, and how many replicas there were over time."""

from __future__ import annotations

from dataclasses import dataclass

from dynamo_snapshot.replay.comparison.rows import Row


@dataclass(frozen=True)
class Size:
    """How many replicas there are from ``at`` on, seconds into what is measured."""

    at: float
    ready: int
    starting: int


@dataclass(frozen=True)
class Lane:
    """One run: its row and its sizes, oldest first."""

    row: Row
    sizes: tuple[Size, ...]
