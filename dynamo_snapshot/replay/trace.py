"""Request traces: when requests came, and how many tokens each took in and gave out.

Two published formats are read:

* Azure LLM inference traces (CSV): ``TIMESTAMP,ContextTokens,GeneratedTokens``, local time with seven decimals;
* Mooncake traces (JSONL): ``{"timestamp": ms, "input_length": n, "output_length": n, …}``.
"""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from importlib import resources
from pathlib import Path

from dynamo_snapshot.errors import SnapshotError
from dynamo_snapshot.model import Reason

BUNDLED_TRACE = "azure-code-2023-1060-1345.csv"
BUNDLED_ORIGIN = "2023-11-16 18:34:43.9799600"
"""Second 1060 of the whole trace; the excerpt's first request comes 13 s later."""

_AZURE_COLUMNS = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")


@dataclass(frozen=True)
class TraceRequest:
    """One request: seconds after the start, tokens in, tokens out."""

    offset_s: float
    input_tokens: int
    output_tokens: int


def read_trace(path: Path, origin: str | None = None) -> tuple[TraceRequest, ...]:
    """Reads a trace: Mooncake's for ``.jsonl``, Azure's otherwise.

    Args:
        origin: the time stamp, as the file writes them, that offsets count from; the first request's if None.

    Raises:
        SnapshotError: ``configuration_invalid``, naming file, line and what was expected.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise _invalid(f"{path}: cannot be read: {error}") from error
    read = _mooncake if path.suffix == ".jsonl" else _azure
    stamped = sorted(read(path, lines), key=lambda request: request.offset_s)
    if not stamped:
        raise _invalid(f"{path}: holds no request")
    start = stamped[0].offset_s if origin is None else _azure_seconds(origin)
    return tuple(replace(request, offset_s=request.offset_s - start) for request in stamped)


def bundled_trace() -> tuple[TraceRequest, ...]:
    """Seconds 1060 to 1345 of the Azure 2023 code trace: 1013 requests, the first after 13 s of silence."""
    with resources.as_file(resources.files("dynamo_snapshot.replay") / "traces" / BUNDLED_TRACE) as path:
        return read_trace(path, BUNDLED_ORIGIN)


def window(requests: Iterable[TraceRequest], start_s: float, end_s: float) -> tuple[TraceRequest, ...]:
    """Returns the requests with ``start_s <= offset < end_s``, offsets counted from ``start_s``."""
    return tuple(
        replace(request, offset_s=request.offset_s - start_s)
        for request in requests
        if start_s <= request.offset_s < end_s
    )


def faster(requests: Iterable[TraceRequest], factor: float) -> tuple[TraceRequest, ...]:
    """Returns the requests ``factor`` times as fast; raises ``ValueError`` unless it is a positive number."""
    if not 0 < factor < math.inf:
        raise ValueError(f"speed must be a positive number, not {factor}")
    return tuple(replace(request, offset_s=request.offset_s / factor) for request in requests)


def scaled(requests: Iterable[TraceRequest], input_scale: float, output_scale: float) -> tuple[TraceRequest, ...]:
    """Returns the requests with token counts multiplied and rounded, one token at least."""
    return tuple(
        replace(
            request,
            input_tokens=max(1, round(request.input_tokens * input_scale)),
            output_tokens=max(1, round(request.output_tokens * output_scale)),
        )
        for request in requests
    )


def _azure(path: Path, lines: Sequence[str]) -> Iterable[TraceRequest]:
    rows = csv.reader(lines)
    header = next(rows, None)
    if header is None or tuple(header[:3]) != _AZURE_COLUMNS:
        raise _invalid(f"{path}:1: expected the columns {','.join(_AZURE_COLUMNS)}")
    for number, row in enumerate(rows, start=2):
        if not row:
            continue
        try:
            stamp, tokens_in, tokens_out = row[:3]
            yield TraceRequest(_azure_seconds(stamp), _tokens(tokens_in), _tokens(tokens_out))
        except ValueError as error:
            raise _invalid(f"{path}:{number}: expected {','.join(_AZURE_COLUMNS)}: {error}") from error


def _azure_seconds(stamp: str) -> float:
    # fromisoformat knows six decimals at most. The zone does not matter: only differences are used.
    whole, _, fraction = stamp.strip().partition(".")
    moment = datetime.fromisoformat(whole)
    return (moment - datetime(2000, 1, 1)).total_seconds() + (float(f"0.{fraction}") if fraction else 0.0)


def _mooncake(path: Path, lines: Sequence[str]) -> Iterable[TraceRequest]:
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            entry = json.loads(line)
            stamp = float(entry["timestamp"])
            if not math.isfinite(stamp):
                raise ValueError(f"{stamp} is not a time")
            yield TraceRequest(stamp / 1000, _tokens(entry["input_length"]), _tokens(entry["output_length"]))
        except (ValueError, TypeError, KeyError) as error:
            raise _invalid(
                f"{path}:{number}: expected an object with timestamp (ms), input_length and output_length: {error}"
            ) from error


def _tokens(value: object) -> int:
    count = int(str(value))
    if count < 0:
        raise ValueError(f"{count} is not a number of tokens")
    return count


def _invalid(message: str) -> SnapshotError:
    return SnapshotError(
        Reason.CONFIGURATION_INVALID,
        message,
        "A trace is an Azure LLM inference CSV or a Mooncake .jsonl.",
    )
