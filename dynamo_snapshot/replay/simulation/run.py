"""Runs a trace against a policy: requests, engines, start-ups and the policy's ticks in one virtual time."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from typing import Protocol, runtime_checkable

import msgspec

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
    measured_from_s: float = 0.0,
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
        measured_from_s: what came or was paid for before is not in the outcome, though it was played.
        progress: told the share of the trace that is done, 0 to 1, at each tick.
    """
    if isinstance(policy, Foreseeing):
        policy.foresee(requests, setting, startup)
    jobs = [Job(request.offset_s, max(1, request.input_tokens), max(1, request.output_tokens)) for request in requests]
    trace_s = max(duration_s or 0.0, jobs[-1].arrived_s if jobs else 0.0)
    run = _Run(policy, setting, startup, seed, trace_s, measured_from_s, progress)
    run.play(jobs)
    return run.outcome(jobs)


class _Run:
    """One run: a pool, its policy, and what is kept of them."""

    def __init__(
        self,
        policy: Policy,
        setting: Setting,
        startup: StartupModel,
        seed: int,
        trace_s: float,
        measured_from_s: float,
        progress: Callable[[float], None] | None,
    ) -> None:
        self._policy = policy
        self._setting = setting
        self._startup = startup
        self._seed = seed
        self._trace_s = trace_s
        self._from_s = measured_from_s
        self._limit_s = trace_s + setting.drain_limit_s
        self._progress = progress
        self._meter = Meter()
        pool = Pool(setting, startup, seed, self._meter, setting.initial_replicas)
        first = policy.decide(self._meter.read(pool, 0.0))
        if first is not None and setting.bounded(first) != setting.initial_replicas:
            pool = Pool(setting, startup, seed, self._meter, setting.bounded(first))
        self._pool = pool
        self._initial = pool.orders
        self._failed_before = 0
        self._timeline = Timeline(pool)
        self._scalings = 0

    def play(self, jobs: Sequence[Job]) -> None:
        """What happens at one moment does so in this order: requests come, the pool goes on, the policy is asked."""
        pool, interval_s = self._pool, self._policy.interval_s
        ticks, tick_at = 1, interval_s
        for job in jobs:
            arrived_s = job.arrived_s
            while tick_at < arrived_s:
                pool.advance(tick_at)
                self._tick(tick_at)
                ticks += 1
                tick_at = ticks * interval_s
            pool.advance(arrived_s, inclusive=False)
            self._meter.arrived(job)
            pool.route(job, arrived_s)
        while True:
            pool.advance(tick_at, stop=self._over)
            if self._over(min(tick_at, pool.next_event_at)):
                return
            self._tick(tick_at)
            ticks += 1
            tick_at = ticks * interval_s

    def outcome(self, jobs: Sequence[Job]) -> Outcome:
        meter, pool, timeline = self._meter, self._pool, self._timeline
        ended_s = self._limit_s if meter.present else max(self._trace_s, meter.last_finished_s)
        jobs = [job for job in jobs if job.arrived_s >= self._from_s]
        experienced = latencies(jobs, self._setting)
        gpu_s = pool.gpu_seconds(ended_s) - timeline.gpu_seconds(self._from_s)
        duration_s = ended_s - self._from_s
        return Outcome(
            policy=self._policy.name,
            setting=self._setting.name,
            startup=self._startup.name,
            seed=self._seed,
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
            duration_s=duration_s,
            scalings=self._scalings,
            starts=pool.orders - self._initial,
            failed_starts=pool.failed_starts - self._failed_before,
            mean_replicas=gpu_s / duration_s if duration_s else float(self._initial),
            peak_replicas=timeline.peak(self._from_s),
            replicas=timeline.since(self._from_s),
        )

    def _over(self, now: float) -> bool:
        """Whether nothing that happens from ``now`` on counts, once all requests have come."""
        return now > self._limit_s or (self._meter.present == 0 and now >= self._trace_s)

    def _tick(self, now: float) -> None:
        pool, setting = self._pool, self._setting
        wanted = self._policy.decide(self._meter.read(pool, now))
        if wanted is not None and setting.bounded(wanted) != pool.target:
            self._scalings += 1
            pool.resize(setting.bounded(wanted), now)
        if now < self._from_s:
            self._scalings, self._initial, self._failed_before = 0, pool.orders, pool.failed_starts
        if self._progress is not None:
            self._progress(min(1.0, now / self._trace_s) if self._trace_s else 1.0)


class Timeline:
    """The pool's counts whenever they change."""

    def __init__(self, pool: Pool) -> None:
        self._pool = pool
        self._entries: list[Replicas] = []
        self.note(0.0)
        pool.on_change = self.note

    def note(self, now: float) -> None:
        pool = self._pool
        if self._entries and self._entries[-1].at_s == now:
            self._entries.pop()
        self._entries.append(Replicas(now, pool.target, len(pool.ready), len(pool.starting), len(pool.draining)))

    def since(self, begin_s: float) -> tuple[Replicas, ...]:
        """What there was at ``begin_s``, as of then, and every change after it."""
        at = max(0, bisect_right(self._entries, begin_s, key=lambda entry: entry.at_s) - 1)
        first = msgspec.structs.replace(self._entries[at], at_s=begin_s)
        return (first, *self._entries[at + 1 :])

    def peak(self, begin_s: float) -> int:
        """The most replicas there were at once since ``begin_s``."""
        return max(entry.replicas for entry in self.since(begin_s))

    def gpu_seconds(self, end_s: float) -> float:
        """What was paid for until ``end_s``."""
        ends = [*(entry.at_s for entry in self._entries[1:]), end_s]
        return sum(
            entry.replicas * max(0.0, min(until, end_s) - entry.at_s)
            for entry, until in zip(self._entries, ends, strict=True)
        )
