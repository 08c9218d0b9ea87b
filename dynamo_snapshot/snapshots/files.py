"""The files of a folder, however deep: what a snapshot or a model consists of."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path


def files_below(folder: Path) -> Iterator[str]:
    """Yields the path of everything below ``folder`` that is not a folder, relative to it, with ``/``."""
    pending = [""]
    while pending:
        prefix = pending.pop()
        with os.scandir(folder / prefix) as entries:
            for entry in entries:
                path = prefix + entry.name
                if entry.is_dir(follow_symlinks=False):
                    pending.append(path + "/")
                else:
                    yield path
