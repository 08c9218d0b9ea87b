"""What a planner has learnt, so that another may go on with it after a restart: pure, values and their JSON.

That is what each role's policy knows (pass times, what requests are like, half an hour of demand, start-up times,
slots) and its record of which sizes pay. What is about the present is left out: the target, the window, limits, the
work that waits, what engines last told. It starts anew, as the first tick is a start like any other: with what is
there, and nothing falls for a while.

What happened between is unknown. The record of demand goes on as after any gap between two ticks, and after a long one
as after silence, for what came last before it says nothing of what comes now. The record of sizes fades as if nothing
had come, and is judged again only when there is as much new on record as a first judgement takes: until then the floor
that paid stays, which lowers nothing.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import astuple, dataclass, fields, is_dataclass, replace
from itertools import chain, pairwise
from typing import Any

import msgspec

from planner.demand import Demand
from planner.forecast import Knowledge
from planner.history import BIN_S, KEPT_BINS, LONG, History
from planner.joint import JointPolicy, Memories, RoleMemory
from planner.observation import Role
from planner.policy import Memory
from planner.steady import FADES_S, Bounds, Steady

OLDEST_S = 24 * 3600.0
"""What is older is not used: load has its days, and in longer times models, engines and hosts are exchanged."""
PRESENT_S = LONG * BIN_S
"""A moment is told by what came in so long before it."""
MOST = 1e100
"""No number here is larger: larger ones could not be squared and summed."""
LEAST_MEAN, MOST_MEAN = 1e-9, 1e9
"""Of anything that is seen, in seconds, tokens or requests."""
MOST_REPLICAS = 1 << 32
"""So that each number of them can be logged."""
MOST_OCTAVES = 64
"""Of tokens in one prompt; a size that is looked at costs time at each tick."""
MOST_SILENCE = 64.0
"""Binary logarithm of seconds."""

Knobs = Mapping[str, float | int | None]


@dataclass(frozen=True)
class Learnt:
    """What one role's policy has learnt."""

    knobs: Knobs
    """With which: what sizes cost under others tells nothing."""
    knowledge: Knowledge
    steady: Steady


@dataclass(frozen=True)
class Record:
    """What a planner has learnt, of all its roles."""

    of: str
    """Of which engines: what was learnt of others is not used."""
    at: float
    """Wall-clock seconds."""
    roles: Mapping[Role, Learnt]


def learnt(policy: JointPolicy, memories: Memories, of: str, at: float) -> Record:
    """Returns what ``memories`` hold that outlives their process."""
    return Record(of, at, {role: _lasting(policy, role, memory.policy) for role, memory in memories.items()})


def begun(policy: JointPolicy, record: Record, at: float) -> Memories:
    """Returns the memories of a start that goes on with ``record`` at wall-clock second ``at``."""
    gap_s = _gap_s(record, at)
    memories = dict(policy.fresh())
    for role in memories.keys() & record.roles.keys():
        known = record.roles[role]
        steady = _faded(known.steady, gap_s) if known.knobs == _knobs(policy, role) else Steady()
        history = _later(known.knowledge.history, gap_s)
        memories[role] = RoleMemory(policy=Memory(knowledge=replace(known.knowledge, history=history), steady=steady))
    return memories


def unusable(record: Record, of: str, at: float) -> str | None:
    """Why ``record`` is of no use at wall-clock second ``at``; None: it is."""
    if record.of != of:
        return f"it is of {record.of or 'other engines'}, not of {of or 'these'}"
    if _gap_s(record, at) > OLDEST_S:
        return f"it is {_gap_s(record, at) / 3600:.0f} hours away; {OLDEST_S / 3600:.0f} count"
    return None


def encode(record: Record) -> bytes:
    """Returns ``record`` as one line of JSON.

    Raises:
        ValueError: naming a number that is none, which nobody could go on with.
    """
    _require_plausible(record)
    return msgspec.json.encode(record, enc_hook=dict)  # of the read-only mappings, which msgspec does not know


def decode(data: bytes) -> Record:
    """Returns the record that ``data`` encodes, whole and plausible.

    Raises:
        ValueError: it is not what this code would have written.
    """
    try:
        record = msgspec.json.decode(data, type=Record)
        content = msgspec.json.decode(data)
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error
    _require_plausible(record)
    if _whole(record) != content:
        # What another version has more is dropped, what it has not is as by default: half of a state.
        raise ValueError("another version wrote it")
    return record


def _whole(value: Any) -> Any:
    """As JSON would have it, with every field; msgspec leaves out what it did not find."""
    if is_dataclass(value):
        return {each.name: _whole(getattr(value, each.name)) for each in fields(value)}
    if isinstance(value, Mapping):
        return {str(key): _whole(inner) for key, inner in value.items()}
    return [_whole(inner) for inner in value] if isinstance(value, tuple) else value


def _lasting(policy: JointPolicy, role: Role, memory: Memory) -> Learnt:
    return Learnt(_knobs(policy, role), _timeless(memory.knowledge), memory.steady)


def _timeless(knowledge: Knowledge) -> Knowledge:
    """Without what is about the present."""
    return replace(
        knowledge,
        flow=replace(knowledge.flow, debt=0.0),
        start=replace(knowledge.start, wakes=False),
        slots=replace(knowledge.slots, debt=0.0, crowds=0.0),
        demand=Demand(),
        backlogs=(),
        held=(),
        limit=None,  # follows from the slots at the next tick
        turn=0,
    )


def _knobs(policy: JointPolicy, role: Role) -> Knobs:
    knobs: Knobs = policy.plain()["roles"][role.value]
    return knobs


def _gap_s(record: Record, at: float) -> float:
    """A record from the future is as far away: the clock was set meanwhile."""
    return abs(at - record.at)


def _later(history: History, gap_s: float) -> History:
    """After a long gap what came last is no more the present: a start would order for a load that has long gone."""
    return history if gap_s < PRESENT_S else history.add(PRESENT_S, 0.0, 0.0)


def _faded(steady: Steady, gap_s: float) -> Steady:
    """Without ``seconds``, so nothing is judged before enough new is on record, nor ``most``, so nothing falls."""
    keep = math.exp(-gap_s / FADES_S)
    seconds, mean, square = steady.busy
    return Steady(
        sizes=steady.sizes,
        constant=tuple((queued * keep, cost * keep) for queued, cost in steady.constant),
        floors=tuple((queued * keep, cost * keep) for queued, cost in steady.floors),
        busy=(seconds * keep, mean * keep, square * keep),
        bounds=Bounds(steady.bounds.least if gap_s < FADES_S else 0),
    )


def _require_plausible(record: Record) -> None:
    if not math.isfinite(record.at):
        raise ValueError("when that was is not known")
    for role, known in record.roles.items():
        for what, right in _checks(known):
            if not right:
                raise ValueError(f"{role.value}: {what} cannot be")


def _checks(known: Learnt) -> Iterator[tuple[str, bool]]:
    knowledge, steady = known.knowledge, known.steady
    service, flow, sizes, slots = knowledge.service, knowledge.flow, knowledge.sizes, knowledge.slots
    yield "pass times", _counts(astuple(service)) and _mean(service.prefill_s, service.prefill_tokens)
    yield "contexts", _mean(service.contexts, service.decodes) or not (service.contexts or service.squares)
    yield "requests", _counts(astuple(flow)) and flow.answers > 0 < flow.pressed_answers
    yield "prompts", _mean(flow.prompt_tokens, flow.prompts) or not flow.prompt_tokens
    yield "prompt sizes", _counts(chain([sizes.seen, sizes.chunk], *sizes.classes.values()))
    yield "prompt sizes", all(one.weight > 0 and _mean(one.tokens, one.weight) for one in sizes.classes.values())
    yield "prompt sizes", bool(sizes.classes) or not sizes.seen
    yield "prompt sizes", all(0 <= octave <= MOST_OCTAVES for octave in sizes.classes)
    yield "slots", _counts(astuple(slots)) and _mean(slots.running, slots.stalls)
    yield "slots", _mean(slots.tokens, slots.stalls) or not slots.tokens
    yield "prompts that waited", _mean(slots.prompt_tokens, slots.prompts)
    yield "start-up times", _counts(chain.from_iterable(knowledge.start.times.values()))
    yield "the time between ticks", _counts([knowledge.tick_s]) and knowledge.tick_s > 0
    yield "the record of demand", _plausible(knowledge.history)
    yield "what is about the present", knowledge == _timeless(knowledge)
    yield "the record of sizes", len(steady.sizes) == len(steady.constant) == len(steady.floors)
    yield "the record of sizes", _counts([*steady.sizes, *steady.busy, steady.seconds, steady.bounds.least])
    yield "the record of sizes", _counts(chain(*steady.constant, *steady.floors, *steady.ordered))
    yield "the record of sizes", all(size <= MOST_REPLICAS for size in (*steady.sizes, steady.bounds.least))
    yield "the record of sizes", all(smaller < larger for smaller, larger in pairwise(steady.sizes))


def _plausible(history: History) -> bool:
    sums, moments = (history.tokens, history.requests), history.moments
    return (
        len(moments) <= KEPT_BINS
        and all(len(each) == len(moments) + 1 and _counts(each) for each in sums)
        and all(all(map(operator.le, each, each[1:])) for each in sums)
        and _counts(chain.from_iterable(moments))
        and all(moment.silence <= MOST_SILENCE for moment in moments)
        and _counts([history.open_tokens, history.open_requests, history.silent_s, history.open_s])
        and history.open_s < BIN_S
        and history.silent_s <= 2.0**MOST_SILENCE
    )


def _counts(numbers: Iterable[float]) -> bool:
    """Whether all are numbers of something; NaN is none."""
    return all(0 <= number <= MOST for number in numbers)


def _mean(total: float, count: float) -> bool:
    """Whether they are the sums of something that was seen, or of nothing."""
    return LEAST_MEAN * count <= total <= MOST_MEAN * count and (count > 0) == (total > 0)
