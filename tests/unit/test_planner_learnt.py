"""What is learnt, as a value: whole and exact as JSON, faded by the time between, and never about the present."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from policy_signals import sample
from restarting_planner import KNOBS, POLICY, SLOTS_BIND, Planner, bursts, play, stream, unchanged

from planner.demand import Demand
from planner.joint import JointPolicy, Memories
from planner.learnt import OLDEST_S, PRESENT_S, Record, begun, decode, encode, learnt, unusable
from planner.observation import Observation, PoolView, Role
from planner.policy import Action
from planner.steady import FADES_S, Bounds, Steady

SECONDS = 300


@pytest.fixture(scope="module")
def prefill_bound() -> Planner:
    planner = Planner()
    play(bursts(SECONDS), planner)
    return planner


@pytest.fixture(scope="module")
def slots_bound() -> Planner:
    planner = Planner()
    play(bursts(SECONDS, prompt=300), planner, engine=SLOTS_BIND)
    return planner


@pytest.fixture(scope="module")
def data(slots_bound: Planner) -> bytes:
    """Of a planner that has learnt of everything there is."""
    return encode(learnt(POLICY, slots_bound.memories, "engines", 1000.0))


def kept(memories: Memories, gap_s: float = 10.0) -> Memories:
    """What a planner begins with that is started ``gap_s`` later, over the file's content."""
    return begun(POLICY, decode(encode(learnt(POLICY, memories, "engines", 1000.0))), 1000.0 + gap_s)


def decided(memories: Memories, seen: list[tuple[float, Observation]], policy: JointPolicy = POLICY) -> list[Any]:
    said = []
    for now, observation in seen:
        proposals, memories = policy.decide({Role.DECODE: observation}, memories, now)
        said.append(proposals[Role.DECODE])
    return said


@pytest.mark.parametrize("which", ["prefill_bound", "slots_bound"])
@settings(max_examples=25, deadline=None)
@given(drawn=st.data())
def test_over_json_the_same_is_decided(which: str, request: pytest.FixtureRequest, drawn: st.DataObject) -> None:
    planner: Planner = request.getfixturevalue(which)
    at = drawn.draw(st.integers(0, len(planner.seen) - 1))
    gap_s = drawn.draw(st.sampled_from([0.0, 10.0, 3600.0, OLDEST_S]))
    record = learnt(POLICY, planner.before[at], "engines", 1000.0)
    read = decode(encode(record))
    assert read == record
    as_it_was, over_json = (begun(POLICY, one, 1000.0 + gap_s) for one in (record, read))
    following = planner.seen[at : at + 60]
    assert decided(over_json, following) == decided(as_it_was, following)


def test_both_have_learnt_what_there_is_to_learn(prefill_bound: Planner, slots_bound: Planner) -> None:
    for planner in (prefill_bound, slots_bound):
        (memory,) = kept(planner.memories).values()
        knowledge = memory.policy.knowledge
        assert knowledge.service.known
        assert knowledge.history.bins >= 60
        assert knowledge.start.times
        assert memory.policy.steady.sizes
    (memory,) = kept(slots_bound.memories).values()
    assert memory.policy.knowledge.slots.believed
    assert memory.policy.knowledge.sizes.classes


def test_nothing_about_the_present_is_kept(slots_bound: Planner) -> None:
    for before in slots_bound.before[100:]:
        (memory,) = kept(before).values()
        assert memory == replace(POLICY.fresh()[Role.DECODE], policy=memory.policy)
        fresh, knowledge = POLICY.fresh()[Role.DECODE].policy, memory.policy.knowledge
        assert replace(memory.policy, knowledge=fresh.knowledge, steady=fresh.steady) == fresh
        assert knowledge.demand == Demand()
        assert (knowledge.backlogs, knowledge.held, knowledge.limit) == ((), (), None)
        assert (knowledge.flow.debt, knowledge.slots.debt, knowledge.slots.crowds) == (0.0, 0.0, 0.0)
        assert not knowledge.start.wakes


def test_the_first_tick_is_a_start_and_nothing_falls_for_a_while_whatever_has_paid() -> None:
    planner = Planner()
    play(stream(4.0, SECONDS, random.Random(1)), planner)
    (memory,) = planner.memories.values()
    assert memory.policy.steady.bounds.most is not None, "the load has to be smooth for a size to be kept throughout"
    quiet = [sample(str(number)) for number in range(9)]
    seen = [
        (float(now), Observation(9, tuple(replace(one, sequence=now) for one in quiet), PoolView(9, 9)))
        for now in range(30)
    ]
    said = decided(kept(planner.memories), seen)
    assert said[0].action is Action.START
    falls = next(at for at, each in enumerate(said) if each.replicas < 9)
    assert falls >= POLICY.policies[Role.DECODE].scale_down_after_s


@pytest.mark.parametrize("gap_s", [PRESENT_S, 3600.0, OLDEST_S])
def test_nothing_is_ordered_for_a_load_that_has_gone_meanwhile(gap_s: float) -> None:
    planner = Planner()
    play(stream(12.0, SECONDS, random.Random(1)), planner)
    busy = planner.before[SECONDS - 30]
    seen = [(float(now), Observation(1, (sample("0", sequence=now),), PoolView(1, 1))) for now in range(60)]
    said = decided(kept(busy, gap_s), seen)
    least = 1 if gap_s > FADES_S else 2  # the floor that paid
    assert max(each.replicas for each in said) == least
    assert said[0].forecast is not None
    soon = kept(busy, PRESENT_S - 1)[Role.DECODE].policy.knowledge.history
    assert soon == busy[Role.DECODE].policy.knowledge.history, "so soon after the load may be as it was"


def test_what_sizes_cost_fades_by_the_time_between(prefill_bound: Planner) -> None:
    (memory,) = prefill_bound.memories.values()
    steady = replace(memory.policy.steady, bounds=Bounds(3, 3, True), ordered=((1.0, 2),))
    memories = {Role.DECODE: replace(memory, policy=replace(memory.policy, steady=steady))}
    for gap_s in (0.0, 60.0, FADES_S, OLDEST_S):
        (begins,) = kept(memories, gap_s).values()
        faded, share = begins.policy.steady, math.exp(-gap_s / FADES_S)
        assert faded.sizes == steady.sizes
        for before, after in ((steady.constant, faded.constant), (steady.floors, faded.floors)):
            assert [pytest.approx((share * queued, share * cost)) for queued, cost in before] == list(after)
        assert faded.busy == pytest.approx([share * each for each in steady.busy])
        assert faded.bounds == Bounds(3 if gap_s < FADES_S else 0)
        assert (faded.seconds, faded.ordered) == (0.0, ())


def test_what_sizes_cost_under_other_knobs_is_not_used(prefill_bound: Planner) -> None:
    record = learnt(POLICY, prefill_bound.memories, "engines", 1000.0)
    other = JointPolicy.of({"decode": {**KNOBS, "miss_cost_s": 3.0}, "prefill": KNOBS})
    memories = begun(other, decode(encode(record)), 1000.0)
    assert memories[Role.DECODE].policy.knowledge == record.roles[Role.DECODE].knowledge
    assert memories[Role.DECODE].policy.steady == Steady()
    assert memories[Role.PREFILL] == other.fresh()[Role.PREFILL]


@pytest.mark.parametrize(
    ("of", "at", "why"),
    [
        ("engines", 1000.0 + OLDEST_S, None),
        ("engines", 1001.0 + OLDEST_S, "it is 24 hours away; 24 count"),
        ("engines", 999.0 - OLDEST_S, "it is 24 hours away; 24 count"),
        ("others", 1000.0, "it is of engines, not of others"),
        ("", 1000.0, "it is of engines, not of these"),
    ],
)
def test_what_is_old_or_of_other_engines_is_of_no_use(data: bytes, of: str, at: float, why: str | None) -> None:
    assert unusable(decode(data), of, at) == why


def edited(data: bytes, *path: Any, value: Any) -> bytes:
    content = inner = json.loads(data)
    for key in path[:-1]:
        inner = inner[key]
    inner[path[-1]] = value
    return json.dumps(content).encode()


KNOWLEDGE = ("roles", "decode", "knowledge")


@pytest.mark.parametrize(
    ("path", "value", "why"),
    [
        ((*KNOWLEDGE, "service", "prefill_s"), -1.0, "pass times cannot be"),
        ((*KNOWLEDGE, "service", "prefill_tokens"), 0.0, "pass times cannot be"),
        ((*KNOWLEDGE, "service", "prefill_s"), 1e200, "pass times cannot be"),
        ((*KNOWLEDGE, "service", "prefill_s"), None, "Expected `float`, got `null`"),
        ((*KNOWLEDGE, "flow", "answers"), 0.0, "requests cannot be"),
        ((*KNOWLEDGE, "tick_s"), 0.0, "the time between ticks cannot be"),
        ((*KNOWLEDGE, "history", "tokens", 5), 1e12, "the record of demand cannot be"),
        ((*KNOWLEDGE, "history", "requests"), [0.0], "the record of demand cannot be"),
        ((*KNOWLEDGE, "history", "moments", 5), [0.0, 0.0, 0.0, 999.0], "the record of demand cannot be"),
        ((*KNOWLEDGE, "start", "times"), {"restore": [-1.0]}, "start-up times cannot be"),
        ((*KNOWLEDGE, "sizes", "classes"), {"3": [0.0, 0.0]}, "prompt sizes cannot be"),
        ((*KNOWLEDGE, "backlogs"), [1.0], "what is about the present cannot be"),
        ((*KNOWLEDGE, "demand", "decoding"), 1e9, "what is about the present cannot be"),
        ((*KNOWLEDGE, "flow", "debt"), 1e9, "what is about the present cannot be"),
        ((*KNOWLEDGE, "start", "wakes"), True, "what is about the present cannot be"),
        ((*KNOWLEDGE, "sizes", "classes"), {"65": [1.0, 1.0]}, "prompt sizes cannot be"),
        (("roles", "decode", "steady", "constant"), [], "the record of sizes cannot be"),
        (("roles", "decode", "steady", "sizes", 0), 999, "the record of sizes cannot be"),
        (("roles", "decode", "steady", "bounds", "least"), 10**30, "the record of sizes cannot be"),
        (("roles", "encode"), {}, "Invalid enum value 'encode'"),
        ((*KNOWLEDGE, "service", "more"), 0.0, "another version wrote it"),
    ],
)
def test_what_this_code_would_not_have_written_is_refused(
    data: bytes, path: tuple[Any, ...], value: Any, why: str
) -> None:
    with pytest.raises(ValueError, match=why):
        decode(edited(data, *path, value=value))


def test_what_another_version_did_not_have_is_missed(data: bytes) -> None:
    content = json.loads(data)
    del content["roles"]["decode"]["knowledge"]["slots"]["chances"]
    with pytest.raises(ValueError, match="another version wrote it"):
        decode(json.dumps(content).encode())


@pytest.mark.parametrize("number", [math.nan, math.inf, -1.0])
def test_what_nobody_could_go_on_with_is_not_written(slots_bound: Planner, number: float) -> None:
    record = learnt(POLICY, slots_bound.memories, "engines", 1000.0)
    known = record.roles[Role.DECODE]
    service = replace(known.knowledge.service, seconds=number)
    poisoned = replace(known, knowledge=replace(known.knowledge, service=service))
    with pytest.raises(ValueError, match="decode: pass times cannot be"):
        encode(Record(record.of, record.at, {Role.DECODE: poisoned}))
    with pytest.raises(ValueError, match="when that was is not known"):
        encode(replace(record, at=math.nan))


def _numbers(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The way to each number in ``value``, and of long lists to some."""
    entries = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in entries:
        if isinstance(inner, float) and not (isinstance(key, int) and key > 8):
            yield (*path, key)
        yield from _numbers(inner, (*path, key))


@settings(max_examples=150, deadline=None)
@given(drawn=st.data())
def test_whatever_number_stands_there_it_is_refused_or_decided_with(
    slots_bound: Planner, data: bytes, drawn: st.DataObject
) -> None:
    path = drawn.draw(st.sampled_from(list(_numbers(json.loads(data)["roles"]["decode"]["knowledge"]))))
    value = drawn.draw(st.one_of(st.sampled_from([0.0, 1e-300, 1e90, 1.0]), st.floats(0, 1e6)))
    try:
        record = decode(edited(data, *KNOWLEDGE, *path, value=value))
    except ValueError:
        return
    decided(begun(POLICY, record, 1000.0), slots_bound.seen[20:40])


@settings(max_examples=100, deadline=None)
@given(drawn=st.data())
def test_bytes_that_were_changed_are_refused_or_decided_with(
    slots_bound: Planner, data: bytes, drawn: st.DataObject
) -> None:
    at = drawn.draw(st.integers(0, len(data) - 1))
    changed = data[:at] + drawn.draw(st.binary(min_size=0, max_size=3)) + data[at + 1 :]
    try:
        record = decode(changed)
    except ValueError:
        return
    decided(begun(POLICY, record, 1000.0), slots_bound.seen[20:25])


def test_a_planner_that_begins_with_what_was_learnt_keeps_more_for_less() -> None:
    """As measured on Azure's code trace: bursts that are known are met in time, and silence is not paid for."""
    seconds, restarts_at_s, attainment, gpu_hours = 1500.0, 1000.0, [0.0, 0.0, 0.0], [0.0, 0.0, 0.0]
    for seed in (1, 2):
        for place, restart in enumerate((unchanged, kept, lambda memories: POLICY.fresh())):
            planner = Planner(restarts_at_s, restart)
            outcome = play(bursts(seconds, seed), planner, seed=seed, measured_from_s=restarts_at_s)
            attainment[place] += outcome.ttft_attainment / 2
            gpu_hours[place] += outcome.gpu_hours / 2
    without_restart, with_file, without_file = zip(attainment, gpu_hours, strict=True)
    assert with_file == pytest.approx(without_restart, rel=0.01)
    assert with_file[0] > without_file[0] + 0.01
    assert with_file[1] < 0.9 * without_file[1]
