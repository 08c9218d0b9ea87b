"""The engine in closed form against one that runs pass by pass."""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from dynamo_snapshot.replay.simulation.engine import Engine
from dynamo_snapshot.replay.simulation.job import Job
from dynamo_snapshot.replay.simulation.telemetry import busy_s, sample
from dynamo_snapshot.replay.simulation.timing import EngineTiming, PassTimes
from planner.observation import EngineSample

DEFAULT = EngineTiming()
TIMES = PassTimes(DEFAULT)


@dataclass
class Heard:
    """A listener that keeps what it is told."""

    first: list[Job] = field(default_factory=list)
    ends: list[Job] = field(default_factory=list)

    def first_token(self, job: Job) -> None:
        self.first.append(job)

    def finished(self, job: Job) -> None:
        self.ends.append(job)


def run_until(engine: Engine, now: float) -> None:
    while engine.ends_at <= now:
        engine.proceed()


def run_before(engine: Engine, now: float) -> None:
    while engine.ends_at < now:
        engine.proceed()


def served(timing: EngineTiming, jobs: list[Job], looks: list[float] | None = None) -> Engine:
    """Runs ``jobs`` to their end; ``looks`` are times at which the metrics are read."""
    engine = Engine(timing, Heard())
    engine.start(0.0)
    times = sorted(
        [(job.arrived_s, 1, job) for job in jobs] + [(at, 2, None) for at in looks or ()], key=lambda t: t[:2]
    )
    sequence = 0
    for at, _, job in times:
        run_before(engine, at)
        if job is not None:
            engine.submit(job, at)
        else:
            run_until(engine, at)
            seen = sample(engine, "1", at)
            assert seen.sequence >= sequence
            assert 0 <= (seen.decode_kv_tokens or 0) <= timing.kv_tokens
            assert 0 <= busy_s(engine, at) <= at + 1e-9
            assert (seen.pass_s or 0) >= 0
            sequence = seen.sequence
    run_until(engine, 1e9)
    return engine


@dataclass
class Decoding:
    job: Job
    tokens_left: int
    context: int


def served_pass_by_pass(timing: EngineTiming, jobs: list[Job]) -> None:
    """The same in the plainest way, without preemption."""
    times = PassTimes(timing)
    coming, waiting, prefilling = deque(jobs), deque[Job](), list[Job]()
    decoding: list[Decoding] = []
    now = 0.0
    while coming or waiting or prefilling or decoding:
        if not (waiting or prefilling or decoding):
            now = max(now, coming[0].arrived_s)
        while coming and coming[0].arrived_s <= now:
            waiting.append(coming.popleft())
        budget = timing.max_batched_tokens - len(decoding)
        chunks = []
        for job in prefilling:
            chunks.append((job, min(budget, job.prompt - job.prefilled)))
            budget -= chunks[-1][1]
        while budget > 0 and waiting and len(decoding) + len(prefilling) < timing.max_requests:
            prefilling.append(waiting.popleft())
            chunks.append((prefilling[-1], min(budget, prefilling[-1].prompt)))
            budget -= chunks[-1][1]
        if chunks:
            now += times.prefill(sum(chunk for _, chunk in chunks))
        if decoding:
            now += times.decode(sum(entry.context for entry in decoding))
        for entry in list(decoding):
            entry.tokens_left -= 1
            entry.context += 1
            if entry.tokens_left == 0:
                entry.job.finished_s = now
                decoding.remove(entry)
        for job, chunk in chunks:
            job.prefilled += chunk
            if job.prefilled == job.prompt:
                prefilling.remove(job)
                job.first_token_s = now
                if job.tokens == 1:
                    job.finished_s = now
                else:
                    decoding.append(Decoding(job, job.tokens - 1, job.prompt + 1))


REQUESTS = st.lists(st.tuples(st.floats(0, 3), st.integers(1, 3000), st.integers(1, 120)), min_size=1, max_size=25).map(
    sorted
)


@given(REQUESTS, st.sampled_from([256, 3]), st.sampled_from([8192, 300]), st.lists(st.floats(0, 6), max_size=12))
@example([(0.0, 1, 1)], 256, 8192, [])
def test_stretches_end_where_single_passes_do(
    requests: list[tuple[float, int, int]], max_requests: int, max_tokens: int, looks: list[float]
) -> None:
    timing = EngineTiming(max_requests=max_requests, max_batched_tokens=max_tokens)
    expected = [Job(*request) for request in requests]
    served_pass_by_pass(timing, expected)
    jobs = [Job(*request) for request in requests]
    served(timing, jobs, looks)
    for job, other in zip(jobs, expected, strict=True):
        assert job.first_token_s == pytest.approx(other.first_token_s, abs=1e-6)
        assert job.finished_s == pytest.approx(other.finished_s, abs=1e-6)


@given(st.lists(st.tuples(st.floats(0, 1), st.integers(1, 900), st.integers(1, 300)), min_size=1, max_size=20))
def test_a_full_kv_cache_delays_but_loses_nothing(requests: list[tuple[float, int, int]]) -> None:
    jobs = [Job(*request) for request in sorted(requests)]
    looks = [tenth / 10 for tenth in range(60)]
    engine = served(EngineTiming(kv_tokens=1200, max_batched_tokens=512), jobs, looks)
    assert all(job.finished_s is not None for job in jobs)
    batch = engine.batch
    assert (engine.idle, engine.running, batch.context, batch.reserved) == (True, 0, 0, 0)


def test_a_prompt_larger_than_the_cache_is_served_alone() -> None:
    jobs = [Job(0.0, 5000, 3), Job(0.0, 10, 3)]
    served(EngineTiming(kv_tokens=1000), jobs)
    assert jobs[0].finished_s is not None
    assert jobs[0].finished_s < (jobs[1].first_token_s or 0)


def test_a_preempted_request_computes_its_prompt_again() -> None:
    timing = EngineTiming(kv_tokens=200)
    first, second = Job(0.0, 90, 60), Job(0.0, 90, 60)
    served(timing, [first, second])
    assert first.finished_s is not None
    assert second.finished_s is not None
    alone = PassTimes(timing).decodes(100, 1, 30)
    assert second.finished_s > first.finished_s + alone


@given(st.integers(0, 100_000), st.integers(1, 256), st.integers(1, 3000))
def test_decode_steps_in_a_row_add_up(context: int, batch: int, passes: int) -> None:
    one_by_one = math.fsum(TIMES.decode(context + batch * step) for step in range(passes))
    assert TIMES.decodes(context, batch, passes) == pytest.approx(one_by_one, rel=1e-9)


@given(st.integers(0, 100_000), st.integers(1, 256), st.integers(0, 2000), st.floats(0.01, 0.99))
def test_steps_within_a_time_are_counted_exactly(context: int, batch: int, passes: int, part: float) -> None:
    begin = TIMES.decodes(context, batch, passes)
    length = TIMES.decodes(context, batch, passes + 1) - begin
    assert TIMES.decodes_within(context, batch, begin + part * length, 10_000) == passes
    assert TIMES.decodes_within(context, batch, begin + part * length, passes // 2) == passes // 2


def test_requests_of_one_instant_share_a_pass() -> None:
    jobs = [Job(1.0, 1000, 1), Job(1.0, 3000, 1)]
    served(DEFAULT, jobs)
    assert {job.first_token_s for job in jobs} == {1.0 + TIMES.prefill(4000)}


def test_speed_divides_every_time() -> None:
    fast = PassTimes(EngineTiming(speed=4.0))
    assert fast.prefill(1000) == pytest.approx(TIMES.prefill(1000) / 4)
    assert fast.decode(1000) == pytest.approx(TIMES.decode(1000) / 4)
    assert TIMES.prefill(1000) == pytest.approx(0.0321058589)
    assert TIMES.decode(1000) == pytest.approx(0.00579148, abs=1e-8)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"speed": 0}, "speed must be"),
        ({"speed": math.nan}, "speed must be"),
        ({"kv_tokens": 0}, "kv_tokens must be"),
        ({"max_batched_tokens": 100}, "max_batched_tokens must be at least max_requests"),
    ],
)
def test_an_engine_that_cannot_be_is_refused(wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        EngineTiming(**wrong)


def told(engine: Engine, now: float) -> tuple[int, float, int, int, int, int, int]:
    """Number and seconds of the newest pass; prompts, their tokens, those computed before; decoding, its context."""
    seen: EngineSample = sample(engine, "1", now)
    running, decoding = int(seen.running or 0), int(seen.decode_requests or 0)
    prompts = (running - decoding, int(seen.prefill_tokens or 0), int(seen.prefill_kv_tokens or 0))
    return (seen.sequence, seen.pass_s or 0.0, *prompts, decoding, int(seen.decode_kv_tokens or 0))


def test_metrics_are_those_of_the_newest_finished_pass() -> None:
    engine = Engine(DEFAULT, Heard())
    engine.start(0.0)
    assert told(engine, 0.9) == (1, 0.0, 0, 0, 0, 0, 0)
    engine.submit(Job(1.5, 1000, 3), 1.5)
    assert told(engine, 1.5) == (2, 0.0, 0, 0, 0, 0, 0)
    run_until(engine, 1.5 + TIMES.prefill(1000))
    now = engine.ends_at - 1e-4
    assert told(engine, now) == (4, TIMES.decode(1001), 0, 0, 0, 1, 1001)
    run_until(engine, 1.6)
    assert engine.idle
    assert told(engine, 1.6) == (5, TIMES.decode(1002), 0, 0, 0, 1, 1002)
    assert told(engine, 3.0) == (6, 0.0, 0, 0, 0, 0, 0)
    assert busy_s(engine, 3.0) == pytest.approx(TIMES.prefill(1000) + TIMES.decode(1001) + TIMES.decode(1002))


def test_a_chunked_prompt_shows_in_the_metrics() -> None:
    engine = Engine(DEFAULT, Heard())
    engine.start(0.0)
    engine.submit(Job(0.0, 10_000, 2), 0.0)
    run_until(engine, 0.0)
    engine.proceed()
    assert told(engine, engine.ends_at - 1e-6) == (2, TIMES.prefill(8192), 1, 8192, 0, 0, 0)
    engine.proceed()
    number, seconds, *counts = told(engine, engine.ends_at - 1e-6)
    assert (number, counts) == (3, [1, 1808, 8192, 0, 0])
    assert seconds == pytest.approx(TIMES.prefill(1808))
