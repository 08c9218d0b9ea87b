"""How long replicas took from their order to serving: kept short, read as medians."""

from __future__ import annotations

import math
from collections.abc import Sequence

from msgspec.structs import replace

from dynamo_snapshot.model import StartTimes, Way

KEPT = 32
"""Samples kept for each pool, way, snapshot and node."""
SERIES_KEPT = 64
"""Series kept: each snapshot brings one, and all of them stand in what is remembered and in every status."""


def record(
    times: Sequence[StartTimes], pool: str, way: Way, snapshot_id: str | None, node: str, seconds: float
) -> tuple[StartTimes, ...]:
    """Returns ``times`` with one more sample; the series that was written last stands last."""
    series = StartTimes(pool=pool, way=way, snapshot_id=snapshot_id, node=node)
    others = []
    for known in times:
        if replace(known, seconds=()) == series:
            series = known
        else:
            others.append(known)
    return (*others, replace(series, seconds=(*series.seconds, seconds)[-KEPT:]))[-SERIES_KEPT:]


def samples(times: Sequence[StartTimes], pool: str, way: Way) -> tuple[float, ...]:
    """The samples of one pool and way over all snapshots and nodes, oldest series first."""
    return tuple(second for known in times if known.pool == pool and known.way is way for second in known.seconds)


def median(seconds: Sequence[float]) -> float | None:
    """The middle sample (the lower one of two); None without samples."""
    return sorted(seconds)[(len(seconds) - 1) // 2] if seconds else None


def p95(seconds: Sequence[float]) -> float | None:
    """The smallest sample that at least 95 % do not exceed; None without samples."""
    return sorted(seconds)[math.ceil(0.95 * len(seconds)) - 1] if seconds else None
