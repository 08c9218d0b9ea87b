"""The hooks' walk where the host refuses something: what can serve goes on."""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import signal
import time
from pathlib import Path

import pytest
from support.watching import wait_until

from worker_hooks import gate, guard
from worker_hooks.control import READY_FOR_SNAPSHOT, RESTORE_COMPLETE, RESTORE_CONTEXT, WAKE, ControlDirectory
from worker_hooks.hooks import Hooks, run
from worker_hooks.lifecycle import State
from worker_hooks.reasons import HookError, HookReason


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


class Parking:
    """A worker that is captured, and whose next incarnation is told to park."""

    def __init__(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(guard, "scan", lambda pid: [])
        self.control = tmp_path / "control"
        self.hooks = Hooks(ControlDirectory(self.control), capture_wanted=True, incarnation="source")
        self.resumed: list[str | None] = []

    def write(self, name: str, content: str) -> None:
        (self.control / ".new").write_text(content)
        (self.control / ".new").rename(self.control / name)

    async def parked(self) -> asyncio.Task[None]:
        """Returns the worker's wait, once it is parked."""
        self.hooks.booted()
        waiting = asyncio.create_task(
            self.hooks.snapshot_point(lambda: None, lambda: self.resumed.append(os.environ.get("DYN_TCP_RPC_PORT")))
        )
        async with asyncio.timeout(5):
            await wait_until(self.control, lambda: (self.control / READY_FOR_SNAPSHOT).exists() or None)
            self.write(
                RESTORE_CONTEXT, json.dumps({"env": {"DYN_TCP_RPC_PORT": "2"}, "incarnation": "clone", "park": True})
            )
            self.write(RESTORE_COMPLETE, "incarnation=clone\n")
            await wait_until(self.control, lambda: self.hooks.lifecycle.state is State.PARKED or None)
        return waiting


async def test_a_parked_incarnation_has_its_identity_and_resumes_only_when_woken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DYN_TCP_RPC_PORT", "1")
    worker = Parking(tmp_path, monkeypatch)
    waiting = await worker.parked()
    assert worker.hooks.lifecycle.incarnation == "clone"
    assert worker.resumed == []
    worker.write(WAKE, "incarnation=clone\n")
    async with asyncio.timeout(5):
        await waiting
    assert worker.resumed == ["2"]
    await worker.hooks.self_test(lambda: None)
    worker.hooks.registered()
    assert [state for state, _ in worker.hooks.lifecycle.snapshot.history][-6:] == [
        "RESTORED", "IDENTITY_APPLIED", "PARKED", "RESUMING", "SELF_TESTING", "REGISTERED",
    ]  # fmt: skip


async def test_a_wake_for_another_incarnation_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    worker = Parking(tmp_path, monkeypatch)
    waiting = await worker.parked()
    worker.write(WAKE, "incarnation=another\n")
    with pytest.raises(HookError, match="wake names another, this is clone") as refusal:
        async with asyncio.timeout(5):
            await waiting
    assert refusal.value.reason is HookReason.INCARNATION_MISMATCH
    assert worker.resumed == []


def test_a_parked_worker_that_is_told_to_drain_ends_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    took: list[float] = []

    async def main(hooks: Hooks) -> None:
        worker = Parking(tmp_path, monkeypatch)
        worker.hooks = hooks
        waiting = await worker.parked()
        began = time.monotonic()
        asyncio.get_running_loop().call_later(0.05, signal.raise_signal, signal.SIGTERM)
        try:
            await waiting
        finally:
            took.append(time.monotonic() - began)

    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        hooks = Hooks.from_environment({"SNAPSHOT_CONTROL_DIR": str(tmp_path / "control")})
        assert run(main, hooks) == 0
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    assert hooks.lifecycle.state is State.STOPPED
    assert took[0] < 1
    assert hooks.lifecycle.snapshot.history[-2][0] == "PARKED"


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
