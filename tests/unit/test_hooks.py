"""The hooks' walk where the host refuses something: what can serve goes on."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from worker_hooks import guard
from worker_hooks.control import ControlDirectory
from worker_hooks.hooks import Hooks
from worker_hooks.lifecycle import State


async def test_a_worker_that_cannot_say_it_is_ready_goes_on_without_a_capture(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(directory: ControlDirectory) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(ControlDirectory, "write_ready", full)
    monkeypatch.setattr(guard, "scan", lambda pid: [])
    resumed: list[str] = []
    hooks = Hooks(ControlDirectory(tmp_path / "control"), capture_wanted=True, incarnation="first")
    hooks.booted()
    async with asyncio.timeout(5):
        await hooks.snapshot_point(lambda: None, lambda: resumed.append("resumed"))
    assert resumed == ["resumed"]
    assert hooks.lifecycle.state is State.RESUMING
    assert hooks.lifecycle.incarnation == "first"
    assert "No space left" in hooks.lifecycle.evidence["capture_refused"]
