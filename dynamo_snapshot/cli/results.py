"""Files that a long command writes at its end, known to be writable before it begins; and reads again."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from dynamo_snapshot.errors import SnapshotError
from dynamo_snapshot.model import Reason


def require_writable(*files: Path | None) -> None:
    """Raises ``configuration_invalid`` for the first of ``files`` that cannot be written; None is no file.

    A file that is there keeps its content.
    """
    for file in files:
        if file is None:
            continue
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


def result_in(file: Path, *fields: str) -> dict[str, Any]:
    """Returns a result that a command wrote as JSON; raises ``configuration_invalid`` unless it has ``fields``."""
    try:
        result = json.loads(file.read_text(encoding="utf-8"))
        missing = [field for field in fields if field not in result]
    except (OSError, ValueError, TypeError) as error:
        raise SnapshotError(Reason.CONFIGURATION_INVALID, f"{file} cannot be read: {error}", _WRITTEN) from error
    if missing:
        raise SnapshotError(Reason.CONFIGURATION_INVALID, f"{file} has no {', '.join(missing)}", _WRITTEN)
    found: dict[str, Any] = result
    return found


_WRITTEN = "Name a file that this command's --json wrote."
