"""vLLM as an engine that comes back at the speed of the hardware: weights by a loader, everything else small.

vLLM runs as a process tree: the engine core, with the GPU, is a child of the process that takes requests. What has
to be given up lies in that child, so the hooks' part runs there, by vLLM's own means: an executor class of ours
(``distributed_executor_backend``) that adds :class:`SnapshotWorker` to the worker (``worker_extension_cls``). With it
vLLM's own ``sleep`` and ``wake_up``, and so whoever calls them (Dynamo's pause and resume too), keep the weights as
segments instead of copying them to host memory::

    LLM(model, enable_sleep_mode=True, distributed_executor_backend=EXECUTOR)

``DYNAMO_SNAPSHOT_SEGMENTS`` names the segment store. One GPU an engine; vLLM 0.24 to 0.26.
"""

from __future__ import annotations

import ctypes
import gc
import os
import secrets
import tempfile
import time
from collections.abc import MutableMapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from worker_hooks.engines.greedy import ANSWER_TOKENS, PROMPT, GreedyAnswer
from worker_hooks.engines.shared_ports import sharing_ports
from worker_hooks.engines.vllm_metrics import PORT_ENV, ForwardPassMetrics
from worker_hooks.engines.worker_part import Places, WorkerPart

if TYPE_CHECKING:

    class _Executor:
        """The part of ``vllm.v1.executor.uniproc_executor.UniProcExecutor`` that is used."""

        vllm_config: Any
        is_sleeping: bool
        sleeping_tags: set[str]

        def _init_executor(self) -> None: ...

        def _distributed_args(self) -> tuple[str, int, int]: ...

        def collective_rpc(self, method: str, *, args: tuple[Any, ...] = ()) -> list[Any]: ...

    SnapshotExecutor: type[Any]
else:
    _Executor = object

EXECUTOR = "worker_hooks.engines.vllm.SnapshotExecutor"
"""For vLLM's ``distributed_executor_backend``."""
WORKER_EXTENSION = "worker_hooks.engines.vllm.SnapshotWorker"


class SnapshotWorker:
    """Added to vLLM's worker class; each method can be called by ``collective_rpc``."""

    if TYPE_CHECKING:
        model_runner: Any
        _snapshot_part: WorkerPart
        _snapshot_evidence: dict[str, str]
        _snapshot_metrics: ForwardPassMetrics

    def snapshot_quiesce(self) -> None:
        """Keeps the weights and gives up all GPU memory of the allocator; the engine must be idle."""
        import torch

        from worker_hooks.weights.torch_arena import empty_caches
        from worker_hooks.weights.vllm import VllmWeights

        part = WorkerPart(VllmWeights.of_this_process(), Places.of(os.environ), lambda: empty_caches(torch))
        part.quiesce()
        self._snapshot_part = part

    def snapshot_resume(self) -> None:
        """The reverse, at the same addresses; the KV cache comes back empty."""
        self._snapshot_evidence = self._snapshot_part.resume()
        # vLLM's own wake-up calls these for what lay in the cache's memory beside the cache.
        for name in ("post_kv_cache_wake_up", "init_fp8_kv_scales"):
            if (refill := getattr(self.model_runner, name, None)) is not None:
                refill()
                break

    def snapshot_evidence(self) -> dict[str, str]:
        """How the last resume went; empty before the first."""
        return getattr(self, "_snapshot_evidence", {})

    def snapshot_metrics(self, metrics: ForwardPassMetrics) -> None:
        """Called by the executor, in its own process: whose the calls below are."""
        self._snapshot_metrics = metrics

    def snapshot_metrics_close(self) -> None:
        self._snapshot_metrics.close()

    def snapshot_metrics_reopen(self) -> int | None:
        return self._snapshot_metrics.reopen()

    def snapshot_metrics_speak_as(self, worker_id: str) -> None:
        self._snapshot_metrics.speak_as(worker_id)


class SnapshotExecution(_Executor):
    """What :data:`SnapshotExecutor` does otherwise than vLLM's executor for one GPU."""

    def _init_executor(self) -> None:
        parallel = self.vllm_config.parallel_config
        if parallel.worker_extension_cls not in ("", WORKER_EXTENSION):
            raise ValueError(f"{EXECUTOR} needs worker_extension_cls, which is {parallel.worker_extension_cls} already")
        parallel.worker_extension_cls = WORKER_EXTENSION
        metrics = ForwardPassMetrics()
        metrics.follow(self.vllm_config.scheduler_config)  # vLLM makes its scheduler after its executor
        with sharing_ports():
            super()._init_executor()
        self.collective_rpc("snapshot_metrics", args=(metrics,))

    def _distributed_args(self) -> tuple[str, int, int]:
        # vLLM's own way, a TCP store, is a connection of the process with itself: CRIU would have to restore it, at
        # ports that a second clone finds taken. A file does for one rank; a house's /dev/shm goes with its snapshot.
        _, rank, local_rank = super()._distributed_args()
        return f"file://{tempfile.mkdtemp(prefix='vllm-', dir='/dev/shm')}/store", rank, local_rank

    def sleep(self, level: int = 1) -> None:
        """Whatever the level: weights are kept as segments, the cache is forgotten."""
        if not self.is_sleeping:
            self.collective_rpc("snapshot_quiesce")
            self.sleeping_tags = {"weights", "kv_cache"}
            self.is_sleeping = True

    def wake_up(self, tags: list[str] | None = None) -> None:
        """Whatever the tags: weights and cache come back together."""
        if self.is_sleeping:
            self.collective_rpc("snapshot_resume")
            self.sleeping_tags = set()
            self.is_sleeping = False


def __getattr__(name: str) -> Any:
    """Makes :data:`SnapshotExecutor` when vLLM asks for it: nothing of vLLM is loaded before."""
    if name != "SnapshotExecutor":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from vllm.v1.executor.uniproc_executor import UniProcExecutor

    # Kept, for the class is pickled by its name.
    made = type(name, (SnapshotExecution, UniProcExecutor), {"__module__": __name__})
    globals()[name] = made
    return made


def set_environment(environ: MutableMapping[str, str] = os.environ) -> None:
    """Sets what a vLLM that is to be captured needs, before it is imported; what is set already stays."""
    for name, value in {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "1",
        "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_HOST_IP": "127.0.0.1",
    }.items():
        environ.setdefault(name, value)


class OfflineEngine(Protocol):
    """The part of ``vllm.LLM`` that is used."""

    def generate(self, prompts: Any, sampling_params: Any, *, use_tqdm: bool) -> Sequence[Any]: ...

    def sleep(self, level: int = 1) -> None: ...

    def wake_up(self) -> None: ...

    def collective_rpc(self, method: str) -> list[Any]: ...


class VllmEngine:
    """An ``LLM`` whose executor is :data:`SnapshotExecutor`, as an engine under the hooks.

    The self-test's answer is what the engine itself said before its capture: greedy tokens to a fixed prompt.

    Args:
        llm: idle whenever the hooks call.
        evidence: the hooks', for how long things took and what was answered.
    """

    def __init__(self, llm: OfflineEngine, evidence: MutableMapping[str, str]) -> None:
        self._llm, self._evidence = llm, evidence
        self._asleep = False
        self._greedy = GreedyAnswer(evidence)

    def answer(self) -> list[int]:
        """Returns the greedy tokens to :data:`PROMPT`; their log-probability, finer than they are, is evidence."""
        from vllm import SamplingParams

        greedy = SamplingParams(temperature=0, max_tokens=ANSWER_TOKENS, ignore_eos=True, detokenize=False, logprobs=0)
        (output,) = self._llm.generate([{"prompt_token_ids": list(PROMPT)}], greedy, use_tqdm=False)
        (answered,) = output.outputs
        self._evidence["answer_logprob"] = repr(answered.cumulative_logprob)
        return list(answered.token_ids)

    def quiesce(self) -> None:
        self._greedy.record(self.answer())
        self._llm.sleep(level=1)
        self._asleep = True
        gc.collect()
        ctypes.CDLL(None).malloc_trim(0)

    def resume(self) -> None:
        if not self._asleep:
            return
        began = time.monotonic()
        self._llm.wake_up()
        self._asleep = False
        self._evidence["wake_s"] = f"{time.monotonic() - began:.4f}"

    def self_test(self) -> None:
        """Raises ``self_test_failed`` where the answer is not that of before the capture."""
        began = time.monotonic()
        answer = self.answer()
        self._evidence["answer_s"] = f"{time.monotonic() - began:.4f}"
        if self._greedy.recorded:
            (worker,) = self._llm.collective_rpc("snapshot_evidence")
            self._evidence.update(worker)
        self._greedy.check(answer)


# What follows takes an engine as ``dynamo.vllm`` hands it over.


async def answer(engine: Any) -> list[int]:
    """Returns its greedy tokens to :data:`PROMPT`."""
    from vllm import SamplingParams

    client, _ = _parts(engine)
    greedy = SamplingParams(temperature=0, max_tokens=ANSWER_TOKENS, ignore_eos=True, detokenize=False)
    # Salted, so that no cached prefix answers in the model's place.
    prompt = {"prompt_token_ids": list(PROMPT), "cache_salt": secrets.token_hex(8)}
    tokens: list[int] = []
    async for output in client.generate(prompt, greedy, f"self-test-{secrets.token_hex(8)}"):
        tokens = list(output.outputs[0].token_ids)
    return tokens


async def before_pause(engine: Any) -> None:
    """Closes the listener of the engine's metrics."""
    await _tell(engine, "snapshot_metrics_close")


async def after_release(engine: Any, environ: MutableMapping[str, str] = os.environ) -> None:
    """Before a runtime is there: Dynamo will look for the engine's metrics where ``environ`` then says."""
    for port in await _tell(engine, "snapshot_metrics_reopen"):
        if port is not None:
            environ[PORT_ENV] = str(port)


async def identified(engine: Any, instance_id: int) -> dict[str, str]:
    """The runtime has given the worker its id; returns how the weights came back, for its evidence."""
    await _tell(engine, "snapshot_metrics_speak_as", str(instance_id))
    return {name: value for found in await _tell(engine, "snapshot_evidence") for name, value in found.items()}


async def _tell(engine: Any, method: str, *arguments: Any) -> list[Any]:
    """Calls the executor's worker; an executor of another class has nothing to say to this."""
    from vllm.v1.executor.abstract import Executor

    client, config = _parts(engine)
    if not issubclass(Executor.get_class(config), SnapshotExecution):
        return []
    told: list[Any] = await client.collective_rpc(method, args=arguments)
    return told


def _parts(engine: Any) -> tuple[Any, Any]:
    """The client and vLLM's configuration: the first two, since Dynamo 1.5 of a tuple within one."""
    client, config = (engine[0] if isinstance(engine[0], tuple) else engine)[:2]
    return client, config
