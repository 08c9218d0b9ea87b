"""The table of a comparison: a line a policy setting, seeds put together."""

from __future__ import annotations

import math
from collections.abc import Sequence

from dynamo_snapshot.replay.comparison.estimate import Estimate
from dynamo_snapshot.replay.comparison.rows import CEILING, OURS, Row
from dynamo_snapshot.replay.comparison.verdict import Point, points

HEADER = (
    "policy", "starts", "TTFT kept", "ITL kept", "both", "TTFT p50", "p95", "p99", "GPU-hours", "scalings"
)  # fmt: skip


def ordered(rows: Sequence[Row]) -> list[Point]:
    """The points of ``rows``: ours, the rivals by name, the ceiling; each from its cheapest setting on."""
    rank = {OURS: 0, CEILING: 2}
    return sorted(
        points(rows), key=lambda point: (rank.get(point.policy, 1), point.policy, point.startup, point.gpu_hours.mean)
    )


def cells(point: Point) -> tuple[str, ...]:
    """One line of the table; ± is the seeds' 95 % interval."""
    return (
        point.name,
        point.startup,
        _share(point.attainment),
        *(f"{point.mean(field) * 100:.1f} %" for field in ("itl_attainment", "both_attainment")),
        *(seconds(point.mean(field)) for field in ("ttft_p50_s", "ttft_p95_s", "ttft_p99_s")),
        _hours(point.gpu_hours),
        f"{point.mean('scalings'):.0f}",
    )


def seconds(value: float) -> str:
    return f"{value:.2f} s" if math.isfinite(value) else "never"


def _share(value: Estimate) -> str:
    spread = f" ± {value.half_width * 100:.1f}" if value.half_width else ""
    return f"{value.mean * 100:.1f}{spread} %"


def _hours(value: Estimate) -> str:
    return f"{value.mean:.2f}" + (f" ± {value.half_width:.2f}" if value.half_width else "")
