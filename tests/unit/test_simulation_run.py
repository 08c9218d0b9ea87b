"""Whole runs: what a policy is shown at each tick, what its answers do, and what the outcome says."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dynamo_snapshot.replay.simulation.job import Job
from dynamo_snapshot.replay.simulation.outcome import Outcome, latencies
from dynamo_snapshot.replay.simulation.run import simulate
from dynamo_snapshot.replay.simulation.setting import Router, Setting
from dynamo_snapshot.replay.simulation.signals import Signals
from dynamo_snapshot.replay.simulation.startup import StartupModel, startup_model
from dynamo_snapshot.replay.simulation.study import STUDIES, study
from dynamo_snapshot.replay.simulation.timing import EngineTiming, PassTimes
from dynamo_snapshot.replay.trace import TraceRequest, bundled_trace

EXACT = startup_model("restore(2,spread=0)")


class Scripted:
    """Answers with a function of the signals, and keeps them with what was to be observed."""

    def __init__(self, answer: Callable[[Signals], int | None], interval_s: float = 1.0) -> None:
        self.name = "scripted"
        self.interval_s = interval_s
        self.seen: list[Signals] = []
        self._answer = answer

    def decide(self, signals: Signals) -> int | None:
        assert signals.observation.ready == signals.ready
        self.seen.append(signals)
        return self._answer(signals)


def static(replicas: int) -> Scripted:
    return Scripted(lambda signals: replicas)


def steady(count: int, every_s: float, tokens_in: int = 500, tokens_out: int = 20) -> list[TraceRequest]:
    return [TraceRequest(number * every_s, tokens_in, tokens_out) for number in range(count)]


def test_the_first_answer_is_in_place_at_once_and_a_static_pool_costs_its_size() -> None:
    outcome = simulate(steady(100, 1.0), static(3), Setting(), EXACT, duration_s=120.0)
    assert (outcome.scalings, outcome.starts, outcome.peak_replicas) == (0, 0, 3)
    assert outcome.gpu_hours == pytest.approx(3 * 120 / 3600)
    assert [tuple(msgspec.to_builtins(entry)) for entry in outcome.replicas] == [(0.0, 3, 3, 0, 0)]
    assert outcome.attainment == 1.0


def test_without_an_answer_the_pool_stays_as_it_was() -> None:
    outcome = simulate(steady(10, 1.0), Scripted(lambda signals: None), Setting(initial_replicas=2), EXACT)
    assert outcome.mean_replicas == pytest.approx(2.0)


def test_a_later_answer_takes_the_start_up_time_and_is_charged_from_the_order() -> None:
    policy = Scripted(lambda signals: 2 if signals.now < 9.5 else 4 if signals.now < 29.5 else 1)
    outcome = simulate(steady(41, 1.0), policy, Setting(), EXACT)
    steps = [(entry.at_s, entry.target, entry.ready, entry.starting) for entry in outcome.replicas]
    assert steps[:4] == [(0.0, 2, 2, 0), (10.0, 4, 2, 2), (12.0, 4, 4, 0), (30.0, 1, 1, 0)]
    assert (outcome.scalings, outcome.starts, outcome.peak_replicas) == (2, 2, 4)
    assert outcome.gpu_hours * 3600 == pytest.approx(2 * 10 + 4 * 20 + 1 * 10, abs=1.0)
    by_time = {signals.now: signals for signals in policy.seen}
    assert (by_time[11.0].ready, by_time[11.0].starting, by_time[11.0].target) == (2, 2, 4)
    assert (by_time[12.0].ready, by_time[12.0].starting) == (4, 0)


def test_answers_are_kept_within_the_bounds() -> None:
    policy = Scripted(lambda signals: 99 if signals.now < 5 else -3)
    outcome = simulate(steady(20, 1.0), policy, Setting(min_replicas=2, max_replicas=6, initial_replicas=2), EXACT)
    assert {entry.target for entry in outcome.replicas} == {6, 2}


def test_signals_tell_what_happened_since_the_tick_before() -> None:
    times = PassTimes(EngineTiming())
    requests = [TraceRequest(1.2, 1000, 3), TraceRequest(1.2, 3000, 1), TraceRequest(2.999, 400, 5)]
    policy = static(1)
    simulate(requests, policy, Setting(), EXACT, duration_s=5.0)
    by_time = {signals.now: signals for signals in policy.seen}
    quiet, busy, late, after = (by_time[now] for now in (1.0, 2.0, 3.0, 4.0))
    assert (quiet.arrivals, quiet.in_flight, quiet.busy) == (0, 0.0, 0.0)
    first_s = times.prefill(4000)
    decode_s = times.decodes(1001, 1, 2)
    assert (busy.arrivals, busy.input_tokens, busy.finished, busy.output_tokens) == (2, 4000, 2, 4)
    assert busy.busy == pytest.approx(first_s + decode_s)
    assert busy.in_flight == pytest.approx(2 * first_s + decode_s)
    assert (late.waiting, late.arrivals) == (1, 1)
    sample = late.observation.samples[0]
    assert (sample.running, sample.queued, sample.pass_s) == (0, 0, 0)
    assert (after.waiting, after.finished) == (0, 1)


def test_queued_work_is_that_of_the_end_of_the_newest_pass() -> None:
    policy = static(1)
    requests = [TraceRequest(0.0, 8192, 2)] * 12
    simulate([*requests, TraceRequest(0.99, 5, 1)], policy, Setting(), EXACT, duration_s=3.0)
    sample = policy.seen[1].observation.samples[0]
    # Five passes are over: the fifth began the fifth prompt, and what comes in the sixth is not told yet.
    assert (sample.sequence, sample.running, sample.prefill_tokens) == (6, 3, 8191)
    assert (sample.queued, sample.queued_tokens) == (7, 7 * 8192)


def test_requests_that_never_finish_count_as_missed_and_end_the_run() -> None:
    setting = Setting(engine=EngineTiming(speed=0.01), drain_limit_s=5.0)
    outcome = simulate(steady(50, 0.1, 2000), static(1), setting, EXACT)
    assert outcome.unfinished > 40
    assert outcome.duration_s == pytest.approx(4.9 + 5.0)
    assert outcome.attainment <= 1 - outcome.unfinished / 50
    assert outcome.ttft_p99 is None


def test_an_empty_trace_costs_what_runs() -> None:
    outcome = simulate([], static(2), Setting(), EXACT, duration_s=30.0)
    assert (outcome.requests, outcome.ttft_p50) == (0, None)
    assert outcome.gpu_hours == pytest.approx(60 / 3600)


def test_a_run_is_the_same_again_and_another_seed_draws_other_times() -> None:
    startup = startup_model("restore(2,cold=20,failures=0.2)")

    def swinging(seed: int) -> Outcome:
        policy = Scripted(lambda signals: 2 + 6 * (int(signals.now) % 40 < 20))
        return simulate(bundled_trace(), policy, Setting(engine=EngineTiming(speed=0.3)), startup, seed=seed)

    assert msgspec.json.encode(swinging(1)) == msgspec.json.encode(swinging(1))
    assert swinging(1).gpu_hours != swinging(2).gpu_hours
    assert msgspec.json.decode(msgspec.json.encode(swinging(1)), type=Outcome) == swinging(1)
    assert sum(swinging(seed).failed_starts for seed in range(3)) > 5


def test_progress_is_told() -> None:
    told: list[float] = []
    simulate(steady(10, 1.0), static(1), Setting(), EXACT, progress=told.append)
    assert told == sorted(told)
    assert told[-1] == 1.0


class Prophet:
    """A policy that wants to see the future."""

    name = "prophet"
    interval_s = 1.0
    shown: Sequence[TraceRequest] = ()

    def foresee(self, requests: Sequence[TraceRequest], setting: Setting, startup: StartupModel) -> None:
        self.shown = requests

    def decide(self, signals: Signals) -> int | None:
        return len(self.shown)


def test_a_foreseeing_policy_is_shown_the_requests_before_the_run() -> None:
    assert simulate(steady(5, 1.0), Prophet(), Setting(), EXACT).peak_replicas == 5


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 10_000), st.sampled_from(list(Router)), st.floats(0.0, 0.5))
def test_whatever_a_policy_does_every_request_is_served_and_every_gpu_second_counted(
    seed: int, router: Router, failures: float
) -> None:
    dice = random.Random(seed)
    requests = sorted(
        (TraceRequest(dice.uniform(0, 60), dice.randint(0, 9000), dice.randint(0, 200)) for _ in range(120)),
        key=lambda request: request.offset_s,
    )
    policy = Scripted(lambda signals: dice.choice([None, 1, 2, 5, 9]), interval_s=dice.choice([0.5, 1.0, 7.0]))
    setting = Setting(router=router, engine=EngineTiming(speed=0.5, kv_tokens=40_000))
    startup = startup_model(f"restore(3,cold=15,failures={failures:.3f})")
    outcome = simulate(requests, policy, setting, startup, seed=seed)
    assert (outcome.requests, outcome.unfinished) == (120, 0)
    times = [entry.at_s for entry in outcome.replicas] + [outcome.duration_s]
    held = sum(
        (entry.ready + entry.starting + entry.draining) * (times[place + 1] - entry.at_s)
        for place, entry in enumerate(outcome.replicas)
        if entry.at_s <= outcome.duration_s
    )
    assert outcome.gpu_hours * 3600 == pytest.approx(held, rel=1e-6)
    assert all(entry.ready + entry.starting == entry.target for entry in outcome.replicas)
    sequences: dict[str, int] = {}
    for signals in policy.seen:
        assert 0 <= signals.busy <= 1
        assert signals.ready == signals.observation.ready == len(signals.observation.samples)
        for sample in signals.observation.samples:
            assert sample.sequence >= sequences.get(sample.worker_id, -1)
            sequences[sample.worker_id] = sample.sequence
    assert sum(signals.arrivals for signals in policy.seen) <= 120


def job(ttft_s: float | None, itl_s: float | None, tokens: int = 11) -> Job:
    made = Job(10.0, 5, tokens)
    if ttft_s is not None:
        made.first_token_s = 10.0 + ttft_s
        if itl_s is not None:
            made.finished_s = made.first_token_s + itl_s * (tokens - 1)
    return made


def test_attainments_count_every_request() -> None:
    setting = Setting(ttft_objective_s=1.0, itl_objective_s=0.1)
    jobs = [job(0.5, 0.05), job(0.5, 0.2), job(2.0, 0.05), job(0.5, None), job(None, None), job(0.9, 0.0, tokens=1)]
    found = latencies(jobs, setting)
    assert (found.ttft_attainment, found.itl_attainment, found.attainment) == pytest.approx((4 / 6, 3 / 6, 2 / 6))
    assert found.unfinished == 2
    assert found.ttft == (pytest.approx(0.5), None, None)
    assert found.itl[2] == pytest.approx(0.2)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"min_replicas": 0}, "min_replicas must be at least 1"),
        ({"max_replicas": 2, "min_replicas": 3, "initial_replicas": 3}, "max_replicas must be"),
        ({"initial_replicas": 17}, "initial_replicas must be within"),
        ({"ttft_objective_s": 0.0}, "objectives must be positive"),
        ({"drain_limit_s": -1.0}, "drain_limit_s must be"),
    ],
)
def test_a_setting_that_cannot_be_is_refused(wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Setting(**wrong)


def test_studies_are_found_by_trace_and_by_file() -> None:
    assert len(STUDIES) == 4
    for one in STUDIES:
        assert study(one.trace) is study(one.file) is study(one.file.partition(".")[0]) is one
        assert one.setting.name == one.trace
        assert (one.setting.min_replicas, one.setting.max_replicas, one.setting.ttft_objective_s) == (1, 16, 1.5)
    assert study("another") is None


@settings(max_examples=20, deadline=None)
@given(st.integers(0, 10_000), st.one_of(st.integers(0, 59), st.floats(0.0, 59.0)))
def test_what_is_measured_from_a_moment_on_is_the_rest_of_the_run(seed: int, cut_s: float) -> None:
    def run(measured_from_s: float) -> Outcome:
        dice = random.Random(seed)
        policy = Scripted(lambda signals: dice.choice([None, 1, 2, 5, 9]), interval_s=dice.choice([0.5, 1.0, 7.0]))
        startup = startup_model("restore(3,cold=15,failures=0.2)")
        return simulate(requests, policy, Setting(), startup, seed=seed, measured_from_s=measured_from_s)

    requests = steady(60, 1.0, 4000)
    whole, rest = run(0.0), run(cut_s)
    assert rest.requests == sum(request.offset_s >= cut_s for request in requests)
    assert rest.duration_s == pytest.approx(whole.duration_s - cut_s)
    assert [entry for entry in whole.replicas if entry.at_s > cut_s] == list(rest.replicas[1:])
    assert rest.replicas[0].at_s == cut_s
    ends = [entry.at_s for entry in rest.replicas[1:]] + [whole.duration_s]
    paid = sum(entry.replicas * (end - entry.at_s) for entry, end in zip(rest.replicas, ends, strict=True))
    assert rest.gpu_hours * 3600 == pytest.approx(paid)
    assert rest.mean_replicas == pytest.approx(paid / rest.duration_s)
    assert rest.peak_replicas == max(entry.replicas for entry in rest.replicas)
    earlier = [entry.target for entry in whole.replicas if entry.at_s < cut_s] or [rest.replicas[0].target]
    targets = [earlier[-1], *(entry.target for entry in rest.replicas)]
    assert rest.scalings == sum(before != after for before, after in itertools.pairwise(targets))


def test_requests_from_before_are_played_but_not_measured() -> None:
    busy = [TraceRequest(0.0, 8000, 400) for _ in range(30)]
    late = simulate([*busy, TraceRequest(5.0, 10, 1)], static(1), Setting(), EXACT, measured_from_s=5.0)
    alone = simulate([TraceRequest(0.0, 10, 1)], static(1), Setting(), EXACT)
    assert (late.requests, alone.requests) == (1, 1)
    assert late.ttft_p50 is not None
    assert alone.ttft_p50 is not None
    assert late.ttft_p50 > 2 * alone.ttft_p50, "it finds the replica as those before it left it"
