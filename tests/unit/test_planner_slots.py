"""Engines whose slots or KV cache bind before prefill does: what is learnt of them, and what the policy makes of it."""

from __future__ import annotations

import math
import random
from collections.abc import Iterable
from dataclasses import replace
from functools import cache

import pytest
from policy_signals import sample

from dynamo_snapshot.replay.policies.snapshot import Snapshot
from dynamo_snapshot.replay.policies.static import Static, StaticKnobs
from dynamo_snapshot.replay.simulation.outcome import Outcome
from dynamo_snapshot.replay.simulation.run import simulate
from dynamo_snapshot.replay.simulation.setting import Setting
from dynamo_snapshot.replay.simulation.signals import Policy, Signals
from dynamo_snapshot.replay.simulation.startup import startup_model
from dynamo_snapshot.replay.simulation.timing import EngineTiming, PassTimes
from dynamo_snapshot.replay.trace import TraceRequest, bundled_trace, faster, scaled
from planner.demand import Flow
from planner.forecast import Knowledge, observe
from planner.history import History
from planner.load import Seen, Step, follow
from planner.observation import EngineSample
from planner.outlook import Backlogs, Capacity, Turnover, futures, supposed
from planner.service import Service
from planner.slots import Limit, Slots, learn

EIGHT_SLOTS = Setting(
    name="eight-slots",
    engine=EngineTiming(decode_speed=0.3, max_requests=8, kv_tokens=256 * 64),
    max_replicas=6,
    ttft_objective_s=1.0,
    itl_objective_s=0.1,
)
"""What `bench planner` runs live: the mocker with eight requests at once, 20 to 60 ms a token."""
STARTUP = "restore(0.6,cold=9)"


@cache
def excerpt() -> tuple[TraceRequest, ...]:
    """The load that `bench planner` sends."""
    return tuple(scaled(faster(bundled_trace(), 2.0), 0.25, 1.0))


def outcome(policy: Policy) -> Outcome:
    return simulate(excerpt(), policy, EIGHT_SLOTS, startup_model(STARTUP), seed=1)


def stream(rate: float, seconds: float, prompt: float, answer: float, seed: int = 1) -> list[TraceRequest]:
    dice = random.Random(seed)
    requests, at = [], 0.0
    while (at := at + dice.expovariate(rate)) < seconds:
        tokens = [1 + round(dice.expovariate(1 / mean)) for mean in (prompt, answer)]
        requests.append(TraceRequest(at, *tokens))
    return requests


class Probe:
    """Learns beside a pool of constant size."""

    name = "probe"
    interval_s = 1.0

    def __init__(self, replicas: int) -> None:
        self.replicas = replicas
        self.knowledge = Knowledge()
        self.seen = Seen()
        self.limits: list[Limit | None] = []
        self.came = self.counted = 0.0

    def decide(self, signals: Signals) -> int:
        shown = signals.observation
        load, self.seen, steps = follow(shown, self.seen, signals.now, 5.0)
        elapsed_s = self.interval_s if signals.now > 0 else None
        self.knowledge = observe(self.knowledge, shown.pool, steps, load, elapsed_s, 5.0)
        self.limits.append(self.knowledge.limit)
        if self.knowledge.limit is not None:
            self.came += signals.arrivals
            self.counted += self.knowledge.demand.requests
        return self.replicas


def probe(requests: Iterable[TraceRequest], engine: EngineTiming, replicas: int) -> Probe:
    seen = Probe(replicas)
    setting = Setting(engine=engine, initial_replicas=replicas, max_replicas=16)
    simulate(list(requests), seen, setting, startup_model(STARTUP))
    return seen


def test_where_slots_bind_sizes_are_what_requests_need() -> None:
    """As live: sized by prefill alone, half of the requests waited for a slot while prefill was idle."""
    ours = outcome(Snapshot(EIGHT_SLOTS))
    assert ours.ttft_attainment > 0.88
    assert ours.gpu_hours < outcome(Static(StaticKnobs(5))).gpu_hours


def test_where_slots_bind_a_constant_size_does_not_beat_the_policy() -> None:
    static = [outcome(Static(StaticKnobs(replicas))) for replicas in range(1, 7)]
    beaten = []
    for miss_cost_s in (1.0, 3.0, 10.0, 30.0):
        ours = outcome(Snapshot(EIGHT_SLOTS, miss_cost_s=miss_cost_s))
        if any(rival.ttft_attainment >= ours.ttft_attainment and rival.gpu_hours <= ours.gpu_hours for rival in static):
            beaten.append(miss_cost_s)
    assert len(beaten) <= 1, beaten


@pytest.mark.parametrize("replicas", [2, 3, 4])
def test_slots_and_how_long_requests_keep_them_are_learnt(replicas: int) -> None:
    seen = probe(excerpt(), EIGHT_SLOTS.engine, replicas)
    limit = seen.knowledge.limit
    assert limit is not None
    assert limit.slots == pytest.approx(8, abs=0.3)
    # One replica, always full, finishes 4.5 a second.
    assert 1 / limit.request_s == pytest.approx(4.5, rel=0.35)
    assert seen.counted == pytest.approx(seen.came, rel=0.25)


def test_a_full_kv_cache_is_learnt_as_what_fits_into_it() -> None:
    seen = probe(stream(5.0, 200.0, 2000, 200), EngineTiming(speed=0.5, kv_tokens=32 * 1024), 4)
    limit = seen.knowledge.limit
    assert limit is not None
    service = seen.knowledge.service
    assert limit.slots * service.contexts / service.requests == pytest.approx(32 * 1024, rel=0.35)


@pytest.mark.parametrize(("rate", "replicas"), [(6.0, 1), (6.0, 2), (6.0, 4), (14.0, 3)])
def test_where_prefill_binds_nothing_else_is_believed(rate: float, replicas: int) -> None:
    seen = probe(stream(rate, 240.0, 2000, 40), EngineTiming(speed=0.3), replicas)
    assert seen.limits == [None] * len(seen.limits)


NOTHING = Slots()


def engine(**changes: float) -> EngineSample:
    values: dict[str, float] = {
        "sequence": 100,
        "running": 8.0,
        "queued": 3.0,
        "pass_s": 0.05,
        "decode_requests": 8.0,
        "decode_kv_tokens": 4000.0,
        "queued_tokens": 1500.0,
    }
    return sample("a", **{**values, **changes})


def stalls(number: int, slots: Slots = NOTHING, running: float = 8.0, elapsed_s: float = 1.0) -> Slots:
    """After ``number`` ticks at which requests waited while ``running`` decoded and nothing was prefilled."""
    before = engine(running=running, decode_requests=running, decode_kv_tokens=500 * running)
    after = replace(before, sequence=120)
    for _ in range(number):
        slots = learn(slots, [(before, after, 0.0)], elapsed_s, KNOWN)
    return slots


KNOWN = Service(
    prefills=50,
    prefill_tokens=50_000,
    prefill_s=2.5,
    decodes=50,
    contexts=200_000,
    squares=50 * 4000.0**2,
    seconds=2.5,
    products=10_000,
    requests=400,
)
"""A token's prefill takes 50 us, a decode step 50 ms, over 8 requests of 500 tokens."""


def test_one_stall_is_a_suspicion_and_more_are_believed() -> None:
    assert not stalls(0).suspected
    assert stalls(1).suspected
    assert stalls(1).limit(KNOWN, 20.0) is None
    believed = stalls(4)
    assert not believed.suspected
    limit = believed.limit(KNOWN, 20.0)
    assert limit is not None
    assert limit.slots == 8


def test_requests_that_came_during_a_pass_are_no_stall() -> None:
    slots = Slots()
    waited, gone = engine(), engine(sequence=120, queued=0.0, queued_tokens=0.0)
    for tick in range(60):
        newly = engine(sequence=120, queued=2.0) if tick % 10 == 0 else gone
        slots = learn(slots, [(waited, newly, 0.0)], 1.0, KNOWN)
        assert slots.limit(KNOWN, 20.0) is None
    prefilling = engine(sequence=120, prefill_tokens=8000.0)
    assert not learn(Slots(), [(waited, prefilling, 0.0)] * 20, 1.0, KNOWN).stalls


def test_a_limit_grows_at_once_and_shrinks_as_it_is_confirmed() -> None:
    slots = stalls(20)
    more = engine(sequence=120, running=12.0, decode_requests=12.0, queued=0.0, queued_tokens=0.0)
    slots = learn(slots, [(engine(), more, 0.0)], 1.0, KNOWN)
    limit = slots.limit(KNOWN, 20.0)
    assert limit is not None
    assert limit.slots == 12
    limit = stalls(400, slots, running=10.0).limit(KNOWN, 20.0)
    assert limit is not None
    assert limit.slots == pytest.approx(10, abs=0.2)


def test_a_limit_fades_when_nothing_confirms_it() -> None:
    slots = stalls(40)
    done = engine(sequence=120, running=1.0, decode_requests=1.0, queued=0.0)
    idle: Step = (engine(queued=0.0), done, 0.0)
    believed = []
    for _ in range(4000):
        slots = learn(slots, [idle], 1.0, KNOWN)
        believed.append(slots.believed)
    assert believed[600]
    assert not believed[-1]


def test_what_was_unreadable_at_the_tick_before_poisons_nothing() -> None:
    broken = engine(running=math.nan, queued=math.nan)
    slots = learn(stalls(10), [(broken, engine(sequence=120), 0.0)], 1.0, KNOWN)
    came, slots = slots.arrivals([(broken, engine(sequence=120), 0.0)], 1.0, KNOWN, 20.0)
    assert math.isfinite(came)
    assert math.isfinite(slots.debt)


def test_engines_that_tell_nothing_of_decoding_have_no_limit() -> None:
    """How long a request stays is not known then: nothing is divided by it."""
    prefills = Service(prefills=50, prefill_tokens=50_000, prefill_s=2.5)
    before = engine(queued_tokens=0.0, decode_requests=0.0, decode_kv_tokens=0.0)
    slots = NOTHING
    for _ in range(10):
        slots = learn(slots, [(before, replace(before, sequence=120), 0.0)], 1.0, prefills)
    assert slots.believed
    assert slots.limit(prefills, 20.0) is None


def test_arrivals_are_what_is_there_more_and_what_has_left() -> None:
    slots = stalls(20)
    limit = slots.limit(KNOWN, 20.0)
    assert limit is not None
    came, _ = slots.arrivals([(engine(), engine(sequence=120), 0.0)], 1.0, KNOWN, 20.0)
    assert came == pytest.approx(8 / limit.residence_s, rel=0.01)
    more, _ = slots.arrivals([(engine(), engine(sequence=120, queued=10.0), 0.0)], 1.0, KNOWN, 20.0)
    assert more - came == pytest.approx(7)
    _, owing = slots.arrivals([(engine(queued=30.0), engine(sequence=120, queued=0.0), 0.0)], 1.0, KNOWN, 20.0)
    assert owing.debt < 0


def capacity(ready: int, taken: float = 0.0, residence_s: float = 2.0) -> Capacity:
    return Capacity(
        ready=ready,
        backlogs=Backlogs.of([0.0] * ready),
        arrivals=(),
        lead_s=1.0,
        share=1.0,
        slack_s=1.0,
        turnover=Turnover(residence_s / 8, residence_s, Backlogs.of([taken] * ready)),
    )


def test_free_slots_take_a_burst_and_taken_ones_do_not() -> None:
    burst = [(0.1, 10.0, 1.0)]  # two seconds of it: 20 requests, 5 replica-seconds of slots
    (empty,) = supposed(burst, capacity(2), 2.0, 0.0)
    (full,) = supposed(burst, capacity(2, taken=4.0), 2.0, 0.0)
    assert empty.needs < 1.01
    assert full.needs > 2


def test_a_burst_on_record_needs_more_where_slots_bind() -> None:
    known = History()
    for second in range(300):
        requests = 30.0 if second % 20 < 5 else 1.0
        known = known.add(1.0, requests * 500, requests)
    alike = known.alike(known.now, 4, 1e-4)
    by_slots = futures(known, alike, capacity(2), 4.0, 1.0, 5e-5)
    by_prefill = futures(known, alike, replace(capacity(2), turnover=None), 4.0, 1.0, 5e-5)
    assert max(future.needs for future in by_slots) > 2 * max(future.needs for future in by_prefill)
    assert all(one.needs >= other.needs for one, other in zip(by_slots, by_prefill, strict=True))


def test_a_decode_step_may_be_slower_than_the_mockers_alone() -> None:
    plain, slower = PassTimes(EngineTiming()), PassTimes(EngineTiming(decode_speed=0.5))
    assert slower.prefill(1000) == plain.prefill(1000)
    assert slower.decode(5000) == pytest.approx(2 * plain.decode(5000))


def test_knowledge_tells_what_a_token_takes_by_what_binds() -> None:
    known = Knowledge(service=KNOWN, flow=Flow(prompts=10, prompt_tokens=5000))
    assert known.token_s == KNOWN.second_per_token + KNOWN.step_s / 500
    assert replace(known, limit=Limit(8, 2.0)).token_s == pytest.approx(0.25 / 500)


@pytest.mark.parametrize("wrong", [0.0, -1.0, math.nan, math.inf])
def test_a_decode_speed_that_cannot_be_is_refused(wrong: float) -> None:
    with pytest.raises(ValueError, match="decode_speed must be a positive number"):
        EngineTiming(decode_speed=wrong)
