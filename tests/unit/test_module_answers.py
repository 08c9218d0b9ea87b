"""A module of Dynamo's, here made up, whose engine the hooks know: its own tokens decide on its registration."""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from support.engine_conformance import put_modules
from support.watching import wait_until

from worker_hooks import guard
from worker_hooks.control import READY_FOR_SNAPSHOT, RESTORE_COMPLETE, RESTORE_CONTEXT, ControlDirectory
from worker_hooks.engines import module
from worker_hooks.engines.module import KnownEngine, ModuleHooks
from worker_hooks.engines.vllm_metrics import PORT_ENV, PORTS
from worker_hooks.hooks import Hooks
from worker_hooks.lifecycle import State
from worker_hooks.reasons import HookError, HookReason

MODULE = "made_up.worker"


@dataclass
class Engine:
    """Its own pause controller, too, as Dynamo's helper calls it."""

    tokens: list[int] = field(default_factory=lambda: [5, 6])
    paused: bool = False
    silent: bool = False
    told: list[str] = field(default_factory=list)

    async def pause(self, *arguments: object) -> None:
        self.told.append("pause")
        self.paused = True

    async def generate(self, request: Any, context: Any) -> Any:
        yield {"token_ids": [1]}


async def _answer(engine: Engine) -> list[int]:
    assert not engine.paused
    if engine.silent:
        raise RuntimeError("half of a pair answers nobody by itself")
    return engine.tokens


class SnapshotConfig:
    control_dir = "here"

    async def run_lifecycle(self, pause_controller: Any, *pause_arguments: Any) -> bool:
        raise AssertionError("the hooks stand in for it")


@dataclass
class EngineSnapshotController:
    engine: Engine
    snapshot_config: SnapshotConfig

    async def wait_for_restore(self) -> bool:
        return await self.snapshot_config.run_lifecycle(self.engine)


class Endpoint:
    """Never in discovery: what comes after the self-test is not looked at here."""

    served = 0

    def connection_id(self) -> int:
        return 17

    async def client(self) -> Any:
        return SimpleNamespace()

    async def serve_endpoint(self, handler: Any, **options: Any) -> None:
        Endpoint.served += 1


@pytest.fixture
def hooks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Hooks:
    monkeypatch.setattr(guard, "scan", lambda pid: [])
    monkeypatch.setattr(Endpoint, "served", 0)
    monkeypatch.setattr(ModuleHooks, "_watch_presence", lambda self, presence: asyncio.sleep(0))
    monkeypatch.setattr(module, "Presence", lambda endpoint, client: None)
    put_modules(
        monkeypatch,
        {
            "dynamo.common.snapshot.lifecycle": {
                "SnapshotConfig": SnapshotConfig,
                "EngineSnapshotController": EngineSnapshotController,
                "elect_and_wake": None,
            },
            "dynamo.runtime": {"Endpoint": Endpoint, "Context": SimpleNamespace},
            "dynamo.llm": {"register_model": None},
            "dynamo.common.utils.graceful_shutdown": {"graceful_shutdown_with_discovery": None},
        },
    )
    for owner, name in (
        (SnapshotConfig, "run_lifecycle"),
        (EngineSnapshotController, "wait_for_restore"),
        (Endpoint, "serve_endpoint"),
    ):
        monkeypatch.setattr(owner, name, getattr(owner, name))
    monkeypatch.setattr(module, "_importable", lambda name: True)
    monkeypatch.setitem(module.KNOWN_ENGINES, MODULE, KnownEngine(_answer))
    return Hooks(ControlDirectory(tmp_path / "control"), capture_wanted=True, incarnation="source")


async def _to_the_self_test(hooks: Hooks, engine: Engine, tokens_after: list[int]) -> None:
    """A whole walk, with the engine saying ``tokens_after`` once it is back."""
    assert hooks.control is not None
    folder = hooks.control.path
    ModuleHooks(hooks).install(MODULE)

    async def restored() -> None:
        await wait_until(folder, lambda: (folder / READY_FOR_SNAPSHOT).exists() or None)
        assert engine.paused
        engine.tokens = tokens_after
        (folder / RESTORE_CONTEXT).write_text(json.dumps({"env": {}, "incarnation": "clone"}))
        (folder / RESTORE_COMPLETE).write_text("incarnation=clone\n")

    async with asyncio.timeout(10):
        releasing = asyncio.create_task(restored())
        await EngineSnapshotController(engine, SnapshotConfig()).wait_for_restore()
        releasing.cancel()
        engine.paused = False  # Dynamo's elect_and_wake
        await Endpoint().serve_endpoint(engine.generate, health_check_payload={"token_ids": [1]})


async def test_the_same_tokens_as_at_the_capture_are_served(hooks: Hooks) -> None:
    await _to_the_self_test(hooks, Engine(), [5, 6])
    assert Endpoint.served == 1
    assert hooks.lifecycle.evidence["answer"] == "5 6"
    assert hooks.lifecycle.self_test_at is not None


async def test_other_tokens_than_at_the_capture_are_not_served(hooks: Hooks) -> None:
    with pytest.raises(HookError, match=r"\[5, 7\] instead of \[5, 6\]") as failed:
        await _to_the_self_test(hooks, Engine(), [5, 7])
    assert failed.value.reason is HookReason.SELF_TEST_FAILED
    assert Endpoint.served == 0


async def test_an_engine_that_cannot_be_asked_is_tested_by_its_health_check(hooks: Hooks) -> None:
    await _to_the_self_test(hooks, Engine(silent=True), [])
    assert Endpoint.served == 1
    assert "answer" not in hooks.lifecycle.evidence


async def test_an_engine_without_a_pause_serves_without_a_capture(
    hooks: Hooks, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(engine: Engine) -> None:
        raise HookError(HookReason.PAUSE_UNSUPPORTED, "no pause")

    monkeypatch.setitem(module.KNOWN_ENGINES, MODULE, KnownEngine(_answer, refuse))
    engine = Engine()
    await _to_the_self_test(hooks, engine, [])
    assert State.READY_FOR_SNAPSHOT not in [state for state, _ in hooks.lifecycle.snapshot.history]
    assert hooks.lifecycle.evidence["capture_refused"] == "pause_unsupported: no pause"
    assert Endpoint.served == 1


async def test_an_engine_is_told_of_each_step_and_of_its_id(hooks: Hooks, monkeypatch: pytest.MonkeyPatch) -> None:
    async def before_pause(engine: Engine) -> None:
        engine.told.append("before_pause")

    async def after_release(engine: Engine) -> None:
        assert hooks.lifecycle.state is State.RESUMING
        engine.told.append("after_release")

    async def identified(engine: Engine, instance_id: int) -> dict[str, str]:
        assert hooks.lifecycle.self_test_at is None
        engine.told.append(f"identified {instance_id}")
        return {"weights": "by_loader=1"}

    known = KnownEngine(
        _answer,
        before_import=lambda: engine.told.append("before_import"),
        prepare=lambda: engine.told.append("prepare"),
        before_pause=before_pause,
        after_release=after_release,
        identified=identified,
    )
    monkeypatch.setitem(module.KNOWN_ENGINES, MODULE, known)
    engine = Engine()
    await _to_the_self_test(hooks, engine, [5, 6])
    assert engine.told == ["before_import", "prepare", "before_pause", "pause", "after_release", "identified 17"]
    assert hooks.lifecycle.evidence["weights"] == "by_loader=1"


@pytest.mark.parametrize(
    ("step", "reason"),
    [
        ("before_pause", HookReason.QUIESCE_FAILED),
        ("after_release", HookReason.RESUME_FAILED),
        ("identified", HookReason.RESUME_FAILED),
    ],
)
async def test_an_engine_that_cannot_take_a_step_is_never_served(
    hooks: Hooks, monkeypatch: pytest.MonkeyPatch, step: str, reason: HookReason
) -> None:
    async def fail(*arguments: Any) -> Any:
        raise AttributeError("no _publisher")

    steps: dict[str, Any] = {step: fail}
    monkeypatch.setitem(module.KNOWN_ENGINES, MODULE, KnownEngine(_answer, **steps))
    with pytest.raises(HookError, match="no _publisher") as failed:
        await _to_the_self_test(hooks, Engine(), [5, 6])
    assert failed.value.reason is reason
    assert Endpoint.served == 0


def test_a_worker_that_is_not_to_be_captured_has_its_own_environment(
    hooks: Hooks, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def prepare() -> None:
        raise AssertionError("not to be captured")

    monkeypatch.setitem(module.KNOWN_ENGINES, MODULE, KnownEngine(_answer, prepare=prepare))
    ModuleHooks(Hooks(ControlDirectory(tmp_path / "other"), capture_wanted=False, incarnation=None)).install(MODULE)


@pytest.mark.parametrize("captured", [True, False])
def test_a_worker_of_dynamo_vllm_boots_with_a_port_that_the_hooks_chose(
    hooks: Hooks, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, captured: bool
) -> None:
    """A pool's workers have one environment, and those that are not to be captured start from it as well."""
    from dynamo.vllm import envs

    monkeypatch.setenv(PORT_ENV, "0")
    with pytest.raises(ValueError, match="port 0 is outside"):
        envs.DYN_FORWARDPASS_METRIC_PORT  # noqa: B018  it is read at each look
    known = module.KNOWN_ENGINES["dynamo.vllm"]
    monkeypatch.setitem(module.KNOWN_ENGINES, "dynamo.vllm", replace(known, prepare=lambda: None))
    control = ControlDirectory(tmp_path / "other")
    ModuleHooks(Hooks(control, capture_wanted=captured, incarnation=None)).install("dynamo.vllm")
    assert envs.DYN_FORWARDPASS_METRIC_PORT in PORTS
