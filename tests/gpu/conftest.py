"""Fixtures of the GPU suite: run it on a machine with a GPU, as root, with `pytest tests/gpu`."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from gpu.subjects import Subject

from dynamo_snapshot.agent.criu.command import Criu
from dynamo_snapshot.agent.cuda import bindings as cuda_bindings
from dynamo_snapshot.agent.cuda.driver import CheckpointDriver


@pytest.fixture(scope="session")
def driver() -> CheckpointDriver:
    """The real driver, in this process."""
    return cuda_bindings.open_driver()


@pytest.fixture(scope="session")
def criu_path() -> Path:
    named = os.environ.get("DYNAMO_SNAPSHOT_CRIU")
    return Criu.locate(Path(named) if named else None).path


@pytest.fixture
def subject(tmp_path: Path) -> Iterator[Callable[..., Subject]]:
    """Returns a function that starts a CUDA process with some MiB of ballast."""
    made: list[Subject] = []

    def start(mib: int = 64) -> Subject:
        made.append(Subject(tmp_path / f"subject-{len(made)}", mib))
        return made[-1]

    yield start
    for each in made:
        each.kill()
