"""Decides a log anew: the policy that stands in it, given what it saw, has to say what it said.

That the log is whole is part of it. Each run begins with the policy and what it remembers, and counts its ticks, so a
line that was changed, taken out or put in shows, as does code that decides otherwise.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from dynamo_snapshot.replay.decisions.log import lines, no_decision
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
"""Of one record's differences."""
PRECISION = 1e-6
"""Share by which a predicted number may differ: another machine's mathematics may round otherwise."""


class Difference(NamedTuple):
    """Where a log is not what its policy decides."""

    at: float
    """Wall-clock seconds."""
    what: str
    """In words, without a full stop."""


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

    @property
    def holds(self) -> bool:
        return self.first is None and self.same > 0


def verify(path: Path) -> Verification:
    """Decides the log at ``path`` anew, with what was moved to ``<path>.1`` before it.

    Raises:
        SnapshotError: ``configuration_invalid`` for a file that cannot be read or holds no decision.
    """
    found = decide_anew(_entry(line) for line in lines(path))
    if found == Verification():
        raise no_decision(path)
    return found


def decide_anew(entries: Iterable[Mapping[str, Any]]) -> Verification:
    """Decides ``entries``, the lines of a log in their order, anew; empty ones could not be read.

    Runs may be interleaved, as those of two planners that write into one file are.
    """
    found = Verification()
    runs: dict[str, _Run] = {}
    for (run, tick), group in groupby(entries, lambda entry: (str(entry.get("run", "")), entry.get("tick"))):
        records = []
        for entry in group:
            if "begins" in entry:
                if run not in runs or not runs[run].goes_on(entry):
                    runs[run] = _Run(found, entry)
            elif "role" in entry:
                records.append(entry)
        if not records:
            continue
        if run in runs:
            runs[run].decide(tick, records)
        else:
            found.without_beginning += len(records)
    return found


class _Run:
    """One run of the plugin: its policy, and what that remembers."""

    def __init__(self, found: Verification, beginning: Mapping[str, Any]) -> None:
        self._found = found
        self._tick = 0
        self._policy: JointPolicy | None = None
        self._memories: Memories = {}
        self._told = beginning["begins"]
        try:
            self._policy, self._memories, self._tick = read_beginning(beginning)
            written_by = beginning["begins"]["code"]
            if written_by != code():
                found.other_code.add(str(written_by))
        except Exception as error:  # whatever stands in a line that was changed
            self._policy = None
            self._differs(beginning, f"the policy at the beginning of run {beginning.get('run')} is none: {error}")

    def goes_on(self, beginning: Mapping[str, Any]) -> bool:
        """Whether this run only goes on in another file there: what it remembers is known better than it is told.

        A beginning after another tick than this one's shows that lines are missing, and counts as a difference; so does
        another policy, which no run takes.
        """
        told = beginning["begins"]
        tick = told.get("tick", 0) if isinstance(told, Mapping) else None
        if self._policy is not None and tick != self._tick:
            self._differs(
                beginning, f"run {beginning.get('run')} begins anew after tick {tick}, but it is at {self._tick}"
            )
        elif self._policy is not None and told.get("policy") != self._told.get("policy"):
            self._differs(beginning, f"run {beginning.get('run')} goes on with another policy after tick {tick}")
        return self._policy is not None and tick == self._tick

    def decide(self, tick: object, records: list[Mapping[str, Any]]) -> None:
        """Decides one tick's records anew."""
        if self._policy is None:
            self._found.after_gap += len(records)
            return
        try:
            self._require_whole(tick, [record["role"] for record in records], self._policy)
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
            self._differs(records[0], f"tick {tick} cannot be decided anew: {error}")
            return
        self._tick += 1
        for record in records:
            role = Role(record["role"])
            anew = records_anew[role]
            wrong = [text for name in DECIDED for text in _differences(name, record.get(name), anew[name])]
            if wrong:
                self._found.different += 1
                self._differs(record, f"tick {tick}, {role}: {'; '.join(wrong[:SHOWN])}")
            else:
                self._found.same += 1

    def _require_whole(self, tick: object, roles: list[str], policy: JointPolicy) -> None:
        if tick != self._tick + 1:
            raise ValueError(f"it follows tick {self._tick}, so lines are missing, or are too many")
        if sorted(roles) != sorted(role.value for role in policy.policies):
            raise ValueError(f"it has decisions for {', '.join(sorted(roles))}")

    def _differs(self, entry: Mapping[str, Any], what: str) -> None:
        if self._found.first is None:
            at = entry.get("at")
            self._found.first = Difference(float(at) if isinstance(at, int | float) else 0.0, what)


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


def _entry(line: bytes) -> Mapping[str, Any]:
    try:
        entry = msgspec.json.decode(line)
    except msgspec.DecodeError:
        entry = None
    return entry if isinstance(entry, dict) else {}


def outcome(found: Verification) -> Iterator[tuple[str, bool]]:
    """What :func:`verify` found, a sentence each, and whether it is as it should be."""
    if found.same or found.different:
        both = found.same + found.different
        yield f"{found.same} of {both} decisions came out the same when they were decided anew.", not found.different
    if found.first is not None:
        yield f"The first difference is at {clock(found.first.at)}: {found.first.what}.", False
    if found.after_gap:
        yield f"{found.after_gap} decisions come after that and could not be decided anew.", False
    if found.other_code:
        digests = ", ".join(sorted(found.other_code))
        yield f"The log was written by other code ({digests}; this is {code()}), which may decide otherwise.", True
    if found.without_beginning:
        text = f"{found.without_beginning} decisions tell nothing: the beginning of their run is not in the log"
        yield f"{text}; it was moved away, or an older version wrote it.", True
