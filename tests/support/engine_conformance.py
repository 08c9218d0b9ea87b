"""What the hooks rely on in an engine's adapter: the same suite for vLLM, SGLang and TensorRT-LLM.

The adapters stand on stand-ins of the engines' public calls, which tell a :class:`GpuWorld` what is done to the GPU.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from support.watching import wait_until

from worker_hooks import guard
from worker_hooks.control import READY_FOR_SNAPSHOT, RESTORE_COMPLETE, RESTORE_CONTEXT, ControlDirectory
from worker_hooks.hooks import Hooks, run
from worker_hooks.lifecycle import State

TOKENS = [5, 6, 7]


@dataclass
class GpuWorld:
    """A GPU with one engine's memory, and what was done to it, in order."""

    there: set[str] = field(default_factory=lambda: {"weights", "kv_cache"})
    happened: list[str] = field(default_factory=list)
    tokens: list[int] = field(default_factory=lambda: list(TOKENS))
    broken: str = ""
    """What fails: ``pause``, ``resume`` or ``generate``."""
    open_requests: bool = True

    def generate(self) -> list[int]:
        self._fail("generate")
        assert self.open_requests, "asked while paused"
        assert self.there == {"weights", "kv_cache"}, f"asked with {self.there} on the GPU"
        self.happened.append("generate")
        return list(self.tokens)

    def give_up(self, *tags: str) -> None:
        self._fail("pause")
        for tag in tags:
            self.there.remove(tag)
            self.happened.append(f"-{tag}")

    def take_back(self, *tags: str) -> None:
        self._fail("resume")
        for tag in tags:
            assert tag not in self.there
            self.there.add(tag)
            self.happened.append(f"+{tag}")

    def _fail(self, what: str) -> None:
        if what == self.broken:
            raise RuntimeError(f"{what} is broken")


@dataclass
class Walk:
    """One worker's walk: its hooks, and the suite's hand on the control directory."""

    folder: Path
    hooks: Hooks
    engine: Any

    def run(self, world: GpuWorld, incarnation: str = "clone", before_release: str = "") -> int:
        """Returns the exit status of the whole walk; ``before_release``: what breaks while the worker is frozen."""

        async def worker(hooks: Hooks) -> None:
            hooks.booted()
            released = asyncio.create_task(self._release(world, incarnation, before_release))
            try:
                await hooks.snapshot_point(self.engine.quiesce, self.engine.resume)
            finally:
                released.cancel()
            await hooks.self_test(self.engine.self_test)
            hooks.registered()

        async def bounded(hooks: Hooks) -> None:
            async with asyncio.timeout(10):
                await worker(hooks)

        return run(bounded, self.hooks)

    async def _release(self, world: GpuWorld, incarnation: str, breaks: str) -> None:
        await wait_until(self.folder, lambda: (self.folder / READY_FOR_SNAPSHOT).exists() or None)
        world.happened.append("ready")
        if breaks == "tokens":
            world.tokens = [5, 6, 8]
        else:
            world.broken = breaks
        context = {"env": {}, "incarnation": incarnation}
        (self.folder / RESTORE_CONTEXT).write_text(json.dumps(context))
        (self.folder / RESTORE_COMPLETE).write_text(f"incarnation={incarnation}\n")

    @property
    def reason(self) -> str | None:
        return self.hooks.lifecycle.snapshot.reason

    @property
    def states(self) -> list[str]:
        return [state for state, _ in self.hooks.lifecycle.snapshot.history]


class EngineConformance:
    """Subclass it and give fixtures: ``world``, and ``engine``, an adapter with that ``evidence`` in that world."""

    LEFT_ON_THE_GPU: frozenset[str] = frozenset()
    """What the adapter does not give up: it is in the image."""

    @pytest.fixture
    def evidence(self) -> dict[str, str]:
        return {}

    @pytest.fixture
    def walk(self, world: GpuWorld, engine: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Walk:
        monkeypatch.setattr(guard, "scan", lambda pid: [])
        return self._walk(engine, tmp_path / "control")

    @staticmethod
    def _walk(engine: Any, folder: Path, capture: bool = True) -> Walk:
        hooks = Hooks(ControlDirectory(folder), capture_wanted=capture, incarnation="source")
        return Walk(folder, hooks, engine)

    @property
    def _given_up(self) -> set[str]:
        return {"weights", "kv_cache"} - self.LEFT_ON_THE_GPU

    def test_it_is_quiesced_before_it_says_that_it_is_ready(self, world: GpuWorld, walk: Walk) -> None:
        assert walk.run(world) == 0
        until_ready = world.happened[: world.happened.index("ready")]
        assert until_ready[0] == "generate", "the right answer is the engine's own, from before"
        assert set(until_ready[1:]) == {f"-{tag}" for tag in self._given_up}

    def test_the_weights_come_back_before_the_cache_and_both_before_the_self_test(
        self, world: GpuWorld, walk: Walk, evidence: dict[str, str]
    ) -> None:
        assert walk.run(world) == 0
        after = world.happened[world.happened.index("ready") + 1 :]
        assert after == [f"+{tag}" for tag in ("weights", "kv_cache") if tag in self._given_up] + ["generate"]
        assert walk.states[-1] == State.REGISTERED
        assert evidence["answer"] == "5 6 7"

    def test_a_source_that_goes_on_takes_all_back(self, world: GpuWorld, walk: Walk) -> None:
        assert walk.run(world, incarnation="source") == 0
        assert State.RESTORED not in walk.states
        assert world.there == {"weights", "kv_cache"}

    def test_another_answer_is_never_registered(self, world: GpuWorld, walk: Walk) -> None:
        assert walk.run(world, before_release="tokens") == 1
        assert (walk.reason, walk.states[-1]) == ("self_test_failed", State.FAILED)
        assert State.REGISTERED not in walk.states
        assert "[5, 6, 8] instead of [5, 6, 7]" in walk.hooks.lifecycle.snapshot.message

    @pytest.mark.parametrize(
        ("breaks", "reason"), [("resume", "resume_failed"), ("generate", "self_test_failed")], ids=lambda text: text
    )
    def test_what_fails_after_the_capture_has_its_reason(
        self, world: GpuWorld, walk: Walk, breaks: str, reason: str
    ) -> None:
        assert walk.run(world, before_release=breaks) == 1
        assert walk.reason == reason
        assert f"{breaks} is broken" in walk.hooks.lifecycle.snapshot.message
        assert State.REGISTERED not in walk.states

    @pytest.mark.parametrize("breaks", ["pause", "generate"])
    def test_what_fails_before_the_capture_is_never_ready(self, world: GpuWorld, walk: Walk, breaks: str) -> None:
        world.broken = breaks
        assert walk.run(world) == 1
        assert walk.reason == "quiesce_failed"
        assert State.READY_FOR_SNAPSHOT not in walk.states

    def test_an_engine_without_a_capture_is_only_asked(self, world: GpuWorld, engine: Any, tmp_path: Path) -> None:
        assert self._walk(engine, tmp_path / "control", capture=False).run(world) == 0
        assert world.happened == ["generate"]

    def test_a_restored_worker_can_be_captured_again(self, world: GpuWorld, walk: Walk, tmp_path: Path) -> None:
        assert walk.run(world) == 0
        world.happened.clear()
        assert self._walk(walk.engine, tmp_path / "second").run(world) == 0
        assert set(world.happened) >= {f"-{tag}" for tag in self._given_up}
        assert world.there == {"weights", "kv_cache"}


def put_modules(monkeypatch: pytest.MonkeyPatch, contents: Mapping[str, Mapping[str, Any]]) -> None:
    """Puts made-up modules into place, by name, and the packages that they are in."""
    for name, content in contents.items():
        parts = name.split(".")
        for count in range(1, len(parts) + 1):
            path = ".".join(parts[:count])
            if path not in sys.modules:
                monkeypatch.setitem(sys.modules, path, ModuleType(path))
        for symbol, value in content.items():
            monkeypatch.setattr(sys.modules[name], symbol, value, raising=False)
