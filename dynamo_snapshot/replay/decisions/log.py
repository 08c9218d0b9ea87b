"""Reads the decision log that the planner plugin writes (``planner/records.py``), of this version or an older one."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from dynamo_snapshot.errors import SnapshotError
from dynamo_snapshot.model import Reason

UNREADABLE = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)
"""What decoding a line raises that is not what was expected; the last for one that is nested too deeply."""

MOST_SECONDS = 253402300800.0
"""Since 1970, at the end of the year 9999."""


class Candidate(msgspec.Struct, frozen=True):
    replicas: int
    misses_per_s: float
    cost: float


class Prediction(msgspec.Struct, frozen=True):
    """What the policy expected one start-up time ahead; see ``planner.forecast.Forecast``."""

    lead_s: float
    demand_replicas: float
    waiting_s: float
    rise: int
    keep: int
    alike: int = 0
    slots: float | None = None
    """Requests that an engine runs at once, where that binds, and how long each stays."""
    residence_s: float | None = None
    candidates: tuple[Candidate, ...] = ()


class Pool(msgspec.Struct, frozen=True):
    """What the fleet's status said."""

    target: int
    achievable: int
    unachievable_reason: str | None = None
    starting: tuple[tuple[str, float], ...] = ()
    """Way, and seconds since the order."""
    parked: int = 0
    start_times: dict[str, tuple[float, ...]] = {}
    """By way, newest last."""


class Hint(msgspec.Struct, frozen=True):
    """What the fleet was asked to have ready beside what serves."""

    parked: int | None = None
    prefetch: bool = False


class Seen(msgspec.Struct, frozen=True):
    pool: Pool | None = None


class Decision(msgspec.Struct, frozen=True):
    """One tick of one role."""

    at: float
    role: str
    action: str
    reason: str
    replicas: int | None = None
    floor: int | None = None
    desired: int | None = None
    ready: int | None = None
    running: float | None = None
    queued: float | None = None
    fresh_workers: int = 0
    unknown: tuple[str, ...] = ()
    forecast: Prediction | None = None
    hint: Hint | None = None
    observation: Seen = Seen()
    request_id: str = ""
    decision_id: str = ""


class Beginning(msgspec.Struct, frozen=True):
    """The line before the decisions of a run; see ``planner.records.beginning``."""

    run: str
    begins: dict[str, Any]


class Log(NamedTuple):
    """Decisions, oldest first, and how many lines were none."""

    decisions: tuple[Decision, ...]
    unreadable: int


def read_log(path: Path) -> Log:
    """Reads ``path``, and before it what was moved to ``<path>.1``.

    Raises:
        SnapshotError: ``configuration_invalid`` for a file that cannot be read or holds no decision.
    """
    decisions: list[Decision] = []
    unreadable = 0
    decoder, beginnings = msgspec.json.Decoder(Decision), msgspec.json.Decoder(Beginning)
    for line in lines(path):
        try:
            decisions.append(decoder.decode(line.text))
        except UNREADABLE:
            try:
                beginnings.decode(line.text)
            except UNREADABLE:
                unreadable += 1
    if not decisions:
        raise no_decision(path)
    return Log(tuple(sorted(decisions, key=lambda decision: decision.at)), unreadable)


class Line(NamedTuple):
    """A line as it stands in its file."""

    place: str
    """The file's name and the line's number: ``decisions.jsonl:12``."""
    text: bytes
    torn: bool
    """The log's last, without the end of a line: it may be written at this moment."""


def lines(path: Path) -> Iterator[Line]:
    """The lines of the log at ``path`` that are not empty, after those of ``<path>.1``; raises as :func:`read_log`."""
    older = path.with_name(path.name + ".1")
    try:
        for file in (older, path):
            if file == path or file.exists():
                with file.open("rb") as log:
                    for number, text in enumerate(log, start=1):
                        if text.strip():
                            yield Line(f"{file.name}:{number}", text, file == path and not text.endswith(b"\n"))
    except OSError as error:
        raise _invalid(f"{path} cannot be read: {error.strerror}") from error


def no_decision(path: Path) -> SnapshotError:
    return _invalid(f"{path} holds no decision")


def of_role(decisions: Iterable[Decision], role: str | None) -> tuple[Decision, ...]:
    """The decisions of ``role`` (a fleet has one pool of each), or of the only role there is.

    Raises:
        SnapshotError: ``configuration_invalid`` where the log has several and none is named, or not that one.
    """
    kept = tuple(decisions)
    roles = sorted({decision.role for decision in kept})
    if role is None and len(roles) == 1:
        return kept
    if role not in roles:
        said = "several pools" if role is None else f"no decision for {role}"
        raise SnapshotError(
            Reason.CONFIGURATION_INVALID, f"the log holds {said}", f"Name one with --pool: {', '.join(roles)}."
        )
    return tuple(decision for decision in kept if decision.role == role)


def moment(text: str | None, decisions: Sequence[Decision]) -> float:
    """Wall-clock seconds that ``text`` means; the last decision's if it is None.

    Args:
        text: ``2026-11-30 15:20:18`` or ``15:20:18`` (of the log's last day), in this machine's time zone unless
            it names another; seconds since 1970; or ``-90``, seconds before the last decision.

    Raises:
        SnapshotError: ``configuration_invalid`` for what is none of these.
    """
    last = decisions[-1].at
    if text is None:
        return last
    try:
        seconds = float(text)
    except ValueError:
        return _clock(text, last)
    if not abs(seconds) < MOST_SECONDS:
        # Nobody's clock: milliseconds, as a rule.
        raise _no_moment(text)
    return last + seconds if seconds < 0 else seconds


def _clock(text: str, last: float) -> float:
    try:
        if "-" in text:
            return datetime.fromisoformat(text).astimezone().timestamp()
        day = datetime.fromtimestamp(last).astimezone()
        at = datetime.combine(day.date(), datetime.strptime(text, "%H:%M:%S").time()).astimezone()
        # A log that ended just after midnight is asked about the evening before.
        return (at if at <= day else at - timedelta(days=1)).timestamp()
    except (ValueError, OverflowError, OSError) as error:  # the last two: years that no calendar has
        raise _no_moment(text) from error


def _no_moment(text: str) -> SnapshotError:
    return SnapshotError(
        Reason.CONFIGURATION_INVALID,
        f"--at {text} is no moment",
        "Write 2026-11-30T15:20:18, 15:20:18, seconds since 1970, or -90 for 90 s before the last decision.",
    )


def _invalid(message: str) -> SnapshotError:
    return SnapshotError(
        Reason.CONFIGURATION_INVALID,
        message,
        "The planner plugin writes its decisions to its decision_log_path; with `up` that lies in the runtime folder.",
    )
