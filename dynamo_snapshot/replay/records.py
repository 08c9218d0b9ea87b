"""What a load run leaves behind: one record a request, and their summary."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import msgspec

from dynamo_snapshot.model import Value


class RequestRecord(Value, frozen=True):
    """One request. Times are seconds after the start of the run."""

    id: str
    """Sent as ``x-request-id``; the frontend's log names it."""
    scheduled: float
    sent: float
    first_token: float | None = None
    last_token: float | None = None
    finished: float | None = None
    """When the response had ended, well or not."""
    input_tokens: int = 0
    requested_tokens: int = 0
    tokens: int = 0
    status: int | None = None
    """HTTP status; None: there was no response."""
    error: str | None = None
    """Why it counts as failed; None: it was answered in full."""
    worker: int | None = None
    """The instance that the request was first routed to; a migration does not change it."""

    @property
    def failed(self) -> bool:
        return self.error is not None

    @property
    def ttft_s(self) -> float | None:
        """Seconds from the scheduled time to the first token, so a late generator does not flatter it."""
        return None if self.first_token is None else self.first_token - self.scheduled


class Percentiles(Value, frozen=True):
    """Of a set of values; None: there were none."""

    p50: float | None = None
    p95: float | None = None
    p99: float | None = None
    max: float | None = None


class LoadSummary(Value, frozen=True):
    """A load run in numbers. Durations are seconds."""

    sent: int
    failed: int
    cancelled: int
    duration_s: float
    ttft_s: Percentiles
    lateness_s: Percentiles
    """How late the generator itself was: sent minus scheduled."""
    generator_cpu_s: float
    """CPU time of the generator's thread."""
    generator_cores: float
    """The same per second of the run."""
    concurrency_limit_hits: int
    """Requests that waited because too many were in flight; above zero, the load was not open-loop."""
    peak_in_flight: int
    tokens: int
    by_worker: dict[str, int] = msgspec.field(default_factory=dict)
    """Requests by the instance that they were first routed to."""
    errors: dict[str, int] = msgspec.field(default_factory=dict)
    """Failures by their text."""


def percentiles(values: Iterable[float]) -> Percentiles:
    """Nearest-rank percentiles."""
    ordered = sorted(values)
    if not ordered:
        return Percentiles()

    def at(share: float) -> float:
        return ordered[max(0, math.ceil(share * len(ordered)) - 1)]

    return Percentiles(p50=at(0.50), p95=at(0.95), p99=at(0.99), max=ordered[-1])


CANCELLED = "cancelled"


def summarize(
    records: Sequence[RequestRecord],
    *,
    duration_s: float,
    generator_cpu_s: float,
    concurrency_limit_hits: int,
    peak_in_flight: int,
) -> LoadSummary:
    """Counts ``records``; a request that the run's own end cut off is cancelled, not failed."""
    by_worker: dict[str, int] = {}
    errors: dict[str, int] = {}
    for record in records:
        if record.worker is not None:
            by_worker[str(record.worker)] = by_worker.get(str(record.worker), 0) + 1
        if record.error is not None:
            errors[record.error] = errors.get(record.error, 0) + 1
    cancelled = errors.get(CANCELLED, 0)
    return LoadSummary(
        sent=len(records),
        failed=sum(record.failed for record in records) - cancelled,
        cancelled=cancelled,
        duration_s=duration_s,
        ttft_s=percentiles(record.ttft_s for record in records if record.ttft_s is not None),
        lateness_s=percentiles(record.sent - record.scheduled for record in records),
        generator_cpu_s=generator_cpu_s,
        generator_cores=generator_cpu_s / duration_s if duration_s > 0 else 0.0,
        concurrency_limit_hits=concurrency_limit_hits,
        peak_in_flight=peak_in_flight,
        tokens=sum(record.tokens for record in records),
        by_worker=by_worker,
        errors=errors,
    )
