"""The hooks' walk where the host refuses something: what can serve goes on."""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import time
from pathlib import Path

import pytest
from support.watching import wait_until

from worker_hooks import gate, guard
from worker_hooks.control import READY_FOR_SNAPSHOT, RESTORE_COMPLETE, RESTORE_CONTEXT, ControlDirectory
from worker_hooks.hooks import Hooks, run
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


async def test_a_new_incarnation_is_new_in_all_that_the_hooks_see_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(guard, "scan", lambda pid: [])
    monkeypatch.setenv("DYN_TCP_RPC_PORT", "1")
    monkeypatch.setenv("ONLY_THE_SOURCES", "x")
    hooks = Hooks(ControlDirectory(tmp_path / "control"), capture_wanted=True, incarnation="source")
    hooks.booted()
    random.seed(7)
    seen: dict[str, str | None] = {}

    def resume() -> None:
        seen.update({name: os.environ.get(name) for name in ("DYN_TCP_RPC_PORT", "ONLY_THE_SOURCES")})

    waiting = asyncio.create_task(hooks.snapshot_point(lambda: None, resume))
    async with asyncio.timeout(5):
        await wait_until(tmp_path / "control", lambda: (tmp_path / "control" / READY_FOR_SNAPSHOT).exists() or None)
    context = {"env": {"DYN_TCP_RPC_PORT": "2", "ONLY_THE_SOURCES": None}, "incarnation": "clone"}
    (tmp_path / "control" / RESTORE_CONTEXT).write_text(json.dumps(context))
    (tmp_path / "control" / RESTORE_COMPLETE).write_text("incarnation=clone\n")
    async with asyncio.timeout(5):
        await waiting
    assert seen == {"DYN_TCP_RPC_PORT": "2", "ONLY_THE_SOURCES": None}, "before the engine resumes"
    assert hooks.lifecycle.incarnation == "clone"
    assert hooks.lifecycle.evidence["first_random"] != repr(random.Random(7).random())


async def test_discovery_that_hangs_does_not_keep_a_worker_from_draining(monkeypatch: pytest.MonkeyPatch) -> None:
    class Endpoint:
        def connection_id(self) -> int:
            return 1

        async def unregister_endpoint_instance(self) -> None:
            await asyncio.Event().wait()

    monkeypatch.setattr(gate, "LEAVE_TIMEOUT_S", 0.01)
    async with asyncio.timeout(5):
        await gate.Presence(Endpoint(), None).leave()


async def test_a_drain_leaves_discovery_then_waits_then_finishes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gate, "LEAVE_GRACE_S", 0.05)
    happened: list[tuple[str, float]] = []
    served = asyncio.get_running_loop().create_future()

    def note(what: str) -> None:
        happened.append((what, time.monotonic()))

    class Here:
        """An endpoint in discovery, and the client that sees it there."""

        def connection_id(self) -> int:
            return 1

        def instance_ids(self) -> list[int]:
            return [] if happened else [1]

        async def unregister_endpoint_instance(self) -> None:
            note("left discovery")

    class Runtime:
        def shutdown(self) -> None:
            note("finishes")
            served.set_result(None)

    hooks = Hooks(None, capture_wanted=False, incarnation=None)
    hooks.booted()
    await hooks.self_test(lambda: None)
    arrival = gate.Gate(hooks)
    arrival.stop_requested.set()
    async with asyncio.timeout(5):
        await arrival.serve([Runtime()], [gate.Presence(Here(), Here())], served)
    (left, left_at), (finishes, finishes_at) = happened
    assert (left, finishes) == ("left discovery", "finishes")
    assert finishes_at - left_at >= 0.05, "routers hear of it a little later"
    assert hooks.lifecycle.state is State.STOPPED


def test_arguments_that_a_worker_refuses_are_in_its_reason(tmp_path: Path) -> None:
    async def main(hooks: Hooks) -> None:
        argparse.ArgumentParser(prog="worker").parse_args(["--block-sise", "16"])

    hooks = Hooks(ControlDirectory(tmp_path / "control"), capture_wanted=False, incarnation="first")
    assert run(main, hooks) == 2
    state = json.loads((tmp_path / "control" / "worker-state.json").read_text())
    assert state["reason"] == "boot_failed"
    assert state["message"].endswith("exited with status 2: unrecognized arguments: --block-sise 16")
