"""Where a program of this host is."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path


def find_program(name: str) -> Path | None:
    """The program ``name`` beside this Python, whose installation comes first, or else on PATH; a path is itself.

    None where there is none, or it may not be executed.
    """
    if os.sep in name:
        return Path(name) if os.access(name, os.X_OK) else None
    beside = Path(sys.executable).with_name(name)
    if os.access(beside, os.X_OK):
        return beside
    on_path = shutil.which(name)
    return Path(on_path) if on_path else None
