"""``worker_hooks.serve``: anyone's own engine as a Dynamo worker that can be captured and restored."""

from __future__ import annotations

import inspect
import logging
import os
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, NoReturn, Protocol

from worker_hooks import gate
from worker_hooks.gate import Gate, Presence
from worker_hooks.hooks import Hooks, Step, leave, run
from worker_hooks.reasons import HookError, HookReason
from worker_hooks.seccomp import block_io_uring

PROBE = {"token_ids": [1], "stop_conditions": {"max_tokens": 1}}
"""The request that the self-test sends an engine that has no ``self_test`` of its own."""


class Engine(Protocol):
    """What an engine has to have. These may be added, as plain or async functions:

    ``quiesce()`` gives up what must not be captured, connections above all; ``resume()`` takes it back;
    ``self_test()`` raises where the engine does not answer as it should.
    """

    def generate(self, request: Any, context: Any) -> AsyncIterator[Any]:
        """Answers one request; ``context`` tells when it was cancelled."""
        ...


EngineFactory = Callable[[], Engine | Awaitable[Engine]]


def serve(
    engine: EngineFactory,
    *,
    model_path: str,
    model_name: str,
    component: str = "backend",
    endpoint: str = "generate",
    namespace: str | None = None,
    kv_cache_block_size: int = 16,
) -> NoReturn:
    """Runs the worker until it has drained, then exits with its status.

    Discovery, request and event plane are read from Dynamo's own variables when the runtime is opened,
    that is, for a restored worker, from its restore context.

    Args:
        engine: builds the engine; called once, before anything of Dynamo's runtime exists.
        model_path: the folder with tokenizer and configuration, for the model card.
        model_name: the name that requests use.
        namespace: Dynamo's; DYN_NAMESPACE, or "dynamo", unless given.
        kv_cache_block_size: tokens in a block of the engine's KV cache, for routers.
    """
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    block_io_uring()
    hooks = Hooks.from_environment()

    async def worker(hooks: Hooks) -> None:
        built = await _built(engine)
        import dynamo.llm  # before the capture: what is loaded now is loaded in every clone

        hooks.booted()
        await hooks.snapshot_point(_optional(built, "quiesce"), _optional(built, "resume"))
        arrival = Gate(hooks)
        await hooks.self_test(_self_test(built))
        if arrival.stop_requested.is_set():
            hooks.stop()
        runtime = gate.open_runtime(
            os.environ.get("DYN_DISCOVERY_BACKEND", "etcd"),
            os.environ.get("DYN_REQUEST_PLANE", "tcp"),
            os.environ.get("DYN_EVENT_PLANE") or None,
        )
        path = f"{namespace or os.environ.get('DYN_NAMESPACE', 'dynamo')}.{component}.{endpoint}"
        presence = await Presence.watch(runtime, path)
        place = runtime.endpoint(path)
        await dynamo.llm.register_model(
            dynamo.llm.ModelInput.Tokens,
            dynamo.llm.ModelType.Chat | dynamo.llm.ModelType.Completions,
            place,
            model_path,
            model_name,
            kv_cache_block_size=kv_cache_block_size,
            worker_type=dynamo.llm.WorkerType.Aggregated,
        )
        await arrival.serve([runtime], [presence], place.serve_endpoint(_handler(built), graceful_shutdown=True))

    leave(run(worker, hooks))


async def _built(factory: EngineFactory) -> Engine:
    try:
        result = factory()
        return await result if inspect.isawaitable(result) else result
    except Exception as error:
        raise HookError(HookReason.BOOT_FAILED, f"{type(error).__name__}: {error}") from error


def _optional(engine: Engine, name: str) -> Step:
    step: Step = getattr(engine, name, lambda: None)
    return step


def _self_test(engine: Engine) -> Step:
    own: Step | None = getattr(engine, "self_test", None)
    return own if own is not None else lambda: probe(engine.generate, dict(PROBE))


async def probe(generate: Callable[[Any, Any], Any], request: Any) -> None:
    """Sends ``request`` to a handler as a router would; raises where no answer comes back."""
    from dynamo.runtime import Context

    answers = generate(request, Context())
    if inspect.isawaitable(answers):
        answers = await answers
    async for answer in answers:
        if isinstance(answer, dict) and (answer.get("status") == "error" or answer.get("finish_reason") == "error"):
            raise HookError(HookReason.SELF_TEST_FAILED, f"the engine answered with an error: {answer}")
        return
    raise HookError(HookReason.SELF_TEST_FAILED, f"the engine had no answer to {request}")


def _handler(engine: Engine) -> Callable[[Any, Any], AsyncIterator[Any]]:
    async def generate(request: Any, context: Any) -> AsyncIterator[Any]:
        async for answer in engine.generate(request, context):
            yield answer

    return generate
