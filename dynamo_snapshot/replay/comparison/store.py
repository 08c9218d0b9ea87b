"""``policy.json``: the rows of the whole matrix, kept from one run of the command to the next."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from dynamo_snapshot.durable import replace_synced
from dynamo_snapshot.errors import SnapshotError
from dynamo_snapshot.model import Reason
from dynamo_snapshot.replay.comparison.rows import Row

DIGITS = 6


@dataclass(frozen=True)
class Table:
    """What the file held: its rows, and the setting of each trace, JSON-ready."""

    rows: tuple[Row, ...] = ()
    settings: Mapping[str, Any] = field(default_factory=dict)


def read_table(file: Path) -> Table:
    """Reads ``file``; an empty table where there is no such file.

    Raises:
        SnapshotError: ``configuration_invalid`` for a file that holds something else.
    """
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
        return Table(msgspec.convert(content["rows"], tuple[Row, ...]), dict(content["settings"]))
    except FileNotFoundError:
        return Table()
    except (OSError, ValueError, KeyError, TypeError, msgspec.ValidationError) as error:
        raise SnapshotError(
            Reason.CONFIGURATION_INVALID,
            f"{file} is no table of a comparison: {error}",
            "Name another file, or remove it.",
        ) from error


def write(file: Path, about: Mapping[str, Any], rows: Iterable[Row]) -> None:
    """Replaces ``file`` at once, old or new but never half: ``about`` first, then one row a line."""
    lines = ",\n".join(json.dumps(rounded(msgspec.to_builtins(row))) for row in rows)
    head = json.dumps(rounded(dict(about)), indent=1).rstrip()[:-1].rstrip()
    comma = "," if about else ""
    replace_synced(file, f'{head}{comma}\n "rows": [\n{lines}\n ]\n}}\n'.encode())
    file.chmod(0o644)


def rounded(value: Any) -> Any:
    if isinstance(value, float):
        return round(value, DIGITS)
    if isinstance(value, dict):
        return {key: rounded(member) for key, member in value.items()}
    if isinstance(value, list | tuple):
        return [rounded(member) for member in value]
    return value
