"""Files that a long command writes at its end: known to be writable before it begins."""

from __future__ import annotations

import os
from pathlib import Path

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
