"""Runtime folders of `capture` and `restore`: what another command has removed meanwhile harms nobody."""

from __future__ import annotations

from pathlib import Path

import pytest

from dynamo_snapshot.agent import direct_folder
from dynamo_snapshot.agent.direct_folder import MARK, own_folder


async def test_a_folder_that_another_command_removed_first_is_nobody_s_trouble(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(direct_folder, "DIRECT_DIR", tmp_path)
    gone = tmp_path / "4711"
    monkeypatch.setattr(direct_folder, "abandoned", lambda parent: [gone])
    async with own_folder(tmp_path / "own") as removed:
        assert removed == []
        assert (tmp_path / "own" / MARK).exists()
        assert not gone.exists(), "nor does its lock stay behind"
    assert not (tmp_path / "own").exists()
