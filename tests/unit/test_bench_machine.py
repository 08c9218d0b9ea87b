"""The machine's own limits, as ``bench restore`` takes them."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from dynamo_snapshot.local import bench_machine
from dynamo_snapshot.local.bench_machine import disk_read_rate, huge_pages, huge_pages_now, limit_s, read_rate


def row(**changes: Any) -> dict[str, Any]:
    restores = [{"phases": {"thaw": seconds}} for seconds in (0.1, 0.3, 0.2)]
    return {
        "restores": restores,
        "image_bytes": 1000,
        "image_read_bytes_per_s": 2000.0,
        "weight_bytes": 5000,
        **changes,
    }


def test_the_limit_is_what_takes_longer_the_image_or_the_weights() -> None:
    assert limit_s(row(), 10_000.0) == pytest.approx(1000 / 2000 + 0.2)
    assert limit_s(row(), 1000.0) == pytest.approx(5.0)
    assert limit_s(row(), None) is None
    assert limit_s(row(restores=[]), 1000.0) is None


def test_files_are_read_whole_and_past_the_page_cache_where_that_is_possible(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "pages.img"
    file.write_bytes(os.urandom((20 << 20) + 5))
    assert read_rate(file) > 0
    opened: list[int] = []
    real = os.open

    def noted(path: Any, flags: int, *arguments: Any) -> int:
        opened.append(flags)
        return real(path, flags, *arguments)

    monkeypatch.setattr(os, "open", noted)
    disk_read_rate(file)
    assert opened[-1] & os.O_DIRECT

    def refuses(path: Any, flags: int, *arguments: Any) -> int:
        raise OSError(22, "Invalid argument")

    monkeypatch.setattr(os, "open", refuses)
    assert disk_read_rate(file) is None


def test_huge_pages_are_as_they_were_afterwards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    setting = tmp_path / "enabled"
    setting.write_text("always [madvise] never")
    monkeypatch.setattr(bench_machine, "HUGE_PAGES", setting)
    with huge_pages(False):
        assert huge_pages_now() == "madvise"

    def measure() -> None:
        with huge_pages(True):
            assert setting.read_text() == "always"
            raise KeyError

    with pytest.raises(KeyError):
        measure()
    assert setting.read_text() == "madvise"
