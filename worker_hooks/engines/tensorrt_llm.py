"""TensorRT-LLM as an engine under the hooks: the KV cache is given up, the weights stay in the image.

Its pause is a prototype, off unless ``LLM`` was made with a ``sleep_config``, and has two forms: ``release(tags)`` and
``resume(tags)``; before them ``_collective_rpc("sleep" | "wakeup")``, which ``dynamo.trtllm`` uses as well. A version,
a back-end or a start without either is refused with ``pause_unsupported``, before anything is given up.

Weights (tag ``model_weights``) could be released only to host memory, which is in the image just as what the driver
copies there at its checkpoint, or for good: the virtual memory manager lists no addresses, and its worker process
takes no code of others. So they are left on the GPU. Read for this: TensorRT-LLM 1.3's sources and documentation.
"""

from __future__ import annotations

import inspect
import secrets
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from worker_hooks.engines.greedy import ANSWER_TOKENS, PROMPT, GreedyAnswer
from worker_hooks.engines.symbols import require
from worker_hooks.reasons import HookError, HookReason

KV_CACHE = "kv_cache"
TAGS = [KV_CACHE]

Call = Callable[[], Awaitable[object] | object]


class TensorRtLlmEngine:
    """A ``tensorrt_llm.LLM`` or ``AsyncLLM``, made with ``sleep_config=SleepConfig()``, as an engine under the hooks.

    One process (``TLLM_WORKER_USE_SINGLE_PROCESS=1``): a spawned worker would be held by connections of MPI.

    Args:
        llm: idle whenever the hooks call.
        evidence: the hooks', for what was answered.
    """

    def __init__(self, llm: Any, evidence: MutableMapping[str, str]) -> None:
        self._llm = llm
        self._greedy = GreedyAnswer(evidence)
        self._resume: Call | None = None

    async def quiesce(self) -> None:
        pause, resume = pause_calls(self._llm)
        self._greedy.record(await _answer(self._llm))
        self._resume = resume
        try:
            await _done(pause)
        except (NotImplementedError, ValueError) as error:  # what it cannot do it says before it does anything
            self._resume = None
            raise HookError(HookReason.PAUSE_UNSUPPORTED, f"TensorRT-LLM: {error}") from error

    async def resume(self) -> None:
        if self._resume is not None:
            await _done(self._resume)
            self._resume = None

    async def self_test(self) -> None:
        """Raises ``self_test_failed`` where the answer is not that of before the capture."""
        self._greedy.check(await _answer(self._llm))


def pause_calls(llm: Any) -> tuple[Call, Call]:
    """Returns the calls that give the KV cache up and take it back; raises ``pause_unsupported``."""
    if getattr(getattr(llm, "args", None), "sleep_config", None) is None:
        raise HookError(HookReason.PAUSE_UNSUPPORTED, "TensorRT-LLM was started without a sleep_config")
    if hasattr(llm, "release") and hasattr(llm, "resume"):
        return lambda: llm.release(list(TAGS)), lambda: llm.resume(list(TAGS))
    rpc = getattr(llm, "_collective_rpc", None)
    if rpc is None:
        raise HookError(
            HookReason.PAUSE_UNSUPPORTED, f"{type(llm).__module__}.{type(llm).__name__} has no release and no sleep"
        )
    return lambda: rpc("sleep", args=(list(TAGS),)), lambda: rpc("wakeup", args=(list(TAGS),))


async def answer(engine: Any) -> list[int]:
    """Returns the greedy tokens of an engine as ``dynamo.trtllm`` hands it over."""
    return await _answer(engine.llm)


def require_pause(engine: Any) -> None:
    """Raises ``pause_unsupported`` for such an engine, where Dynamo's own pause would leave out what it cannot do."""
    pause_calls(engine.llm)


async def _answer(llm: Any) -> list[int]:
    sampling = require("tensorrt_llm", ["SamplingParams"]).SamplingParams(
        max_tokens=ANSWER_TOKENS, top_k=1, end_id=-1, ignore_eos=True, detokenize=False
    )
    # Salted: the tree of reusable blocks outlives the cache's contents, and must not answer in the model's place.
    output = await llm.generate_async(list(PROMPT), sampling, cache_salt=secrets.token_hex(8))
    return list(output.outputs[0].token_ids)


async def _done(call: Call) -> None:
    result = call()
    if inspect.isawaitable(result):
        await result
