"""Runs a trace against a policy: requests, engines, start-ups and the policy's ticks in one virtual time."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Protocol, runtime_checkable

from dynamo_snapshot.replay.simulation.job import Job
from dynamo_snapshot.replay.simulation.meter import Meter
from dynamo_snapshot.replay.simulation.outcome import Outcome, Replicas, latencies
from dynamo_snapshot.replay.simulation.pool import Pool
from dynamo_snapshot.replay.simulation.setting import Setting
from dynamo_snapshot.replay.simulation.signals import Policy
from dynamo_snapshot.replay.simulation.startup import StartupModel
from dynamo_snapshot.replay.trace import TraceRequest


@runtime_checkable
class Foreseeing(Protocol):
    """A policy that no production can have: it is shown the future before the run."""

    def foresee(self, requests: Sequence[TraceRequest], setting: Setting, startup: StartupModel) -> None: ...


def simulate(
    requests: Sequence[TraceRequest],
    policy: Policy,
    setting: Setting,
    startup: StartupModel,
    *,
    seed: int = 0,
    duration_s: float | None = None,
    progress: Callable[[float], None] | None = None,
) -> Outcome:
    """Runs until every request is finished; the same arguments give the same outcome.

    The policy's first tick is at second 0, and its answer is in place at once: what ran before the trace is
    not part of it. Later ones are carried out as the fleet does: starts take what ``startup`` draws, starting
    replicas are withdrawn before ready ones, and those drain.

    Args:
        requests: sorted by offset.
        policy: one that was not used before; a :class:`Foreseeing` one is shown the requests first.
        duration_s: how long the trace is; until the last request's offset if None.
        progress: told the share of the trace that is done, 0 to 1, at each tick.
    """
    if isinstance(policy, Foreseeing):
        policy.foresee(requests, setting, startup)
    jobs = [Job(request.offset_s, max(1, request.input_tokens), max(1, request.output_tokens)) for request in requests]
    trace_s = max(duration_s or 0.0, jobs[-1].arrived_s if jobs else 0.0)
    meter = Meter()
    pool = Pool(setting, startup, seed, meter, setting.initial_replicas)
    first = policy.decide(meter.read(pool, 0.0))
    if first is not None and setting.bounded(first) != setting.initial_replicas:
        pool = Pool(setting, startup, seed, meter, setting.bounded(first))
    initial = pool.orders
    timeline = Timeline(pool)
    limit_s = trace_s + setting.drain_limit_s
    scalings, tick, coming = 0, 1, 0
    while True:
        tick_at = tick * policy.interval_s
        arrival_at = jobs[coming].arrived_s if coming < len(jobs) else math.inf
        event_at = pool.next_event_at
        now = min(tick_at, arrival_at, event_at)
        if now >= trace_s and coming == len(jobs) and meter.present == 0:
            break
        if now > limit_s:
            break
        if arrival_at <= now:
            meter.arrived(jobs[coming])
            pool.route(jobs[coming], now)
            coming += 1
        elif event_at <= now:
            pool.proceed()
        else:
            wanted = policy.decide(meter.read(pool, now))
            if wanted is not None and setting.bounded(wanted) != pool.target:
                scalings += 1
                pool.resize(setting.bounded(wanted), now)
            tick += 1
            if progress is not None:
                progress(min(1.0, now / trace_s) if trace_s else 1.0)
        timeline.note(now)
    ended_s = limit_s if meter.present else max(trace_s, meter.last_finished_s)
    experienced = latencies(jobs, setting)
    gpu_s = pool.gpu_seconds(ended_s)
    return Outcome(
        policy=policy.name,
        setting=setting.name,
        startup=startup.name,
        seed=seed,
        requests=len(jobs),
        unfinished=experienced.unfinished,
        ttft_attainment=experienced.ttft_attainment,
        itl_attainment=experienced.itl_attainment,
        attainment=experienced.attainment,
        ttft_p50=experienced.ttft[0],
        ttft_p95=experienced.ttft[1],
        ttft_p99=experienced.ttft[2],
        itl_p50=experienced.itl[0],
        itl_p95=experienced.itl[1],
        itl_p99=experienced.itl[2],
        gpu_hours=gpu_s / 3600,
        duration_s=ended_s,
        scalings=scalings,
        starts=pool.orders - initial,
        failed_starts=pool.failed_starts,
        mean_replicas=gpu_s / ended_s if ended_s else float(initial),
        peak_replicas=timeline.peak,
        replicas=tuple(timeline.entries),
    )


class Timeline:
    """The pool's counts whenever they change."""

    def __init__(self, pool: Pool) -> None:
        self._pool = pool
        self._changes = -1
        self.entries: list[Replicas] = []
        self.peak = 0
        self.note(0.0)

    def note(self, now: float) -> None:
        pool = self._pool
        if pool.changes == self._changes:
            return
        self._changes = pool.changes
        entry = Replicas(now, pool.target, len(pool.ready), len(pool.starting), len(pool.draining))
        self.peak = max(self.peak, entry.ready + entry.starting + entry.draining)
        if self.entries and self.entries[-1].at_s == now:
            self.entries.pop()
        self.entries.append(entry)
