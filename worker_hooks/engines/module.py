"""Runs a module that speaks ``dynamo.common.snapshot``'s protocol by itself, with the hooks wrapped in.

``dynamo.vllm``, ``dynamo.sglang`` and ``dynamo.trtllm`` quiesce, wait and resume by Dynamo's helper, but
leave no slot for a self-test, and publish themselves by two calls in either order: ``register_model``
(the model card) and ``Endpoint.serve_endpoint`` (the instance). The names are replaced before the module
is imported: the helper's wait by the hooks' own, and the two calls by ones that first send the endpoint's
health-check request through its own handler, and publish nothing before it was answered. An engine that the hooks
know is asked a fixed prompt before its capture, too, and publishes nothing unless it answers the same afterwards.
"""

from __future__ import annotations

import asyncio
import importlib.util
import logging
import os
import runpy
import signal
import sys
import threading
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any

from worker_hooks.engines import sglang, tensorrt_llm, vllm, vllm_metrics
from worker_hooks.engines.greedy import GreedyAnswer
from worker_hooks.engines.symbols import require
from worker_hooks.gate import Presence, drain_timeout_s
from worker_hooks.hooks import Hooks, exit_error
from worker_hooks.lifecycle import FINAL, Event, State
from worker_hooks.reasons import HookError, HookReason
from worker_hooks.serving import PROBE, probe

ENGINE_PACKAGES = {"dynamo.vllm": "vllm", "dynamo.sglang": "sglang", "dynamo.trtllm": "tensorrt_llm"}
"""What each of Dynamo's worker modules cannot start without."""

AUXILIARY_TIMEOUT_S = 60.0
"""How long an endpoint beside the model's waits for the model's to pass its self-test."""
ANSWER_TIMEOUT_S = 60.0
"""How long an engine may take for the fixed prompt before its capture, or goes without."""

Call = Callable[..., Awaitable[Any]]

logger = logging.getLogger(__name__)


async def _nothing(engine: Any) -> None:
    pass


async def _no_evidence(engine: Any, instance_id: int) -> dict[str, str]:
    return {}


@dataclass(frozen=True)
class KnownEngine:
    """What the hooks know of the engine behind one of Dynamo's modules."""

    answer: Callable[[Any], Awaitable[list[int]]]
    """Greedy tokens to the fixed prompt."""
    require_pause: Callable[[Any], None] = lambda engine: None
    """Raises ``pause_unsupported`` where Dynamo's pause would give nothing up."""
    before_import: Callable[[], None] = lambda: None
    """Sets the environment of any worker, before anything of the engine is imported."""
    prepare: Callable[[], None] = lambda: None
    """Likewise, of one that is to be captured."""
    before_pause: Callable[[Any], Awaitable[None]] = _nothing
    """Gives up what Dynamo's pause does not."""
    after_release: Callable[[Any], Awaitable[None]] = _nothing
    """Takes that back; there is no runtime yet."""
    identified: Callable[[Any, int], Awaitable[dict[str, str]]] = _no_evidence
    """Tells the engine its instance id; returns evidence."""


KNOWN_ENGINES = {
    "dynamo.vllm": KnownEngine(
        vllm.answer,
        before_import=vllm_metrics.choose_port,
        prepare=vllm.set_environment,
        before_pause=vllm.before_pause,
        after_release=vllm.after_release,
        identified=vllm.identified,
    ),
    "dynamo.sglang": KnownEngine(sglang.answer),
    "dynamo.trtllm": KnownEngine(tensorrt_llm.answer, tensorrt_llm.require_pause),
}


def run_module(hooks: Hooks, module: str, arguments: Sequence[str]) -> int:
    """Runs ``module`` as ``python -m`` would and returns the exit status, as :func:`worker_hooks.hooks.run` does."""
    try:
        ModuleHooks(hooks).install(module)
        sys.argv = [module, *arguments]
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    except HookError as error:
        return _failed(hooks, error)
    except SystemExit as ended:
        status = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
        if status and hooks.lifecycle.state not in FINAL:
            _failed(hooks, exit_error(hooks.lifecycle.state, module, ended))
            return status
        return _ended(hooks, status)
    except Exception as error:
        reason = HookReason.BOOT_FAILED if hooks.lifecycle.state is State.BOOTING else HookReason.ENDPOINT_ENDED
        return _failed(hooks, HookError(reason, f"{module}: {type(error).__name__}: {error}"))
    return _ended(hooks, 0)


class ModuleHooks:
    """The hooks' side of one module's run."""

    def __init__(self, hooks: Hooks) -> None:
        self._hooks = hooks
        self.failure: HookError | None = None
        self._tested: asyncio.Future[None] | None = None
        self._testing = False
        self._models: list[Any] = []
        """Endpoints that a model was registered for."""
        self._deferred: list[Callable[[], Awaitable[Any]]] = []
        self._watch: asyncio.Task[None] | None = None
        self._resumes_itself = False
        self._known: KnownEngine | None = None
        self._engine: Any = None
        self._greedy = GreedyAnswer(hooks.lifecycle.evidence)

    def install(self, module: str) -> None:
        """Replaces the names; raises ``symbols_missing`` naming every one that is not there."""
        self._known = KNOWN_ENGINES.get(module)
        if self._known is not None:
            self._known.before_import()
            if self._hooks.capture_wanted:
                self._known.prepare()
        package = ENGINE_PACKAGES.get(module)
        for name in filter(None, (module, package)):
            if not _importable(name):
                raise HookError(HookReason.SYMBOLS_MISSING, f"{module} cannot run: no module named {name}")
        lifecycle = require(
            "dynamo.common.snapshot.lifecycle",
            ["SnapshotConfig.run_lifecycle", "EngineSnapshotController.wait_for_restore"],
        )
        runtime = require("dynamo.runtime", ["Endpoint.serve_endpoint", "Context"])
        llm = require("dynamo.llm", ["register_model"])
        shutdown = require("dynamo.common.utils.graceful_shutdown", ["graceful_shutdown_with_discovery"])

        # Since Dynamo 1.5 the helper returns with the engine still paused, and elect_and_wake resumes it.
        self._resumes_itself = not hasattr(lifecycle, "elect_and_wake")
        self._patch(lifecycle.SnapshotConfig, "run_lifecycle", self._hooked_lifecycle)
        self._patch(lifecycle.EngineSnapshotController, "wait_for_restore", self._noted_engine)
        self._patch(runtime.Endpoint, "serve_endpoint", self._gated_serve)
        for name in ("register_model", "register_llm"):
            if hasattr(llm, name):
                self._patch(llm, name, self._gated_register)
        self._patch(shutdown, "graceful_shutdown_with_discovery", self._noted_shutdown)

    @staticmethod
    def _patch(owner: Any, name: str, wrap: Callable[[Call], Call]) -> None:
        setattr(owner, name, wrap(getattr(owner, name)))

    def _hooked_lifecycle(self, _: Call) -> Call:
        """The same files as the helper's, with the guard, inotify and a new identity."""

        async def run_lifecycle(config: Any, pause_controller: Any, *pause_arguments: Any) -> bool:
            hooks = self._hooks
            if hooks.control is None:
                raise HookError(HookReason.INTERNAL_ERROR, f"{config.control_dir} is not known to the hooks")
            hooks.booted()

            async def quiesce() -> None:
                await self._record_answer()
                if self._known is not None and self._engine is not None:
                    await self._known.before_pause(self._engine)
                await pause_controller.pause(*pause_arguments)

            async def resume() -> None:
                if self._resumes_itself:
                    await pause_controller.resume()
                    pause_controller.mark_resumed()
                if self._known is not None and self._engine is not None:
                    await self._known.after_release(self._engine)

            if await hooks.await_release(hooks.control, quiesce):
                hooks.lifecycle.fire(Event.RESUME)
            os.environ.pop("HF_HUB_OFFLINE", None)  # as the helper does: registration may need the hub
            await hooks.step(HookReason.RESUME_FAILED, resume)
            return True

        return run_lifecycle

    def _noted_engine(self, wait: Call) -> Call:
        async def wait_for_restore(controller: Any) -> Any:
            self._engine = controller.engine
            return await wait(controller)

        return wait_for_restore

    async def _record_answer(self) -> None:
        """Asks an engine that the hooks know; one that cannot be asked, as half of a pair, is captured without."""
        if self._known is None or self._engine is None:
            return
        self._known.require_pause(self._engine)
        try:
            async with asyncio.timeout(ANSWER_TIMEOUT_S):
                self._greedy.record(await self._known.answer(self._engine))
        except Exception as error:  # whatever the engine raises
            logger.warning("the self-test will be the health check alone: %s: %s", type(error).__name__, error)

    async def _check_answer(self) -> None:
        if self._known is not None and self._greedy.recorded:
            self._greedy.check(await self._known.answer(self._engine))

    async def _identify(self, instance_id: int) -> None:
        if self._known is not None and self._engine is not None:
            self._hooks.lifecycle.evidence.update(await self._known.identified(self._engine, instance_id))

    def _gated_serve(self, serve: Call) -> Call:
        async def serve_endpoint(endpoint: Any, handler: Any, *arguments: Any, **options: Any) -> Any:
            payload = options.get("health_check_payload")
            model = any(endpoint is each for each in self._models)
            if (payload is not None or model) and not self._testing:
                await self._self_test(endpoint, handler, payload if payload is not None else dict(PROBE))
            else:
                await self._wait_tested()
            try:
                return await serve(endpoint, handler, *arguments, **options)
            finally:
                if self.failure is not None:
                    raise self.failure

        return serve_endpoint

    def _gated_register(self, register: Call) -> Call:
        async def register_model(*arguments: Any, **options: Any) -> Any:
            if self._tested is not None and self._tested.done():
                return await register(*arguments, **options)
            # The handler that the self-test needs is not there yet: the card goes out right after it.
            self._models.append(options["endpoint"] if "endpoint" in options else arguments[2])
            self._deferred.append(lambda: register(*arguments, **options))
            return None

        return register_model

    async def _self_test(self, endpoint: Any, handler: Any, payload: Any) -> None:
        self._testing = True
        tested = self._outcome()
        hooks = self._hooks
        try:
            if hooks.lifecycle.state is State.BOOTING:
                hooks.booted()

            async def test() -> None:
                await probe(handler, payload)
                await self._check_answer()

            await hooks.step(HookReason.RESUME_FAILED, lambda: self._identify(endpoint.connection_id()))
            await hooks.self_test(test)
            presence = Presence(endpoint, await endpoint.client())
            for register in self._deferred:
                await register()
        except HookError as error:
            tested.set_exception(error)
            raise
        tested.set_result(None)
        self._watch = asyncio.create_task(self._watch_presence(presence), name="presence")

    async def _wait_tested(self) -> None:
        try:
            async with asyncio.timeout(AUXILIARY_TIMEOUT_S):
                await asyncio.shield(self._outcome())
        except TimeoutError as error:
            raise HookError(
                HookReason.SELF_TEST_FAILED,
                f"no endpoint with a model or a health_check_payload was tested within {AUXILIARY_TIMEOUT_S:g} s",
            ) from error

    def _outcome(self) -> asyncio.Future[None]:
        if self._tested is None:
            self._tested = asyncio.get_running_loop().create_future()
        return self._tested

    async def _watch_presence(self, presence: Presence) -> None:
        await presence.appeared()
        self._hooks.lifecycle.evidence["instance_id"] = str(presence.instance_id)
        self._hooks.registered()
        await presence.lost()
        if self._hooks.lifecycle.state is State.REGISTERED:
            self.failure = HookError(
                HookReason.LEASE_LOST, f"instance {presence.instance_id:x} is not in discovery any more"
            )
            self._hooks.failed(self.failure)
            # The module's own handler drains and shuts down in order.
            os.kill(os.getpid(), signal.SIGTERM)

    def _noted_shutdown(self, shutdown: Call) -> Call:
        async def graceful_shutdown_with_discovery(*arguments: Any, **options: Any) -> Any:
            if self._hooks.lifecycle.state is State.REGISTERED:
                self._hooks.lifecycle.fire(Event.DRAIN)
            bound = threading.Timer(drain_timeout_s(), self._give_up)
            bound.daemon = True
            bound.start()
            return await shutdown(*arguments, **options)

        return graceful_shutdown_with_discovery

    def _give_up(self) -> None:
        """The module drains by itself; this bounds it, from a thread, for its loop may be the one that hangs."""
        error = self.failure or HookError(
            HookReason.DRAIN_TIMED_OUT, f"requests still in flight after {drain_timeout_s():g} s"
        )
        self._hooks.failed(error)
        os._exit(1)


def _importable(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:
        return False


def _ended(hooks: Hooks, status: int) -> int:
    state = hooks.lifecycle.state
    if status or state is State.FAILED:
        return status or 1
    if state is not State.REGISTERED:
        if state not in FINAL:
            hooks.lifecycle.fire(Event.STOP)
        return 0
    return _failed(hooks, HookError(HookReason.ENDPOINT_ENDED, "the module ended though nobody asked it to"))


def _failed(hooks: Hooks, error: HookError) -> int:
    hooks.failed(error)
    print(f"dynamo-snapshot-worker: {error}", file=sys.stderr, flush=True)
    return 1
