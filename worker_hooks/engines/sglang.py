"""SGLang as an engine whose weights stay out of its image.

SGLang runs as a process tree, too: what has the GPU is the scheduler, a child. Its part is a plugin of SGLang's own
kind (entry point group ``sglang.srt.plugins``, found in every process once this package is installed), which does
nothing unless ``DYNAMO_SNAPSHOT_SEGMENTS`` names a segment store. With it SGLang's own ``release_memory_occupation``
and ``resume_memory_occupation``, and so whoever calls them (``dynamo.sglang`` in snapshot mode does, for the KV cache
only), keep the weights as segments, too: given up after the cache, back before it. What the plugin cannot keep, for
want of a saver, of room, or with more than one rank, stays on the GPU and so in the image.

Read for this: SGLang 0.5.16, 0.5.21, 0.5.23 and torch_memory_saver 0.0.9, 0.0.10.
"""

from __future__ import annotations

import inspect
import logging
import os
import tempfile
from collections.abc import Callable, Iterator, MutableMapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Protocol

from worker_hooks.engines.greedy import ANSWER_TOKENS, PROMPT, GreedyAnswer
from worker_hooks.engines.symbols import require
from worker_hooks.engines.worker_part import Places, WorkerPart
from worker_hooks.reasons import HookError
from worker_hooks.weights.memory_saver import WEIGHTS, SaverWeights
from worker_hooks.weights.segment import SEGMENTS_ENV

logger = logging.getLogger(__name__)

KV_CACHE = "kv_cache"
UPDATER = "sglang.srt.managers.scheduler_components.weight_updater"
ADAPTER = "sglang.srt.utils.torch_memory_saver_adapter"
PARALLEL = "sglang.srt.distributed.parallel_state"
MESSAGES = "sglang.srt.managers.io_struct"
_SEAMS = {
    UPDATER: ("SchedulerWeightUpdaterManager.release_memory_occupation",
              "SchedulerWeightUpdaterManager.resume_memory_occupation"),
    ADAPTER: ("TorchMemorySaverAdapter.create",),
    PARALLEL: ("init_distributed_environment",),
}  # fmt: skip


class Manager(Protocol):
    """The part of SGLang's ``TokenizerManager`` that is used."""

    async def pause_generation(self, obj: Any) -> object: ...

    async def continue_generation(self, obj: Any) -> object: ...

    async def release_memory_occupation(self, obj: Any, request: None) -> object: ...

    async def resume_memory_occupation(self, obj: Any, request: None) -> object: ...


class Engine(Protocol):
    """The part of ``sglang.Engine`` that is used."""

    tokenizer_manager: Manager

    async def async_generate(self, *, input_ids: Any, sampling_params: Any) -> Any: ...


class SglangEngine:
    """A ``sglang.Engine``, made with ``enable_memory_saver=True``, as an engine under the hooks.

    Args:
        engine: idle whenever the hooks call.
        evidence: the hooks', for what was answered.
    """

    def __init__(self, engine: Engine, evidence: MutableMapping[str, str]) -> None:
        self._engine = engine
        self._messages = require(
            MESSAGES,
            [f"{name}ReqInput" for name in ("PauseGeneration", "ContinueGeneration", "ReleaseMemoryOccupation",
                                            "ResumeMemoryOccupation")],
        )  # fmt: skip
        self._greedy = GreedyAnswer(evidence)
        self._paused = self._released = False

    async def quiesce(self) -> None:
        self._greedy.record(await answer(self._engine))
        manager = self._engine.tokenizer_manager
        await manager.pause_generation(self._messages.PauseGenerationReqInput())
        self._paused = True
        # The cache only, as dynamo.sglang asks: without the plugin SGLang would give weights up for good.
        release = self._messages.ReleaseMemoryOccupationReqInput(tags=[KV_CACHE])
        await manager.release_memory_occupation(release, None)
        self._released = True

    async def resume(self) -> None:
        manager = self._engine.tokenizer_manager
        if self._released:
            resume = self._messages.ResumeMemoryOccupationReqInput(tags=[KV_CACHE])
            await manager.resume_memory_occupation(resume, None)
            self._released = False
        if self._paused:
            await manager.continue_generation(self._messages.ContinueGenerationReqInput())
            self._paused = False

    async def self_test(self) -> None:
        """Raises ``self_test_failed`` where the answer is not that of before the capture."""
        self._greedy.check(await answer(self._engine))


async def answer(engine: Engine) -> list[int]:
    """Returns the greedy tokens of a ``sglang.Engine``, as ``dynamo.sglang`` hands it over, too."""
    greedy = {"temperature": 0, "max_new_tokens": ANSWER_TOKENS, "ignore_eos": True}
    output = await engine.async_generate(input_ids=list(PROMPT), sampling_params=greedy)
    return list(output["output_ids"])


def plugin() -> None:
    """SGLang calls this in each of its processes, before it makes anything.

    Raises:
        HookError: ``symbols_missing``: SGLang logs it and goes on without, as with any plugin.
    """
    if not os.environ.get(SEGMENTS_ENV):
        return
    for module, names in _SEAMS.items():
        require(module, names)
    registry = require("sglang.srt.plugins.hook_registry", ["HookRegistry.register", "HookType.AROUND"])
    constants = require("sglang.srt.constants", ["GPU_MEMORY_ALL_TYPES"])
    messages = require(MESSAGES, ["ReleaseMemoryOccupationReqOutput", "ResumeMemoryOccupationReqOutput"])
    part = SchedulerPart(SaverWeights.of_this_process, constants.GPU_MEMORY_ALL_TYPES, messages, Places.of(os.environ))
    updater = f"{UPDATER}.SchedulerWeightUpdaterManager"
    for target, hook in {
        f"{ADAPTER}.TorchMemorySaverAdapter.create": part.create_saver,
        f"{updater}.release_memory_occupation": part.release,
        f"{updater}.resume_memory_occupation": part.resume,
        f"{PARALLEL}.init_distributed_environment": meet_at_a_file,
    }.items():
        registry.HookRegistry.register(target, hook, registry.HookType.AROUND)


class SchedulerPart:
    """The plugin's side of one scheduler process.

    Args:
        find_weights: called once a region for weights is entered.
        all_tags: what SGLang releases where no tags are named.
        messages: SGLang's ``io_struct``.
        places: see :class:`worker_hooks.engines.worker_part.Places`.
        ranks: how many processes hold the model.
        empty_caches: see :class:`worker_hooks.engines.worker_part.WorkerPart`.
    """

    def __init__(
        self,
        find_weights: Callable[[], SaverWeights],
        all_tags: list[str],
        messages: Any,
        places: Places,
        ranks: Callable[[], int] | None = None,
        empty_caches: Callable[[], None] | None = None,
    ) -> None:
        self._find_weights, self._all_tags, self._messages, self._places = find_weights, all_tags, messages, places
        self._ranks, self._empty_caches = ranks or _ranks, empty_caches or _empty_caches
        self._weights: SaverWeights | None = None
        self._part: WorkerPart | None = None

    def create_saver(self, create: Callable[..., Any], enable: bool) -> Any:
        """Around ``TorchMemorySaverAdapter.create``: the adapter tells of regions with weights."""
        saver = create(enable)
        return RecordingSaver(saver, self._recording) if enable else saver

    def release(self, release: Callable[..., Any], updater: Any, request: Any) -> Any:
        """Around SGLang's own: releases all but the weights by it, then gives the weights up."""
        done = self._without_weights(release, updater, request, self._messages.ReleaseMemoryOccupationReqOutput)
        try:
            self._give_up()
        except (HookError, OSError) as error:
            if self._weights is not None and self._weights.away:
                raise
            logger.warning("the weights stay on the GPU, and so in an image: %s", error)
        return done

    def resume(self, resume: Callable[..., Any], updater: Any, request: Any) -> Any:
        """Around SGLang's own: the weights first, then the rest by it."""
        if self._part is not None and self._weights is not None and self._weights.away:
            logger.info("weights are back: %s", self._part.resume())
        return self._without_weights(resume, updater, request, self._messages.ResumeMemoryOccupationReqOutput)

    def _without_weights(self, call: Callable[..., Any], updater: Any, request: Any, nothing: Callable[[], Any]) -> Any:
        tags = [tag for tag in request.tags or self._all_tags if tag != WEIGHTS]
        if not tags:  # for SGLang an empty list means all
            return nothing()
        request.tags = tags
        return call(updater, request)

    def _recording(self) -> AbstractContextManager[None]:
        if self._weights is None:
            self._weights = self._find_weights()
        return self._weights.recording()

    def _give_up(self) -> None:
        if self._weights is not None and self._weights.away:
            return
        if self._weights is None:
            logger.warning("the weights stay on the GPU, and so in an image: SGLang has no memory saver for them")
        elif (ranks := self._ranks()) > 1:
            logger.warning("the weights stay on the GPU, and so in an image: they are those of one of %d ranks", ranks)
        else:
            self._part = self._part or WorkerPart(self._weights, self._places, self._empty_caches)
            self._part.quiesce()


class RecordingSaver:
    """SGLang's memory saver adapter, whose regions with weights are recorded; all else is the adapter's."""

    def __init__(self, saver: Any, recording: Callable[[], AbstractContextManager[None]]) -> None:
        self._saver, self._recording = saver, recording

    @contextmanager
    def region(self, tag: str, enable_cpu_backup: bool = False) -> Iterator[None]:
        if tag != WEIGHTS:
            with self._saver.region(tag, enable_cpu_backup=enable_cpu_backup):
                yield
            return
        # No copy on the host: the segments are the copy, and the host's would be in the image.
        with self._recording(), self._saver.region(tag, enable_cpu_backup=False):
            yield

    def __getattr__(self, name: str) -> Any:
        return getattr(self._saver, name)


def meet_at_a_file(init: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
    """Around ``init_distributed_environment``: one rank needs no TCP connection with itself.

    CRIU would have to restore that, at ports that a second clone finds taken; a house's /dev/shm goes with its
    snapshot.
    """
    bound = inspect.signature(init).bind(*arguments, **options)
    if bound.arguments.get("world_size") == 1:
        folder = tempfile.mkdtemp(prefix="sglang-", dir="/dev/shm")
        bound.arguments["distributed_init_method"] = f"file://{folder}/store"
    return init(*bound.args, **bound.kwargs)


def _ranks() -> int:
    import torch

    count: int = torch.distributed.get_world_size() if torch.distributed.is_initialized() else 1
    return count


def _empty_caches() -> None:
    import torch

    from worker_hooks.weights.torch_arena import empty_caches

    empty_caches(torch)
