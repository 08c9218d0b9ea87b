"""TensorRT-LLM's adapter against stand-ins of its two forms of pause; TensorRT-LLM itself is not installed here."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from support.engine_conformance import EngineConformance, GpuWorld, Walk, put_modules

from worker_hooks.engines import tensorrt_llm as adapter
from worker_hooks.engines.tensorrt_llm import TensorRtLlmEngine
from worker_hooks.lifecycle import State
from worker_hooks.reasons import HookError, HookReason


@dataclass
class FakeLLM:
    """As ``tensorrt_llm.LLM`` without a pause: what a block of the cache held answers for whoever finds it again."""

    world: GpuWorld = field(default_factory=GpuWorld)
    args: Any = field(default_factory=lambda: SimpleNamespace(sleep_config=object()))
    reusable: set[str] = field(default_factory=set)

    def generate_async(self, inputs: list[int], sampling_params: Any, *, cache_salt: str) -> Any:
        assert inputs
        assert sampling_params["top_k"] == 1

        async def answer() -> Any:
            assert cache_salt not in self.reusable, "the cache answers, whose contents are gone"
            self.reusable.add(cache_salt)
            return SimpleNamespace(outputs=[SimpleNamespace(token_ids=self.world.generate())])

        return answer()


class ReleasingLLM(FakeLLM):
    """As of the versions with ``release`` and ``resume``."""

    def release(self, tags: list[str]) -> None:
        self.world.give_up(*tags)

    def resume(self, tags: list[str]) -> None:
        self.world.take_back(*tags)


class AsyncLLM(FakeLLM):
    """The same, awaited."""

    async def release(self, tags: list[str]) -> None:
        self.world.give_up(*tags)

    async def resume(self, tags: list[str]) -> None:
        self.world.take_back(*tags)


class RpcLLM(FakeLLM):
    """As of the versions before."""

    def _collective_rpc(
        self, method: str, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None, non_block: bool = False
    ) -> list[None]:
        {"sleep": self.world.give_up, "wakeup": self.world.take_back}[method](*args[0])
        return [None]


@pytest.fixture(autouse=True)
def _sampling(monkeypatch: pytest.MonkeyPatch) -> None:
    put_modules(monkeypatch, {"tensorrt_llm": {"SamplingParams": lambda **options: options}})


@pytest.fixture
def world() -> GpuWorld:
    return GpuWorld()


class TestConformance(EngineConformance):
    LEFT_ON_THE_GPU = frozenset({"weights"})

    @pytest.fixture(params=[ReleasingLLM, AsyncLLM, RpcLLM], ids=lambda kind: kind.__name__)
    def engine(self, request: pytest.FixtureRequest, world: GpuWorld, evidence: dict[str, str]) -> TensorRtLlmEngine:
        kind: Callable[..., FakeLLM] = request.param
        return TensorRtLlmEngine(kind(world), evidence)


def _rpc_without_workers(method: str, **options: Any) -> Any:
    raise ValueError("Executor type GenerationExecutorProxy does not support collective RPC.")


def _rpc_of_many_ranks(method: str, **options: Any) -> Any:
    raise NotImplementedError("sleep() requires parallel_config.world_size == 1")


def unpausable(world: GpuWorld) -> dict[str, Any]:
    return {
        "without a sleep_config": ReleasingLLM(world, SimpleNamespace(sleep_config=None)),
        "of a back-end without one": ReleasingLLM(world, SimpleNamespace()),
        "of a version without a pause": FakeLLM(world),
        "whose executor has no workers to ask": RpcLLM(world),
        "of several ranks": RpcLLM(world),
    }


@pytest.mark.parametrize("which", unpausable(GpuWorld()))
def test_an_engine_that_cannot_pause_serves_without_a_capture(
    world: GpuWorld, which: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    llm = unpausable(world)[which]
    if which == "whose executor has no workers to ask":
        llm._collective_rpc = _rpc_without_workers
    elif which == "of several ranks":
        llm._collective_rpc = _rpc_of_many_ranks
    walk: Walk = EngineConformance._walk(TensorRtLlmEngine(llm, {}), tmp_path / "control")
    assert walk.run(world) == 0
    assert walk.states[-1] == State.REGISTERED
    assert State.READY_FOR_SNAPSHOT not in walk.states
    assert walk.hooks.lifecycle.evidence["capture_refused"].startswith("pause_unsupported: ")
    assert world.there == {"weights", "kv_cache"}


async def test_dynamo_s_engine_is_asked_and_refused_by_its_llm(world: GpuWorld) -> None:
    assert await adapter.answer(SimpleNamespace(llm=RpcLLM(world))) == world.tokens
    adapter.require_pause(SimpleNamespace(llm=RpcLLM(world)))
    with pytest.raises(HookError) as refused:
        adapter.require_pause(SimpleNamespace(llm=FakeLLM(world)))
    assert refused.value.reason is HookReason.PAUSE_UNSUPPORTED
