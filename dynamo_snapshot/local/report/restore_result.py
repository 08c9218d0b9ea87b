"""What `bench restore` writes, as its page and its summaries read it: a file that says something else is refused."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Annotated, Any

import msgspec

from dynamo_snapshot.local.report.stages import IN_THE_WORKER

_FAR = 1e15
"""No figure is larger: a restore of a million years, a segment of a petabyte."""
_Figure = Annotated[float, msgspec.Meta(ge=0, le=_FAR)]
_Count = Annotated[int, msgspec.Meta(ge=0, le=int(_FAR))]


class _Restore(msgspec.Struct):
    total_s: _Figure
    phases: dict[str, Annotated[float, msgspec.Meta(ge=-_FAR, le=_FAR)]]
    evidence: dict[str, str]
    image_cached_bytes: _Count
    weights_cached_bytes: _Count


class _Row(msgspec.Struct):
    engine: str
    case: str
    way: str
    repeats: _Count
    failures: _Count
    median_s: _Figure | None
    p95_s: _Figure | None
    limit_s: _Figure | None
    image_bytes: _Count
    image_read_bytes_per_s: _Figure
    disk_read_bytes_per_s: _Figure | None
    weight_bytes: _Count
    answers: list[str]
    errors: list[str]
    restores: list[_Restore]


class _Result(msgspec.Struct):
    environment: dict[str, Any]
    rows: Annotated[list[_Row], msgspec.Meta(min_length=1)]


def require_restores(result: Mapping[str, Any]) -> None:
    """Raises ``ValueError`` with what is wrong, unless ``result`` is one of `bench restore`."""
    json.dumps(result, ensure_ascii=False).encode()  # halves of characters, which no terminal and no page can show
    for row in msgspec.convert(result, _Result).rows:
        for restore in row.restores:
            for name in IN_THE_WORKER.values():
                if not math.isfinite(seconds := float(restore.evidence.get(name, 0.0))) or seconds < 0:
                    raise ValueError(f"{name} of a restore is {restore.evidence[name]}")
