"""vLLM's adapter against fakes of the calls it makes; vLLM itself is not installed here."""

from __future__ import annotations

import inspect
import os
import pickle
import random
import socket
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, cast

import pytest
from support.engine_conformance import EngineConformance, GpuWorld, put_modules

from worker_hooks.control import STATE_DIR_ENV
from worker_hooks.engines import vllm as adapter
from worker_hooks.engines.vllm import EXECUTOR, WORKER_EXTENSION, SnapshotWorker, VllmEngine
from worker_hooks.engines.vllm_metrics import PORT_ENV
from worker_hooks.engines.worker_part import Places, WorkerPart
from worker_hooks.reasons import HookError, HookReason
from worker_hooks.weights.arena import Attached
from worker_hooks.weights.segment import SEGMENTS_ENV, SEGMENTS_FILE, Segment, SegmentStore, decode_segments

SEGMENT = Segment(address=1 << 30, size=2 << 20, device=0, tag="weights", digest="0" * 64)


@dataclass
class FakeWeights:
    calls: list[tuple[str, object]] = field(default_factory=list)

    def quiesce(self, store: SegmentStore) -> list[Segment]:
        self.calls.append(("quiesce", store.folder))
        return [SEGMENT]

    def resume(self, store: SegmentStore, loader: Path | None = None) -> Attached:
        self.calls.append(("resume", loader))
        return Attached(by_loader=1 if loader else 0, why="" if loader else "none")


@pytest.fixture
def places(tmp_path: Path) -> Places:
    (tmp_path / "control").mkdir()
    return Places(SegmentStore(tmp_path / "segments"), tmp_path / "weights.sock", tmp_path / "control")


class FakeUniProcExecutor:
    """As vLLM's: makes one worker in its own process and calls its methods by name."""

    def __init__(self, extension: str = "") -> None:
        self.vllm_config = SimpleNamespace(
            parallel_config=SimpleNamespace(worker_extension_cls=extension),
            scheduler_config=SimpleNamespace(get_scheduler_cls=lambda: object),
        )
        self.is_sleeping, self.sleeping_tags = False, set[str]()
        self.called: list[str] = []
        self._init_executor()

    def _init_executor(self) -> None:
        self.method, self.rank, self.local_rank = self._distributed_args()

    def _distributed_args(self) -> tuple[str, int, int]:
        return "tcp://127.0.0.1:1", 0, 3

    def collective_rpc(self, method: str, *, args: tuple[object, ...] = ()) -> list[object]:
        inspect.signature(getattr(SnapshotWorker, method)).bind(self, *args)
        self.called.append(method)
        return [None]


@pytest.fixture
def executor_class(monkeypatch: pytest.MonkeyPatch) -> Iterator[type[Any]]:
    module = ModuleType("vllm.v1.executor.uniproc_executor")
    module.__dict__["UniProcExecutor"] = FakeUniProcExecutor
    for name in ("vllm", "vllm.v1", "vllm.v1.executor"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, module.__name__, module)
    before = set(Path("/dev/shm").glob("vllm-*"))
    yield adapter.SnapshotExecutor
    vars(adapter).pop("SnapshotExecutor")
    for made in set(Path("/dev/shm").glob("vllm-*")) - before:
        made.rmdir()


def test_the_executor_is_found_and_pickled_by_its_name(executor_class: type[Any]) -> None:
    module, _, name = EXECUTOR.rpartition(".")
    assert getattr(sys.modules[module], name) is executor_class
    assert pickle.loads(pickle.dumps(executor_class)) is executor_class
    assert issubclass(executor_class, FakeUniProcExecutor)
    with pytest.raises(AttributeError):
        _ = adapter.NothingElse


def test_the_executor_has_no_connection_and_adds_the_worker_s_part(executor_class: type[Any]) -> None:
    executor = executor_class()
    assert executor.vllm_config.parallel_config.worker_extension_cls == WORKER_EXTENSION
    scheme, _, path = executor.method.partition("://")
    assert (scheme, executor.rank, executor.local_rank) == ("file", 0, 3)
    assert Path(path).parent.is_dir()
    assert executor_class().method != executor.method


def test_what_the_worker_listens_on_can_be_listened_on_by_a_clone_too(
    executor_class: type[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.socket() as gloo:

        def init(executor: FakeUniProcExecutor) -> None:
            gloo.bind(("127.0.0.1", 0))
            gloo.listen()

        monkeypatch.setattr(FakeUniProcExecutor, "_init_executor", init)
        executor_class()
        assert gloo.getsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT)


def test_another_worker_extension_is_not_replaced(executor_class: type[Any]) -> None:
    with pytest.raises(ValueError, match=r"mine\.Extension"):
        executor_class("mine.Extension")


def test_sleep_and_wake_up_are_the_worker_s_quiesce_and_resume_once_each(executor_class: type[Any]) -> None:
    executor = executor_class()
    executor.wake_up()
    executor.sleep(1)
    executor.sleep(2)
    assert executor.is_sleeping
    executor.wake_up(["weights"])
    assert not executor.is_sleeping
    executor.wake_up(["kv_cache"])
    assert executor.called == ["snapshot_metrics", "snapshot_quiesce", "snapshot_resume"]


def test_a_worker_lists_its_segments_and_empties_its_caches_last(places: Places) -> None:
    weights, emptied = FakeWeights(), []
    WorkerPart(weights, places, lambda: emptied.append(list(weights.calls))).quiesce()
    assert emptied == [[("quiesce", places.store.folder)]]
    assert places.control is not None
    assert decode_segments((places.control / SEGMENTS_FILE).read_bytes()) == [SEGMENT]


def test_a_worker_asks_a_loader_where_one_listens(places: Places) -> None:
    weights = FakeWeights()
    part = WorkerPart(weights, places, lambda: None)
    part.quiesce()
    assert part.resume()["weights"] == "by_loader=0 none"
    places.loader.touch()
    assert part.resume()["weights"] == "by_loader=1"
    assert [argument for call, argument in weights.calls if call == "resume"] == [None, places.loader]


def test_two_clones_of_a_worker_draw_different_numbers(places: Places) -> None:
    drawn = set()
    for _ in range(2):
        random.seed(7)  # as both come out of one image
        WorkerPart(FakeWeights(), places, lambda: None).resume()
        drawn.add(random.random())
    assert len(drawn) == 2


@pytest.mark.parametrize("refill", ["post_kv_cache_wake_up", "init_fp8_kv_scales"])
def test_vllm_refills_what_lay_beside_the_cache(places: Places, refill: str) -> None:
    called: list[str] = []
    worker = SnapshotWorker()
    worker.model_runner = SimpleNamespace(**{refill: lambda: called.append(refill)})
    worker._snapshot_part = WorkerPart(FakeWeights(), places, lambda: None)
    worker.snapshot_resume()
    assert called == [refill]
    assert worker.snapshot_evidence()["weights"] == "by_loader=0 none"


def test_places_are_the_environment_s(tmp_path: Path) -> None:
    found = Places.of({SEGMENTS_ENV: "/segments", STATE_DIR_ENV: str(tmp_path)})
    assert (found.store.folder, found.control) == (Path("/segments"), tmp_path)
    with pytest.raises(HookError, match=SEGMENTS_ENV) as refused:
        Places.of({})
    assert refused.value.reason is HookReason.QUIESCE_FAILED


@dataclass
class FakeLLM:
    """As ``vllm.LLM``: answers with the world's tokens, and not while it sleeps."""

    world: GpuWorld = field(default_factory=GpuWorld)

    def generate(self, prompts: Any, sampling_params: Any, *, use_tqdm: bool) -> list[Any]:
        assert not use_tqdm
        assert len(prompts) == 1
        assert prompts[0]["prompt_token_ids"]
        assert sampling_params["temperature"] == 0
        return [SimpleNamespace(outputs=[SimpleNamespace(token_ids=self.world.generate(), cumulative_logprob=-1.5)])]

    def sleep(self, level: int = 1) -> None:
        self.world.give_up("kv_cache", "weights")

    def wake_up(self) -> None:
        self.world.take_back("weights", "kv_cache")

    def collective_rpc(self, method: str) -> list[Any]:
        assert method == "snapshot_evidence"
        return [{"weights": "by_loader=1"}]


@pytest.fixture
def llm(monkeypatch: pytest.MonkeyPatch) -> FakeLLM:
    put_modules(monkeypatch, {"vllm": {"SamplingParams": lambda **options: options}})
    return FakeLLM()


class TestConformance(EngineConformance):
    @pytest.fixture
    def world(self, llm: FakeLLM) -> GpuWorld:
        return llm.world

    @pytest.fixture
    def engine(self, llm: FakeLLM, evidence: dict[str, str]) -> VllmEngine:
        return VllmEngine(llm, evidence)


def test_an_engine_answers_after_a_capture_as_before_it(llm: FakeLLM) -> None:
    evidence: dict[str, str] = {}
    engine = VllmEngine(llm, evidence)
    engine.quiesce()
    engine.resume()
    engine.self_test()
    assert (evidence["answer"], evidence["answer_logprob"], evidence["weights"]) == ("5 6 7", "-1.5", "by_loader=1")


class Client:
    """As vLLM's ``AsyncLLM``, with the worker of its engine core at hand."""

    def __init__(self) -> None:
        self.asked: list[Any] = []
        self.worker = SnapshotWorker()

    async def generate(self, prompt: Any, sampling_params: Any, request_id: str) -> Any:
        self.asked.append((prompt["cache_salt"], request_id))
        assert sampling_params["temperature"] == 0
        for count in (1, 2):
            yield SimpleNamespace(outputs=[SimpleNamespace(token_ids=[5, 6][:count])])

    async def collective_rpc(self, method: str, *, args: tuple[Any, ...] = ()) -> list[Any]:
        return [getattr(self.worker, method)(*args)]


HANDED_OVER: dict[str, Callable[[Client, Any], Any]] = {
    "1.4.2": lambda client, config: (client, config, None, None, None),
    "1.6.1": lambda client, config: ((client, config, None, None, None), None),
}


@pytest.fixture(params=HANDED_OVER)
def handed_over(request: pytest.FixtureRequest) -> Callable[[Client, Any], Any]:
    return HANDED_OVER[request.param]


async def test_dynamo_s_engine_is_asked_the_same_past_any_cached_prefix(
    llm: FakeLLM, handed_over: Callable[[Client, Any], Any]
) -> None:
    client = Client()
    engine = handed_over(client, None)
    assert [await adapter.answer(engine) for _ in range(2)] == [[5, 6], [5, 6]]
    assert len(set(client.asked)) == 2


class FakeMetrics:
    def __init__(self, port: int | None) -> None:
        self.port = port
        self.called: list[str] = []

    def close(self) -> None:
        self.called.append("close")

    def reopen(self) -> int | None:
        self.called.append("reopen")
        return self.port

    def speak_as(self, worker_id: str) -> None:
        self.called.append(f"speak as {worker_id}")


@pytest.fixture
def config(executor_class: type[Any], monkeypatch: pytest.MonkeyPatch) -> Any:
    """vLLM's configuration with our executor."""
    executors = {"Executor": SimpleNamespace(get_class=lambda config: config.executor)}
    put_modules(monkeypatch, {"vllm.v1.executor.abstract": executors})
    return SimpleNamespace(executor=executor_class)


@pytest.mark.parametrize(("port", "named"), [(30123, "30123"), (None, "20380")])
async def test_dynamo_hears_where_the_engine_s_metrics_are_and_the_engine_whose_they_are(
    config: Any, handed_over: Callable[[Client, Any], Any], port: int | None, named: str
) -> None:
    client, metrics = Client(), FakeMetrics(port)
    client.worker.snapshot_metrics(cast(Any, metrics))
    engine, environ = handed_over(client, config), {PORT_ENV: "20380"}
    await adapter.before_pause(engine)
    await adapter.after_release(engine, environ)
    assert environ[PORT_ENV] == named
    assert await adapter.identified(engine, 17) == {}
    assert metrics.called == ["close", "reopen", "speak as 17"]
    client.worker._snapshot_evidence = {"weights": "by_loader=1"}
    assert await adapter.identified(engine, 17) == {"weights": "by_loader=1"}


async def test_an_executor_of_another_class_is_told_nothing(
    config: Any, handed_over: Callable[[Client, Any], Any]
) -> None:
    engine = handed_over(Client(), SimpleNamespace(executor=FakeUniProcExecutor))
    await adapter.before_pause(engine)
    await adapter.after_release(engine, {})
    assert await adapter.identified(engine, 17) == {}


def test_the_environment_of_a_worker_that_is_to_be_captured() -> None:
    environ = {"VLLM_HOST_IP": "10.0.0.1"}
    adapter.set_environment(environ)
    assert environ["VLLM_HOST_IP"] == "10.0.0.1"
    assert environ["VLLM_ENABLE_V1_MULTIPROCESSING"] == "1"


def test_the_environment_keeps_what_is_set() -> None:
    environ = {"VLLM_HOST_IP": "10.0.0.1"}
    adapter.set_environment(environ)
    assert environ["VLLM_HOST_IP"] == "10.0.0.1"
    assert environ["VLLM_WORKER_MULTIPROC_METHOD"] == "spawn"
    assert "VLLM_WORKER_MULTIPROC_METHOD" not in os.environ
