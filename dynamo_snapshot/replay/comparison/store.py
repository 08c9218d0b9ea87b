"""``policy.json``: the rows of the whole matrix, kept from one run of the command to the next."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from dynamo_snapshot.durable import replace_synced
from dynamo_snapshot.errors import SnapshotError
from dynamo_snapshot.model import Reason
from dynamo_snapshot.replay.comparison.rows import Row
from dynamo_snapshot.snapshots.locks import try_exclusive

DIGITS = 6


@dataclass(frozen=True)
class Table:
    """What the file held: its rows, and the setting of each trace, JSON-ready."""

    rows: tuple[Row, ...] = ()
    settings: Mapping[str, Any] = field(default_factory=dict)


@contextmanager
def held(file: Path) -> Iterator[None]:
    """Keeps ``file`` to this process: of two that add rows to one table, the later one would drop the other's.

    The lock is a file beside it, which stays; what it locks ends with the process, however that ends.

    Raises:
        SnapshotError: ``file_in_use`` naming the process that has it; ``configuration_invalid`` where nothing
            can be written beside it.
    """
    # Beside the table, which is replaced as a whole.
    lock_file = file.with_name(f".{file.name}.lock")
    try:
        lock = try_exclusive(lock_file)
        if lock is None:
            holder = lock_file.read_text().strip() or "unknown"
            raise SnapshotError(
                Reason.FILE_IN_USE,
                f"{file} is being filled by process {holder}",
                "Wait until that one is done, end it, or name another table with --json.",
            )
    except OSError as error:
        raise SnapshotError(
            Reason.CONFIGURATION_INVALID,
            f"{file} cannot be written: {lock_file}: {error.strerror}",
            "Name a file in a folder that may be written.",
        ) from error
    try:
        lock_file.write_text(f"{os.getpid()}\n")
        yield
    finally:
        lock.release()


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


def as_kept(row: Row) -> Row:
    """As :func:`read_table` will give it back: what is judged now is what will be judged then."""
    return msgspec.convert(rounded(msgspec.to_builtins(row)), Row)


def rounded(value: Any) -> Any:
    if isinstance(value, float):
        return round(value, DIGITS)
    if isinstance(value, dict):
        return {key: rounded(member) for key, member in value.items()}
    if isinstance(value, list | tuple):
        return [rounded(member) for member in value]
    return value
