"""The estimators that the policy is composed of, each alone."""

from __future__ import annotations

import gc
import math
import random
import weakref
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dynamo_snapshot.model import FleetStatus, PoolStatus, ReplicaState, ReplicaStatus, StartTimes, Way
from dynamo_snapshot.replay.simulation.run import simulate
from dynamo_snapshot.replay.simulation.setting import Setting
from dynamo_snapshot.replay.simulation.signals import Signals
from dynamo_snapshot.replay.simulation.startup import startup_model
from dynamo_snapshot.replay.simulation.timing import EngineTiming, PassTimes
from dynamo_snapshot.replay.trace import TraceRequest
from planner.budget import Want, allocate
from planner.collector import set_aside_what_stays
from planner.demand import Flow, infer
from planner.fleet_status import pool_view
from planner.history import History
from planner.load import Seen, Steps, follow
from planner.observation import EngineSample, Observation, Role, Starting
from planner.outlook import (
    Backlogs,
    Capacity,
    Choice,
    Future,
    cheapest,
    cheapest_there,
    flood,
    futures,
    misses_by_size,
    priced,
)
from planner.service import Service, learn
from planner.startup import PRIOR_S, StartUp, fixed_and_rate, restore_times
from planner.steady import Steady, Terms, Tick
from planner.waiting import Prompt, Prompts

SPEED = 0.3
TERMS = Terms(10.0, Prompts((Prompt(0.1, 0.6), Prompt(0.45, 0.4)), 1.5), 0.95)


def poisson(rate: float, seconds: float, prompt: int = 2000, tokens: int = 20, seed: int = 1) -> list[TraceRequest]:
    dice = random.Random(seed)
    requests, at = [], 0.0
    while (at := at + dice.expovariate(rate)) < seconds:
        requests.append(TraceRequest(at, max(1, round(dice.expovariate(1 / prompt))), tokens))
    return requests


class Probe:
    """Learns and infers beside a pool of constant size, and keeps what really came."""

    name = "probe"
    interval_s = 1.0

    def __init__(self, replicas: int) -> None:
        self.replicas = replicas
        self.service, self.flow = Service(), Flow()
        self.seen = Seen()
        self.came = self.inferred = 0.0

    def decide(self, signals: Signals) -> int:
        _, self.seen, steps = follow(signals.observation, self.seen, signals.now, 5.0)
        self.service = learn(self.service, steps)
        if self.service.known and signals.now > 0:
            demand, self.flow = infer(steps, self.interval_s, self.service, self.flow)
            self.inferred += demand.tokens
            self.came += signals.input_tokens
        return self.replicas


def probe(requests: list[TraceRequest], replicas: int) -> Probe:
    probe = Probe(replicas)
    setting = Setting(engine=EngineTiming(speed=SPEED), initial_replicas=replicas)
    simulate(requests, probe, setting, startup_model("restore-2s"))
    return probe


@pytest.mark.parametrize("replicas", [2, 4])
def test_the_rates_of_an_engine_are_learnt_from_its_newest_passes(replicas: int) -> None:
    seen = probe(poisson(8, 200), replicas)
    times = PassTimes(EngineTiming(speed=SPEED))
    typical = times.prefill(2000) / 2000
    assert seen.service.second_per_token == pytest.approx(typical, rel=0.25)
    base, _ = seen.service.decode_line()
    assert base == pytest.approx(times.decode(0), rel=0.1)


@pytest.mark.parametrize(("rate", "replicas"), [(5, 2), (10, 3), (10, 5)])
def test_arrivals_are_inferred_from_what_engines_tell(rate: float, replicas: int) -> None:
    seen = probe(poisson(rate, 300), replicas)
    assert seen.inferred == pytest.approx(seen.came, rel=0.4)
    assert seen.flow.prompt == pytest.approx(2000, rel=0.3)


def test_an_engines_first_pass_is_a_warm_up_and_teaches_nothing() -> None:
    first = EngineSample("a", 0, 1, 1, 0, pass_s=30.0, prefill_tokens=100, decode_requests=0)
    assert learn(Service(), [(None, first, 0.0)]) == Service()


def test_a_pass_that_took_far_too_long_counts_as_a_bounded_outlier() -> None:
    before = EngineSample("a", 0, 1, 1, 0)
    usual = EngineSample("a", 0, 2, 1, 0, pass_s=0.1, prefill_tokens=1000, decode_requests=0)
    paused = EngineSample("a", 0, 3, 1, 0, pass_s=60.0, prefill_tokens=1000, decode_requests=0)
    service = learn(Service(), [(before, usual, 0.0)] * 50)
    assert learn(service, [(before, paused, 0.0)]).second_per_token < 1.1e-4


def test_where_there_are_many_engines_their_passes_are_learnt_from_in_turn() -> None:
    engines = [EngineSample(str(number), 0, 1, 1, 0) for number in range(700)]
    steps = Steps([None] * 700, engines, [0.0] * 700)
    parts = [steps.some(256, turn) for turn in range(3)]
    assert all(len(part) <= 256 for part in parts)
    assert sorted(int(sample.worker_id) for part in parts for _, sample, _ in part) == list(range(700))
    assert steps.some(700, 5) is steps


@given(st.data())
def test_ranks_are_followed_in_whatever_order_they_are_told(data: st.DataObject) -> None:
    """The order is a shortcut, no more."""
    ranks = [(worker, rank) for worker in "abc" for rank in (0, 1)]
    seen, told = Seen(), dict[tuple[str, int], tuple[int, float]]()
    for second in range(5):
        some = data.draw(st.lists(st.sampled_from(ranks), unique=True))
        sequences = {rank: data.draw(st.integers(0, 2)) for rank in some}
        samples = tuple(EngineSample(*rank, sequences[rank], 1.0, 0.0) for rank in some)
        before = {rank: told[rank] for rank in some if rank in told}
        _, seen, steps = follow(Observation(3, samples), seen, float(second), 60.0)
        for known, sample, unchanged_s in steps:
            rank = (sample.worker_id, sample.dp_rank)
            assert (None if known is None else known.sequence) == (before[rank][0] if rank in before else None)
            same = rank in before and before[rank][0] == sample.sequence
            assert unchanged_s == (second - before[rank][1] if same else 0.0)
        told = {
            rank: before[rank] if rank in before and before[rank][0] == sequences[rank] else (sequences[rank], second)
            for rank in some
        }


def test_quantiles_of_starts_come_from_what_was_measured_else_from_the_prior() -> None:
    known = StartUp({"restore": tuple(float(second) for second in range(1, 11))})
    assert known.quantile("restore", 0.8) == 8.0
    assert known.quantile("cold_start", 0.8) == PRIOR_S["cold_start"]
    assert StartUp({"restore": (2.0, 3.0)}).quantile("restore", 0.8) == 3.0
    assert StartUp().next_way() == "restore"
    assert StartUp({"cold_start": (45.0,)}).next_way() == "cold_start"
    assert StartUp({"cold_start": (45.0,), "restore": (2.0,)}).next_way() == "restore"


def test_what_is_on_its_way_is_expected_by_its_age() -> None:
    known = StartUp({"restore": (2.0, 3.0, 4.0, 5.0, 6.0, 7.0)})
    assert known.remaining(Starting("restore", 0.0), 0.5) == 4.0
    assert known.remaining(Starting("restore", 4.5), 0.5) == 1.5
    assert known.remaining(Starting("restore", 20.0), 0.5) == 10.0


def test_a_restore_is_a_fixed_part_and_bytes_at_a_rate() -> None:
    gib = 1 << 30
    fixed, per_byte = fixed_and_rate([(10 * gib, 4.3), (50 * gib, 13.7), (100 * gib, 25.3)])
    assert fixed == pytest.approx(1.98, abs=0.1)
    assert per_byte * gib == pytest.approx(0.2336, rel=0.02)
    sizes = {"small": 10 * gib, "large": 50 * gib, "new": 100 * gib}
    series = [("small", (4.3,)), ("large", (13.7,))]
    assert restore_times(series, "large", sizes) == (13.7,)
    assert restore_times(series, "new", sizes) == pytest.approx((25.45, 25.45), abs=0.1)
    assert restore_times(series, "unsized", {}) == (4.3, 13.7)


def test_the_fleets_status_tells_what_is_on_its_way_and_how_long_starts_took() -> None:
    def replica(number: int, state: ReplicaState, way: Way, ordered_at: float | None) -> ReplicaStatus:
        return ReplicaStatus(
            replica_id=f"r{number}", pool="main", node="n", state=state, since=99.0, way=way, ordered_at=ordered_at
        )

    status = FleetStatus(
        fleet="f",
        at=100.0,
        fence=1,
        pools=(
            PoolStatus(
                pool="main", role="decode", target=3, achievable=3, serving=1, pending=2, draining=0, snapshot_id="new"
            ),
        ),
        replicas=(
            replica(1, ReplicaState.SERVING, Way.RESTORE, 10.0),
            replica(2, ReplicaState.RESTORING, Way.RESTORE, 98.5),
            replica(3, ReplicaState.STARTING, Way.COLD_START, None),
        ),
        start_times=(
            StartTimes(pool="main", way=Way.RESTORE, snapshot_id="old", node="n", seconds=(9.0,)),
            StartTimes(pool="main", way=Way.RESTORE, snapshot_id="new", node="n", seconds=(2.0, 2.5)),
            StartTimes(pool="main", way=Way.COLD_START, node="n", seconds=(40.0,)),
            StartTimes(pool="other", way=Way.COLD_START, node="n", seconds=(1.0,)),
        ),
    )
    view = pool_view(status, Role.DECODE, now=100.5, max_age_s=10)
    assert view is not None
    assert view.starting == (Starting("restore", 2.0), Starting("cold_start", 1.5))
    assert view.start_times == {"cold_start": (40.0,), "restore": (2.0, 2.5)}


def history(demand: list[float], requests_per_token: float = 1 / 2000) -> History:
    known = History()
    for tokens in demand:
        known = known.add(1.0, tokens, tokens * requests_per_token)
    return known


@given(st.lists(st.tuples(st.floats(0.05, 20), st.floats(0, 1e5)), min_size=1, max_size=60))
def test_the_record_keeps_all_that_came_in_bins_of_one_second(ticks: list[tuple[float, float]]) -> None:
    known = History()
    for elapsed_s, tokens in ticks:
        known = known.add(elapsed_s, tokens, tokens / 1000)
    total = sum(tokens for _, tokens in ticks)
    assert known.tokens[-1] + known.open_tokens == pytest.approx(total, abs=1e-3)
    assert known.bins == pytest.approx(sum(elapsed_s for elapsed_s, _ in ticks), abs=1.001)
    assert len(known.tokens) == len(known.requests) == known.bins + 1


def room(ready: int, lead_s: float = 2.0, arrivals: tuple[float, ...] = ()) -> Capacity:
    return Capacity(
        ready=ready, backlogs=Backlogs.of([0.0] * ready), arrivals=arrivals, lead_s=lead_s, share=1.0, slack_s=1.0
    )


def need(known: History, lead_s: float, ready: int = 1) -> float:
    """The size at which one request in a hundred misses, roughly."""
    alike = known.alike(known.now, round(lead_s + 1), 1e-4)
    possible = futures(known, alike, room(ready, lead_s), lead_s + 1, 1.0, 1e-4)
    return cheapest_there(misses_by_size(possible, 1, 64), 20.0)


def test_a_smooth_load_gets_little_headroom_and_a_bursty_one_more() -> None:
    smooth = history([20_000.0] * 600)
    dice = random.Random(7)
    bursty = history([92_000.0 if dice.random() < 0.2 else 2_000.0 for _ in range(600)])
    assert need(smooth, 2.0) <= 3
    assert need(bursty, 2.0) > 1.5 * need(smooth, 2.0)


def test_bursts_on_record_are_provided_for_in_silence_and_longer_starts_get_no_less() -> None:
    calm = [0.0] * 25
    burst = [60_000.0] * 8
    known = history((calm + burst) * 20 + calm)
    quick, slow = need(known, 2.0), need(known, 20.0)
    assert 1 < quick <= slow
    assert need(history([0.0] * 600), 2.0) == 1


def test_capacity_on_its_way_counts_with_its_arrival() -> None:
    known = history(([0.0] * 30 + [50_000.0] * 6) * 2 + [0.0] * 30 + [50_000.0])
    alike = known.alike(known.now, 4, 1e-4)
    soon = futures(known, alike, room(1, 3.0, (0.5, 0.5)), 4.0, 1.0, 1e-4)
    late = futures(known, alike, room(1, 3.0, (3.0, 3.0)), 4.0, 1.0, 1e-4)
    assert max(future.needs for future in soon) < max(future.needs for future in late)


def test_a_new_replica_is_flooded_where_many_requests_are_decoding() -> None:
    alone = flood(decoding=15, rate=6, prefill_s=0.3, slack_s=0.8, new=1)
    assert alone > 5
    assert flood(decoding=15, rate=6, prefill_s=0.3, slack_s=0.8, new=2) == 0
    assert flood(decoding=2, rate=6, prefill_s=0.3, slack_s=0.8, new=1) == 0


@given(
    st.lists(st.tuples(st.floats(0, 40), st.floats(0, 20), st.floats(0, 3)), max_size=30),
    st.integers(0, 4),
    st.integers(1, 40),
)
def test_misses_fall_and_never_below_zero_with_each_larger_size(
    possible: list[tuple[float, float, float]], lowest: int, more: int
) -> None:
    by_size = misses_by_size([Future(*one) for one in possible], lowest, lowest + more)
    choices = priced(by_size, 10.0, lambda size: 0.0)
    sizes = [choice.replicas for choice in choices]
    misses = [choice.misses for choice in choices]
    assert sizes[0] == lowest
    assert sizes == sorted(set(sizes))
    assert sizes[-1] <= lowest + more
    assert all(later <= earlier + 1e-9 for earlier, later in pairwise(misses))
    assert min(misses) >= 0
    assert cheapest_there(by_size, 10.0) == cheapest(choices).replicas


@given(st.lists(st.floats(0, 50), max_size=20), st.floats(0, 50))
def test_what_backlogs_leave_free_is_the_mean_over_replicas(seconds: list[float], within_s: float) -> None:
    free = Backlogs.of(seconds).free(within_s)
    each = [max(0.0, within_s - one) for one in seconds] or [within_s]
    assert free == pytest.approx(sum(each) / len(each), abs=1e-6)


wants = st.builds(
    lambda minimum, more, gpus, misses: Want(
        minimum + more,
        minimum,
        gpus,
        tuple(Choice(minimum + step, miss, 0.0) for step, miss in enumerate(sorted(misses, reverse=True))),
    ),
    st.integers(0, 3),
    st.integers(0, 12),
    st.integers(1, 4),
    st.lists(st.floats(0, 50), max_size=6),
)


@given(st.dictionaries(st.text(min_size=1, max_size=3), wants, min_size=1, max_size=4), st.integers(0, 60))
def test_the_budget_holds_and_nothing_is_left_that_would_fit(pools: dict[str, Want], gpus: int) -> None:
    given_ = allocate(pools, gpus)
    least = sum(min(want.minimum, want.replicas) * want.gpus for want in pools.values())
    used = sum(given_[name] * want.gpus for name, want in pools.items())
    assert used <= max(gpus, least)
    for name, want in pools.items():
        assert min(want.minimum, want.replicas) <= given_[name] <= want.replicas
        assert given_[name] == want.replicas or used + want.gpus > gpus


def test_what_averts_the_most_misses_for_its_gpus_is_bought_first() -> None:
    few = Want(4, 1, 1, (Choice(1, 0.4, 0.0), Choice(4, 0.1, 0.0)))
    many = Want(4, 1, 1, (Choice(1, 6.0, 0.0), Choice(4, 0.0, 0.0)))
    assert allocate({Role.PREFILL: few, Role.DECODE: many}, 6) == {Role.PREFILL: 2, Role.DECODE: 4}
    dear = Want(4, 1, 4, many.choices)
    assert allocate(
        {Role.PREFILL: Want(4, 1, 1, (Choice(1, 3.0, 0.0), Choice(4, 0.0, 0.0))), Role.DECODE: dear}, 8
    ) == {
        Role.PREFILL: 4,
        Role.DECODE: 1,
    }
    silent = Want(8, 1, 1)
    assert sorted(allocate({"a": silent, "b": silent}, 8).values()) == [4, 4]


def test_of_equal_misses_those_that_are_worth_more_are_averted_first_and_on_the_cheaper_gpus() -> None:
    choices = (Choice(1, 3.0, 0.0), Choice(4, 0.0, 0.0))
    first, second = (Want(4, 1, 1, choices, miss_cost_s=worth) for worth in (5.0, 20.0))
    assert allocate({"first": first, "second": second}, 5) == {"first": 1, "second": 4}
    first, second = (Want(4, 1, 1, choices, miss_cost_s=10.0, replica_cost=cost) for cost in (0.4, 1.0))
    assert allocate({"first": first, "second": second}, 5) == {"first": 4, "second": 1}


def test_pools_that_predict_nothing_come_after_those_that_save_and_in_turn() -> None:
    cheap, dear = (Want(4, 1, 1, replica_cost=cost) for cost in (0.4, 1.0))
    assert allocate({"cheap": cheap, "dear": dear}, 5) == {"cheap": 3, "dear": 2}
    saves = Want(4, 1, 1, (Choice(1, 3.0, 0.0), Choice(3, 0.0, 0.0)), miss_cost_s=1.0, replica_cost=1.0)
    assert allocate({"saves": saves, "dear": dear}, 6) == {"saves": 3, "dear": 3}


def test_of_many_moments_alike_some_count_for_the_others() -> None:
    known = history([20_000.0 + 100 * (second % 7) for second in range(1700)])
    every, some = (known.alike(known.now, 3, 1e-4, most) for most in (1800, 600))
    assert len(every) > 1600
    assert 500 < len(some) <= 600
    assert sum(weight for _, weight in some) == pytest.approx(sum(weight for _, weight in every), rel=0.02)


def test_a_history_that_is_long_is_cut_and_still_adds_up() -> None:
    known = history([1000.0] * 2500)
    assert known.bins == 1800
    assert known.tokens[-1] - known.tokens[0] == pytest.approx(1800 * 1000.0)
    assert math.isclose(known.now.short**2, 1000.0, rel_tol=0.01)


def test_a_smooth_load_is_served_best_by_a_constant_size() -> None:
    record = Steady()
    for second in range(900):
        free = 3 if second % 20 < 10 else 7
        record = record.add(Tick(1.0, 1.2, 5.0, 1.2, free, 2.0), TERMS, 1, 16)
    assert record.bounds.most == record.bounds.least
    assert 2 <= record.bounds.least <= 4
    kept = record.bounds.least
    assert record.bounds.hold(kept + 1, 0) == kept
    assert record.bounds.hold(kept + 1, kept + 1) == kept + 1, "work that is there comes first"
    surging = record.add(Tick(1.0, 4.0, 16.0, 2.4, 9, 2.0), TERMS, 1, 16)
    assert surging.bounds.hold(9, 0) == 9, "more than noise is believed"


def test_where_load_comes_in_bursts_the_forecast_is_followed() -> None:
    record = Steady()
    for second in range(900):
        burst = second % 100 < 10
        tick = Tick(1.0, 6.0 * burst, 25.0 * burst, 6.0 * burst, 8 if burst or second % 100 > 97 else 1, 2.0)
        record = record.add(tick, TERMS, 1, 16)
    assert record.bounds.most is None
    assert record.bounds.least <= 2


def test_too_little_on_record_bounds_nothing() -> None:
    record = Steady()
    for _ in range(25):
        record = record.add(Tick(1.0, 1.2, 5.0, 1.2, 1, 2.0), TERMS, 0, 16)
    assert record.bounds.hold(0, 0) == 0


def test_what_is_there_at_the_start_is_set_aside_once_and_what_comes_later_is_still_freed() -> None:
    class Ring:
        def __init__(self) -> None:
            self.itself = self

    gc.unfreeze()
    try:
        set_aside_what_stays()
        count = gc.get_freeze_count()
        assert count > 0
        later = weakref.ref(Ring())
        set_aside_what_stays()
        assert gc.get_freeze_count() == count
        gc.collect()
        assert later() is None
    finally:
        gc.unfreeze()
