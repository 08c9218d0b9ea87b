"""What a simulated run came to."""

from __future__ import annotations

import math
from collections.abc import Sequence

import msgspec

from dynamo_snapshot.replay.simulation.job import Job
from dynamo_snapshot.replay.simulation.setting import Setting


class Replicas(msgspec.Struct, frozen=True, array_like=True):
    """The pool from one moment until the next entry's."""

    at_s: float
    target: int
    ready: int
    starting: int
    draining: int

    @property
    def replicas(self) -> int:
        """All that are paid for."""
        return self.ready + self.starting + self.draining


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """Seconds unless a name says otherwise; attainments are shares of all requests, 0 to 1.

    A request meets the TTFT objective when its first token came in time, the ITL objective when it finished
    and its mean time between tokens is within it (one with a single token has none to miss). One that is
    unfinished at the end meets neither but its TTFT, if that was in time.
    """

    policy: str
    setting: str
    startup: str
    seed: int
    requests: int
    unfinished: int
    ttft_attainment: float
    itl_attainment: float
    attainment: float
    """Both."""
    ttft_p50: float | None
    ttft_p95: float | None
    ttft_p99: float | None
    itl_p50: float | None
    itl_p95: float | None
    itl_p99: float | None
    gpu_hours: float
    """From each replica's order until it stopped, or until the end of the run."""
    duration_s: float
    """From where it is measured to the last request's end, or the trace's if that is later."""
    scalings: int
    """How many times the wanted size changed."""
    starts: int
    """Replicas ordered; those that were there from the start are not counted."""
    failed_starts: int
    """Restores that failed and were followed by a cold start."""
    mean_replicas: float
    """GPU-hours over the duration: starting and draining ones count."""
    peak_replicas: int
    replicas: tuple[Replicas, ...]
    """Every change of the pool's counts; seconds since the trace's begin."""


class Latencies(msgspec.Struct, frozen=True):
    """What requests experienced; see :class:`Outcome` for the rules."""

    unfinished: int
    ttft_attainment: float
    itl_attainment: float
    attainment: float
    ttft: tuple[float | None, float | None, float | None]
    """p50, p95, p99; a request without a first token counts as infinitely late."""
    itl: tuple[float | None, float | None, float | None]


def latencies(jobs: Sequence[Job], setting: Setting) -> Latencies:
    """Measures the requests of one run."""
    ttfts, itls = [], []
    ttft_met = itl_met = both = unfinished = 0
    for job in jobs:
        ttft = math.inf if job.first_token_s is None else job.first_token_s - job.arrived_s
        ttfts.append(ttft)
        itl = job.itl_s
        if itl is not None:
            itls.append(itl)
        finished = job.finished_s is not None
        unfinished += not finished
        in_time = ttft <= setting.ttft_objective_s
        steady = finished and (itl is None or itl <= setting.itl_objective_s)
        ttft_met += in_time
        itl_met += steady
        both += in_time and steady
    count = max(1, len(jobs))
    return Latencies(
        unfinished,
        ttft_met / count,
        itl_met / count,
        both / count,
        _percentiles(ttfts),
        _percentiles(itls),
    )


def _percentiles(values: list[float]) -> tuple[float | None, float | None, float | None]:
    """Nearest rank; None where that request never got it, or there is none."""
    values.sort()

    def at(share: float) -> float | None:
        value = values[max(0, math.ceil(share * len(values)) - 1)] if values else math.inf
        return value if math.isfinite(value) else None

    return at(0.50), at(0.95), at(0.99)
