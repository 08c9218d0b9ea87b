"""Which code made a row: rows of different code are not comparable."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from functools import cache
from importlib import resources

from dynamo_snapshot.replay.comparison.rows import OURS

_SIMULATION = ("dynamo_snapshot.replay.simulation", "dynamo_snapshot.replay.policies")


@cache
def code_of(policy: str) -> str:
    """A short digest of the sources that decide what ``policy`` (a family) comes to, Dynamo's own not included."""
    return _digest((*_SIMULATION, "planner") if policy == OURS else _SIMULATION)


def _digest(packages: Iterable[str]) -> str:
    digest = hashlib.sha256()
    for package in packages:
        files = sorted(resources.files(package).iterdir(), key=lambda file: file.name)
        for file in files:
            if file.name.endswith(".py"):
                digest.update(file.name.encode() + b"\0" + file.read_bytes() + b"\0")
    return digest.hexdigest()[:12]
