"""Request traces: when requests came, and how many tokens each took in and gave out.

The published formats (Azure, BurstGPT, Mooncake and Dynamo's own, see :mod:`trace_formats`) are told apart by
their first line, compressed with gzip or not.
"""

from __future__ import annotations

import gzip
import math
import zlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from importlib import resources
from pathlib import Path

from dynamo_snapshot.errors import SnapshotError
from dynamo_snapshot.model import Reason
from dynamo_snapshot.replay.trace_formats import Stamped, WrongLine, format_of

BUNDLED_TRACE = "azure-code-2023-1060-1345.csv"
BUNDLED_ORIGIN = "2023-11-16 18:34:43.9799600"
"""Second 1060 of the whole trace; the excerpt's first request comes 13 s later."""

_GZIP = b"\x1f\x8b"


@dataclass(frozen=True)
class TraceRequest:
    """One request: seconds after the start, tokens in, tokens out."""

    offset_s: float
    input_tokens: int
    output_tokens: int


def read_trace(path: Path, origin: str | None = None) -> tuple[TraceRequest, ...]:
    """Reads a trace: a file, or a folder of segments as Dynamo writes them (``*.jsonl``, ``*.jsonl.gz``).

    Args:
        origin: the time stamp, as the file writes them, that offsets count from; the first request's if None.

    Raises:
        SnapshotError: ``configuration_invalid``, naming file, line and what was expected.
    """
    try:
        files = sorted(one for one in path.iterdir() if _is_segment(one)) if path.is_dir() else [path]
    except OSError as error:
        raise _invalid(f"{path}: cannot be read: {error.strerror}") from error
    requests: list[Stamped] = []
    begin: float | None = None
    for file in files:
        lines = _lines(file)
        kind = format_of(lines, json_lines=_is_segment(file))
        try:
            requests.extend(kind.read(lines))
            begin = None if origin is None else kind.seconds(origin)
        except WrongLine as error:
            raise _invalid(f"{file}:{error.line}: {error}") from error
        except ValueError as error:
            raise _invalid(f"{file}: {origin} is not a time as this trace writes them: {error}") from error
    if not requests:
        raise _invalid(f"{path}: holds no {'request' if files else '*.jsonl or *.jsonl.gz'}")
    requests.sort(key=lambda request: request.seconds)
    begin = requests[0].seconds if begin is None else begin
    return tuple(
        TraceRequest(request.seconds - begin, request.input_tokens, request.output_tokens) for request in requests
    )


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


def _lines(path: Path) -> Sequence[str]:
    try:
        data = path.read_bytes()
        if data.startswith(_GZIP):
            data = gzip.decompress(data)
        return data.decode("utf-8-sig").splitlines()
    except (OSError, EOFError, zlib.error, UnicodeDecodeError) as error:
        cause = getattr(error, "strerror", None) or error
        raise _invalid(f"{path}: cannot be read: {cause}") from error


def _is_segment(path: Path) -> bool:
    return path.name.endswith((".jsonl", ".jsonl.gz"))


def _invalid(message: str) -> SnapshotError:
    return SnapshotError(
        Reason.CONFIGURATION_INVALID,
        message,
        "A trace is an Azure or BurstGPT .csv, a Mooncake .jsonl or a Dynamo request trace, each also as .gz.",
    )
