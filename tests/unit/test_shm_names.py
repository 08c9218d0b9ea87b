"""Shared-memory files get back the names that their mappings know them by, and only those."""

from __future__ import annotations

import mmap
import multiprocessing
import os
import secrets
from collections.abc import Iterator
from pathlib import Path

import pytest

from worker_hooks.shm_names import SHM, put_back


@pytest.fixture
def name() -> Iterator[str]:
    unique = f"test-{secrets.token_hex(8)}"
    yield unique
    for path in SHM.glob(f"{unique}*"):
        path.unlink()


def mapped(path: Path) -> mmap.mmap:
    with path.open("w+b") as file:
        file.truncate(4096)
        return mmap.mmap(file.fileno(), 4096)


def test_a_file_with_another_name_gets_the_one_it_is_mapped_by(name: str) -> None:
    first, second = SHM / f"{name}.first", SHM / f"{name}.second"
    memory = mapped(first)
    os.link(first, second)
    first.unlink()
    wanted = SHM / f"{name}.first (deleted)"
    assert wanted in put_back(os.getpid())
    assert wanted.samefile(second)
    assert wanted not in put_back(os.getpid())
    memory.close()


def test_a_file_without_any_name_stays_nameless(name: str) -> None:
    only = SHM / f"{name}.only"
    memory = mapped(only)
    only.unlink()
    assert SHM / f"{name}.only (deleted)" not in put_back(os.getpid())
    assert list(SHM.glob(f"{name}*")) == []
    memory.close()


def test_a_semaphore_of_multiprocessing_is_found_by_the_name_it_is_mapped_by() -> None:
    semaphore = multiprocessing.get_context("spawn").Semaphore(1)
    made = put_back(os.getpid())
    try:
        lines = Path("/proc/self/maps").read_text().splitlines()
        paths = [Path(line.split(maxsplit=5)[5]) for line in lines if "/dev/shm/sem." in line]
        assert paths
        assert [path for path in paths if not path.exists()] == []
    finally:
        for path in made:
            path.unlink()
    assert semaphore.acquire(timeout=0)
