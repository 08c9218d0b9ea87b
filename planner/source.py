"""Which code decides: decisions of other code need not come out the same."""

from __future__ import annotations

import hashlib
from functools import cache
from importlib import resources


@cache
def code() -> str:
    """A short digest of this package's sources."""
    digest = hashlib.sha256()
    for file in sorted(resources.files(__package__).iterdir(), key=lambda file: file.name):
        if file.name.endswith(".py"):
            digest.update(file.name.encode() + b"\0" + file.read_bytes() + b"\0")
    return digest.hexdigest()[:12]
