"""Decides a log anew: the policy that stands in it, given what it saw, has to say what it said.

That the log is whole is part of it. Each run begins with the policy and what it remembers, and counts its ticks, so a
line that was changed, taken out or put in shows, as does code that decides otherwise. Lines that are none of a log
count as put in. The last one may be half written, by a planner that is at work: it is left out, and told.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from dynamo_snapshot.replay.decisions.log import UNREADABLE, Line, lines, no_decision
from dynamo_snapshot.replay.decisions.sentences import clock
from planner.joint import JointPolicy, Memories
from planner.observation import Role
from planner.records import read_beginning, read_observation
from planner.records import record as planner_record
from planner.source import code

DECIDED = (
    "action",
    "replicas",
    "floor",
    "desired",
    "reason",
    "running",
    "queued",
    "fresh_workers",
    "unknown",
    "forecast",
)
"""Fields of a record that have to come out the same."""
SHOWN = 3
"""Of one record's differences, and of the lines that are none of a log."""
_BEGUN = b'{"at":'
"""So each line begins that the planner writes."""
PRECISION = 1e-6
"""Share by which a predicted number may differ: another machine's mathematics may round otherwise."""


class Entry(NamedTuple):
    """A line of a log, read."""

    values: Mapping[str, Any]
    place: str = ""
    """File and line number; empty: not told."""
    torn: bool = False
    """What there is of the last line: nothing of it can be read."""


class Difference(NamedTuple):
    """Where a log is not what its policy decides."""

    at: float
    """Wall-clock seconds."""
    what: str
    """In words, without a full stop."""
    place: str = ""
    """As an :class:`Entry` has it."""


@dataclass
class Verification:
    """What deciding a log anew came to."""

    same: int = 0
    """Decisions that came out the same."""
    different: int = 0
    first: Difference | None = None
    """The first that did not, or the first place where the log is not whole."""
    without_beginning: int = 0
    """Decisions before any beginning of their run, as older versions left them where the log's first file was moved
    away: they tell nothing."""
    after_gap: int = 0
    """Decisions after lines that are missing: what the policy remembered by then is not known."""
    other_code: set[str] = field(default_factory=set)
    """Digests of the code of runs that were not decided by this one."""
    foreign: int = 0
    """Lines that are no entry of a decision log."""
    foreign_at: list[str] = field(default_factory=list)
    """Where the first of them are."""
    torn_at: str | None = None
    """Where the last line is only half there."""

    @property
    def holds(self) -> bool:
        return self.first is None and self.same > 0 and not self.foreign


def verify(path: Path) -> Verification:
    """Decides the log at ``path`` anew, with what was moved to ``<path>.1`` before it.

    Raises:
        SnapshotError: ``configuration_invalid`` for a file that cannot be read or holds no decision.
    """
    found = Verification()
    _decide(_entries(lines(path), found), found)
    if found == Verification(foreign=found.foreign, foreign_at=found.foreign_at, torn_at=found.torn_at):
        raise no_decision(path)
    return found


def decide_anew(entries: Iterable[Mapping[str, Any]]) -> Verification:
    """Decides ``entries``, the lines of a log in their order, anew.

    Runs may be interleaved, as those of two planners that write into one file are.
    """
    found = Verification()
    _decide((Entry(values) for values in entries), found)
    return found


def _entries(lines: Iterable[Line], found: Verification) -> Iterator[Entry]:
    """What can be decided anew, and the torn last line; ``found`` is told of the others."""
    for line in lines:
        values = _values(line.text)
        if values is not None:
            yield Entry(values, line.place)
        elif line.torn and line.text.startswith(_BEGUN[: len(line.text)]):
            found.torn_at = line.place
            yield Entry({}, line.place, torn=True)
        else:
            found.foreign += 1
            if found.foreign <= SHOWN:
                found.foreign_at.append(line.place)


def _values(line: bytes) -> Mapping[str, Any] | None:
    """None: it is no entry of a decision log."""
    try:
        values = msgspec.json.decode(line)
    except UNREADABLE:
        return None
    return values if isinstance(values, dict) and ("begins" in values or "role" in values) else None


def _decide(entries: Iterable[Entry], found: Verification) -> None:
    runs: dict[str, _Run] = {}
    for (run, tick), group in groupby(entries, _Ticks()):
        records: list[Entry] = []
        torn = False
        for entry in group:
            torn = torn or entry.torn
            if "begins" in entry.values:
                if run not in runs or not runs[run].goes_on(entry):
                    runs[run] = _Run(found, entry)
            elif not entry.torn:
                records.append(entry)
        if not records:
            continue
        if run in runs:
            runs[run].decide(tick, records, torn=torn)
        else:
            found.without_beginning += len(records)


class _Ticks:
    """The run and the tick of each entry; a torn line is of the same as the one before, so far as can be told."""

    def __init__(self) -> None:
        self._last: tuple[str, Any] = "", None

    def __call__(self, entry: Entry) -> tuple[str, Any]:
        if not entry.torn:
            self._last = str(entry.values.get("run", "")), entry.values.get("tick")
        return self._last


class _Run:
    """One run of the plugin: its policy, and what that remembers."""

    def __init__(self, found: Verification, beginning: Entry) -> None:
        self._found = found
        self._tick = 0
        self._policy: JointPolicy | None = None
        self._memories: Memories = {}
        values = beginning.values
        self._told = values["begins"]
        try:
            self._policy, self._memories, self._tick = read_beginning(values)
            written_by = values["begins"]["code"]
            if written_by != code():
                found.other_code.add(str(written_by))
        except Exception as error:  # whatever stands in a line that was changed
            self._policy = None
            self._differs(beginning, f"the policy at the beginning of run {values.get('run')} is none: {error}")

    def goes_on(self, beginning: Entry) -> bool:
        """Whether this run only goes on in another file there: what it remembers is known better than it is told.

        A beginning after another tick than this one's shows that lines are missing, and counts as a difference; so does
        another policy, which no run takes.
        """
        told, run = beginning.values["begins"], beginning.values.get("run")
        tick = told.get("tick", 0) if isinstance(told, Mapping) else None
        if self._policy is not None and tick != self._tick:
            self._differs(beginning, f"run {run} begins anew after tick {tick}, but it is at {self._tick}")
        elif self._policy is not None and told.get("policy") != self._told.get("policy"):
            self._differs(beginning, f"run {run} goes on with another policy after tick {tick}")
        return self._policy is not None and tick == self._tick

    def decide(self, tick: object, entries: list[Entry], *, torn: bool) -> None:
        """Decides one tick's records anew.

        Args:
            torn: the line after them is half written; where a role's record is not among them, it may be that one.
        """
        records = [entry.values for entry in entries]
        if self._policy is None:
            self._found.after_gap += len(records)
            return
        try:
            roles = [record["role"] for record in records]
            if torn and len(roles) < len(self._policy.policies):
                return
            self._require_whole(tick, roles, self._policy)
            seen = {Role(record["role"]): read_observation(record) for record in records}
            (now,) = {float(record["now"]) for record in records}
            proposals, self._memories = self._policy.decide(seen, self._memories, now)
            records_anew = {
                role: msgspec.to_builtins(planner_record(now, seen[role], proposal))
                for role, proposal in proposals.items()
            }
        except Exception as error:  # as above
            self._policy = None
            self._found.after_gap += len(records)
            self._differs(entries[0], f"tick {tick} cannot be decided anew: {error}")
            return
        self._tick += 1
        for entry in entries:
            role = Role(entry.values["role"])
            anew = records_anew[role]
            wrong = [text for name in DECIDED for text in _differences(name, entry.values.get(name), anew[name])]
            if wrong:
                self._found.different += 1
                self._differs(entry, f"tick {tick}, {role}: {'; '.join(wrong[:SHOWN])}")
            else:
                self._found.same += 1

    def _require_whole(self, tick: object, roles: list[str], policy: JointPolicy) -> None:
        if tick != self._tick + 1:
            raise ValueError(f"it follows tick {self._tick}, so lines are missing, or are too many")
        if sorted(roles) != sorted(role.value for role in policy.policies):
            raise ValueError(f"it has decisions for {', '.join(sorted(roles))}")

    def _differs(self, entry: Entry, what: str) -> None:
        if self._found.first is None:
            self._found.first = Difference(_seconds(entry.values.get("at")), what, entry.place)


def _seconds(value: Any) -> float:
    try:
        return float(value) if isinstance(value, int | float) else 0.0
    except OverflowError:
        return math.inf


def _differences(name: str, logged: Any, anew: Any) -> Iterator[str]:
    """In words, by field."""
    if isinstance(logged, dict) and isinstance(anew, dict) and logged.keys() == anew.keys():
        for field_name, value in anew.items():
            yield from _differences(f"{name}.{field_name}", logged[field_name], value)
    elif isinstance(logged, list) and isinstance(anew, list) and len(logged) == len(anew):
        for index, value in enumerate(anew):
            yield from _differences(f"{name}[{index}]", logged[index], value)
    elif not (logged == anew or (_number(logged) and _number(anew) and math.isclose(logged, anew, rel_tol=PRECISION))):
        yield f"{name} is {logged!r} in the log, {anew!r} decided anew"


def _number(value: Any) -> bool:
    return isinstance(value, float) and math.isfinite(value)


def outcome(found: Verification) -> Iterator[tuple[str, bool]]:
    """What :func:`verify` found, a sentence each, and whether it is as it should be."""
    both = found.same + found.different
    if both:
        yield f"{found.same} of {both} decisions came out the same when they were decided anew.", not found.different
    if found.first is not None:
        place = f", {found.first.place}" if found.first.place else ""
        yield f"The first difference is at {clock(found.first.at)}{place}: {found.first.what}.", False
    if found.after_gap:
        comes = "comes" if found.after_gap == 1 else "come"
        yield f"{_decisions(found.after_gap)} {comes} after that and could not be decided anew.", False
    if found.foreign:
        yield f"{_foreign(found)}: changed, torn, or put in by somebody else.", False
    if found.torn_at is not None:
        text = f"The last line ({found.torn_at}) is not whole, as while the planner writes it"
        yield f"{text}; its tick was left out.", True
    if found.other_code:
        digests = ", ".join(sorted(found.other_code))
        yield f"The log was written by other code ({digests}; this is {code()}), which may decide otherwise.", True
    if found.without_beginning:
        tells = "tells" if found.without_beginning == 1 else "tell"
        text = f"{_decisions(found.without_beginning)} {tells} nothing: the beginning of their run is not in the log"
        yield f"{text}; it was moved away, or an older version wrote it.", True


def _foreign(found: Verification) -> str:
    more = found.foreign - len(found.foreign_at)
    places = ", ".join([*found.foreign_at, *([f"{more} more"] if more else [])])
    are = "1 line is no entry" if found.foreign == 1 else f"{found.foreign} lines are no entries"
    return f"{are} of a decision log ({places})"


def _decisions(count: int) -> str:
    return "1 decision" if count == 1 else f"{count} decisions"
