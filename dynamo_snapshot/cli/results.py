"""Files that a long command writes at its end, known to be writable before it begins; and reads again."""

from __future__ import annotations

import errno
import json
import math
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import typer

from dynamo_snapshot.errors import SnapshotError
from dynamo_snapshot.model import Reason


def require_writable(*files: Path | None, sources: Iterable[Path] = ()) -> None:
    """Raises ``configuration_invalid`` for the first of ``files`` that cannot be written; None is no file.

    So it does for one that is another of them, or one of ``sources``: what stands in it would be lost. A file that
    is there keeps its content.
    """
    taken = [_true(source) for source in sources]
    for file in files:
        if file is None:
            continue
        if _true(file) in taken and not _is_device(file):
            raise SnapshotError(
                Reason.CONFIGURATION_INVALID,
                f"{file} is named twice: what is written there would replace the other",
                "Name a file of its own for each.",
            )
        taken.append(_true(file))
        new = not file.exists()
        try:
            os.close(os.open(file, os.O_WRONLY | os.O_CREAT, 0o666))
        except OSError as error:
            raise SnapshotError(
                Reason.CONFIGURATION_INVALID,
                f"{file} cannot be written: {error.strerror}",
                "Name a file in a folder that is there.",
            ) from error
        if new:
            file.unlink()


def write(file: Path, text: str) -> None:
    """Writes a result; raises ``disk_full`` or ``disk_failed`` where that does not succeed after all."""
    try:
        file.write_text(text, encoding="utf-8", errors="backslashreplace")
    except OSError as error:
        full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        raise SnapshotError(
            Reason.DISK_FULL if full else Reason.DISK_FAILED,
            f"{file} could not be written: {error.strerror}",
            "Make room there, or name another file." if full else "Name another file.",
        ) from error


def finite(value: float) -> float:
    """For an option's callback: neither infinity nor NaN is a number that anything can be measured with."""
    if not math.isfinite(value):
        raise typer.BadParameter(f"{value:g} is not a finite number")
    return value


def _true(file: Path) -> tuple[int, int] | str:
    """What two names of one file have in common."""
    try:
        found = file.stat()
    except OSError:
        return os.path.realpath(file)
    return found.st_dev, found.st_ino


def _is_device(file: Path) -> bool:
    return file.exists() and not file.is_file()


def result_in(file: Path, *fields: str) -> dict[str, Any]:
    """Returns a result that a command wrote as JSON; raises ``configuration_invalid`` unless it has ``fields``."""
    try:
        result = json.loads(file.read_text(encoding="utf-8"))
        if not isinstance(result, dict):
            raise ValueError("it holds no object")
        missing = [field for field in fields if field not in result]
    except (OSError, ValueError, RecursionError) as error:
        raise SnapshotError(Reason.CONFIGURATION_INVALID, f"{file} cannot be read: {error}", _WRITTEN) from error
    if missing:
        raise SnapshotError(Reason.CONFIGURATION_INVALID, f"{file} has no {', '.join(missing)}", _WRITTEN)
    found: dict[str, Any] = result
    return found


_WRITTEN = "Name a file that this command's --json wrote."
