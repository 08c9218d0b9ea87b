"""Which code made a row: rows of different code are not comparable."""

from __future__ import annotations

import ast
import hashlib
from collections.abc import Iterator
from functools import cache
from importlib import metadata, resources
from importlib.resources.abc import Traversable

from dynamo_snapshot.replay.comparison.rows import OURS

_SIMULATION = ("dynamo_snapshot.replay.simulation", "dynamo_snapshot.replay.policies")
_DECIDES = "planner.policy"
_DYNAMOS = "dynamo-"
"""So begin the families that are Dynamo's own planner."""


@cache
def code_of(policy: str) -> str:
    """A short digest of what decides what ``policy`` (a family) comes to.

    That is the sources of the simulation and the policies; for ours those of the planner's policy, and for
    Dynamo's own planner the installed version of Dynamo.
    """
    digest = hashlib.sha256()
    for file in sources_of(policy):
        digest.update(file.name.encode() + b"\0" + file.read_bytes() + b"\0")
    if policy.startswith(_DYNAMOS):
        digest.update(dynamo_version().encode())
    return digest.hexdigest()[:12]


def sources_of(policy: str) -> list[Traversable]:
    """The files of this project that decide what ``policy`` comes to."""
    files = [file for package in _SIMULATION for file in _sources(package)]
    return files + _imported(_DECIDES) if policy == OURS else files


def dynamo_version() -> str:
    """The installed ai-dynamo's; empty: there is none."""
    try:
        return metadata.version("ai-dynamo")
    except metadata.PackageNotFoundError:
        return ""


def _sources(package: str) -> list[Traversable]:
    files = (file for file in resources.files(package).iterdir() if file.name.endswith(".py"))
    return sorted(files, key=lambda file: file.name)


def _imported(module: str) -> list[Traversable]:
    """The source of ``module`` and of all that it imports from its own package, directly or not."""
    package = module.partition(".")[0]
    files = {f"{package}.{file.name.removesuffix('.py')}": file for file in _sources(package)}
    found: set[str] = set()
    waiting = [module]
    while waiting:
        name = waiting.pop()
        if name in files and name not in found:
            found.add(name)
            waiting += _imports(ast.parse(files[name].read_bytes()))
    return [files[name] for name in sorted(found)]


def _imports(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
