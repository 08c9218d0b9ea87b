"""The published formats of request traces, line by line: each gives (seconds, tokens in, tokens out).

Seconds count from wherever the format counts from; :mod:`trace` makes offsets of them.
"""

from __future__ import annotations

import csv
import json
import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from datetime import datetime
from typing import NamedTuple, Protocol


class Stamped(NamedTuple):
    """One request as its trace has it."""

    line: int
    seconds: float
    input_tokens: int
    output_tokens: int


class WrongLine(ValueError):
    """A line that is not what the format says, by its number from 1."""

    def __init__(self, line: int, message: str) -> None:
        super().__init__(message)
        self.line = line


class Format(Protocol):
    """One format."""

    def read(self, lines: Sequence[str]) -> Iterator[Stamped]:
        """Raises :class:`WrongLine`."""

    def seconds(self, stamp: str) -> float:
        """Of a time stamp as the format writes them; raises ``ValueError``."""


class Table:
    """A CSV with a header; more columns than the needed ones are ignored."""

    def __init__(self, stamp: str, tokens_in: str, tokens_out: str) -> None:
        self.columns = (stamp, tokens_in, tokens_out)

    def read(self, lines: Sequence[str]) -> Iterator[Stamped]:
        rows = csv.reader(lines)
        header = [name.strip() for name in next(rows, [])]
        if not set(self.columns) <= set(header):
            raise WrongLine(1, f"expected the columns {','.join(self.columns)}")
        places = [header.index(name) for name in self.columns]
        for row in rows:
            if not row:
                continue
            try:
                stamp, tokens_in, tokens_out = (row[place] for place in places)
                request = Stamped(rows.line_num, self.seconds(stamp), tokens(tokens_in), tokens(tokens_out))
            except (ValueError, IndexError) as error:
                raise WrongLine(rows.line_num, f"expected {','.join(self.columns)}: {error}") from error
            if self.replayed(request):
                yield request

    def replayed(self, request: Stamped) -> bool:
        return True

    def seconds(self, stamp: str) -> float:
        return finite(float(stamp))


class Azure(Table):
    """Azure LLM inference traces: ``TIMESTAMP,ContextTokens,GeneratedTokens``, local time with seven decimals."""

    def __init__(self) -> None:
        super().__init__("TIMESTAMP", "ContextTokens", "GeneratedTokens")

    def seconds(self, stamp: str) -> float:
        # fromisoformat knows six decimals at most. Without a zone: only differences are used.
        whole, _, fraction = stamp.strip().partition(".")
        zone = next((fraction[place:] for place, sign in enumerate(fraction) if sign in "+-Z"), "")
        moment = datetime.fromisoformat(whole + zone).replace(tzinfo=None)
        digits = fraction.removesuffix(zone)
        return (moment - datetime(2000, 1, 1)).total_seconds() + (float(f"0.{digits}") if digits else 0.0)


class BurstGpt(Table):
    """BurstGPT: ``Timestamp,…,Request tokens,Response tokens,…``, in seconds; a failed request has no response."""

    def __init__(self) -> None:
        super().__init__("Timestamp", "Request tokens", "Response tokens")

    def replayed(self, request: Stamped) -> bool:
        """A failed request was never computed, as far as the trace can tell."""
        return request.output_tokens > 0


class JsonLines(ABC):
    """One JSON object a line."""

    expected = ""

    def read(self, lines: Sequence[str]) -> Iterator[Stamped]:
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            try:
                entry = json.loads(line)
                found = self.request(entry)
            except (ValueError, TypeError, KeyError, AttributeError) as error:
                raise WrongLine(number, f"expected {self.expected}: {error}") from error
            if found is not None:
                seconds, tokens_in, tokens_out = found
                yield Stamped(number, seconds, tokens_in, tokens_out)

    @abstractmethod
    def request(self, entry: dict[str, object]) -> tuple[float, int, int] | None:
        """Returns seconds, tokens in and tokens out of one line; None: it is no request."""

    def seconds(self, stamp: str) -> float:
        return milliseconds(float(stamp))


class Mooncake(JsonLines):
    """Mooncake, and Dynamo's rows of that shape: time stamps in milliseconds."""

    expected = "an object with timestamp (ms), input_length and output_length"

    def request(self, entry: dict[str, object]) -> tuple[float, int, int] | None:
        if "timestamp" not in entry and "delay" in entry:
            raise ValueError("a turn that waits for the one before it has no time of its own")
        return milliseconds(entry["timestamp"]), tokens(entry["input_length"]), tokens(entry["output_length"])


class DynamoRequestTrace(JsonLines):
    """What Dynamo records with ``DYN_REQUEST_TRACE``: ``dynamo.request.trace.v1``; only ends of requests count."""

    schema = "dynamo.request.trace.v1"
    expected = (
        f"a {schema} record; a request_end has request.request_received_ms or event_time_unix_ms, "
        "request.replay.input_length and request.output_tokens"
    )

    def request(self, entry: dict[str, object]) -> tuple[float, int, int] | None:
        event = _object(entry.get("event", entry), "event")
        if event.get("schema") != self.schema:
            raise ValueError(f"schema is {event.get('schema')}")
        if event.get("event_type") != "request_end":
            return None
        request = _object(event.get("request"), "request")
        replay = _object(request.get("replay"), "request.replay")
        stamp = request.get("request_received_ms")
        stamp = event["event_time_unix_ms"] if stamp is None else stamp
        return milliseconds(stamp), tokens(replay["input_length"]), tokens(request["output_tokens"])


def format_of(lines: Sequence[str], json_lines: bool) -> Format:
    """Which format the first line that is not empty is of; Azure's or Mooncake's where it is of none."""
    first = next((line.strip() for line in lines if line.strip()), "")
    if json_lines or first.startswith("{"):
        return DynamoRequestTrace() if f'"{DynamoRequestTrace.schema}"' in first else Mooncake()
    burst = BurstGpt()
    return burst if set(burst.columns) <= set(next(csv.reader([first]), [])) else Azure()


def tokens(value: object) -> int:
    """A count of tokens; raises ``ValueError``."""
    count = int(str(value))
    if count < 0:
        raise ValueError(f"{count} is not a number of tokens")
    return count


def milliseconds(value: object) -> float:
    """Seconds of a count of milliseconds."""
    return finite(float(str(value))) / 1000


def finite(seconds: float) -> float:
    if not math.isfinite(seconds):
        raise ValueError(f"{seconds} is not a time")
    return seconds


def _object(value: object, name: str) -> dict[str, object]:
    if not isinstance(value, dict):
        raise TypeError(f"{name} is no object")
    return value
