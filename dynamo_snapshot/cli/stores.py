"""Which store a command was told to use, in what it tells a person to type next."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from dynamo_snapshot.errors import SnapshotError

_COMMAND = re.compile(r"`(dynamo-snapshot snapshots [^`]*)`")


def in_store(text: str, store: Path | None, fleet: Path | None) -> str:
    """``text`` with this command's --store, or else its --fleet, in each `snapshots` command that it names."""
    if store is None and fleet is None:
        return text
    told = f"--store {shlex.quote(str(store))}" if store is not None else f"--fleet {shlex.quote(str(fleet))}"
    return _COMMAND.sub(lambda found: f"`{found[1]} {told}`", text)


@contextmanager
def told_with(store: Path | None, fleet: Path | None) -> Iterator[None]:
    """Within: the remedy of a ``SnapshotError`` names the store."""
    try:
        yield
    except SnapshotError as error:
        raise SnapshotError(error.reason, error.message, in_store(error.remedy, store, fleet)) from error
