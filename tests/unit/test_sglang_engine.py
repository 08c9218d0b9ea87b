"""SGLang's adapter and plugin against stand-ins of SGLang's calls, memory saver and plugin registry."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from support.engine_conformance import EngineConformance, GpuWorld, put_modules
from support.torch_saver import FakeSaver

from worker_hooks.engines import sglang as adapter
from worker_hooks.engines.sglang import KV_CACHE, MESSAGES, SchedulerPart, SglangEngine
from worker_hooks.engines.worker_part import Places
from worker_hooks.reasons import HookError, HookReason
from worker_hooks.weights.arena import Attached
from worker_hooks.weights.host_memory import GRANULARITY, HostMemory
from worker_hooks.weights.memory_saver import WEIGHTS, SaverWeights
from worker_hooks.weights.segment import SEGMENTS_ENV, SEGMENTS_FILE, Segment, SegmentStore, decode_segments

ALL_TAGS = [KV_CACHE, WEIGHTS, "cuda_graph"]


@dataclass
class Message:
    """A request or an answer between SGLang's processes."""

    tags: list[str] | None = None


class WatchedWeights(SaverWeights):
    """Tells the world of what it does."""

    world: GpuWorld

    def quiesce(self, store: SegmentStore) -> list[Segment]:
        segments = super().quiesce(store)
        self.world.give_up(WEIGHTS)
        return segments

    def resume(self, store: SegmentStore, loader: Path | None = None, timeout_s: float = 60) -> Attached:
        self.world.take_back(WEIGHTS)
        return super().resume(store, loader, timeout_s)


@dataclass
class FakeUpdater:
    """As SGLang's ``SchedulerWeightUpdaterManager``: no tags are all tags, and each is released once."""

    saver: Any
    world: GpuWorld
    offload_tags: set[str] = field(default_factory=set)

    def release_memory_occupation(self, recv_req: Message) -> Message:
        assert not self.world.open_requests, "released while requests may come"
        for tag in recv_req.tags or ALL_TAGS:
            assert tag != WEIGHTS, "SGLang's own release of weights loses them"
            self.offload_tags.add(tag)
            if tag == KV_CACHE:
                self.world.give_up(tag)
            self.saver.pause(tag)
        return Message()

    def resume_memory_occupation(self, recv_req: Message) -> Message:
        for tag in recv_req.tags or ALL_TAGS:
            self.offload_tags.remove(tag)
            if tag == KV_CACHE:
                self.world.take_back(tag)
            self.saver.resume(tag)
        return Message()


@dataclass
class FakeManager:
    """As SGLang's ``TokenizerManager``: its messages reach the scheduler's updater, which the plugin has wrapped."""

    world: GpuWorld
    release: Callable[[Message], Message]
    resume: Callable[[Message], Message]

    async def pause_generation(self, obj: Any) -> None:
        self.world.open_requests = False

    async def continue_generation(self, obj: Any) -> None:
        self.world.open_requests = True

    async def release_memory_occupation(self, obj: Message, request: None) -> None:
        self.release(obj)

    async def resume_memory_occupation(self, obj: Message, request: None) -> None:
        self.resume(obj)


class FakeEngine:
    def __init__(self, world: GpuWorld, manager: FakeManager) -> None:
        self.world, self.tokenizer_manager = world, manager

    async def async_generate(self, *, input_ids: list[int], sampling_params: dict[str, Any]) -> dict[str, Any]:
        assert input_ids
        assert sampling_params["temperature"] == 0
        return {"text": "", "output_ids": self.world.generate()}


@dataclass
class Scheduler:
    """The scheduler process with the plugin in it, and a model loaded."""

    world: GpuWorld
    memory: HostMemory
    saver: FakeSaver
    part: SchedulerPart
    updater: FakeUpdater
    places: Places
    weights: WatchedWeights

    def release(self, request: Message) -> Message:
        answered: Message = self.part.release(FakeUpdater.release_memory_occupation, self.updater, request)
        return answered

    def resume(self, request: Message) -> Message:
        answered: Message = self.part.resume(FakeUpdater.resume_memory_occupation, self.updater, request)
        return answered


@pytest.fixture
def world() -> GpuWorld:
    return GpuWorld()


@pytest.fixture
def make(world: GpuWorld, tmp_path: Path) -> Callable[..., Scheduler]:
    def make(ranks: int = 1, load: bool = True) -> Scheduler:
        memory = HostMemory()
        saver = FakeSaver(memory)
        (tmp_path / "listed").mkdir()
        places = Places(SegmentStore(tmp_path / "segments"), tmp_path / "weights.sock", tmp_path / "listed")
        weights = WatchedWeights(lambda: memory, saver.memory_snapshot, lambda: saver.pause(WEIGHTS))
        weights.world = world
        messages = SimpleNamespace(ReleaseMemoryOccupationReqOutput=Message, ResumeMemoryOccupationReqOutput=Message)
        part = SchedulerPart(lambda: weights, ALL_TAGS, messages, places, lambda: ranks, lambda: None)
        recording = part.create_saver(lambda enable: saver, enable=True)
        if load:
            with recording.region(WEIGHTS, enable_cpu_backup=True):
                saver.malloc(GRANULARITY)
                saver.malloc(3 * GRANULARITY)
                saver.malloc_by_another_thread(GRANULARITY)
        with recording.region(KV_CACHE):
            saver.malloc(2 * GRANULARITY)
        return Scheduler(world, memory, saver, part, FakeUpdater(recording, world), places, weights)

    return make


@pytest.fixture(autouse=True)
def _messages(monkeypatch: pytest.MonkeyPatch) -> None:
    names = ("PauseGeneration", "ContinueGeneration", "ReleaseMemoryOccupation", "ResumeMemoryOccupation")
    put_modules(monkeypatch, {MESSAGES: {f"{name}ReqInput": Message for name in names}})


class TestConformance(EngineConformance):
    @pytest.fixture
    def engine(self, world: GpuWorld, make: Callable[..., Scheduler], evidence: dict[str, str]) -> SglangEngine:
        scheduler = make()
        manager = FakeManager(world, scheduler.release, scheduler.resume)
        return SglangEngine(FakeEngine(world, manager), evidence)


class TestWithoutThePlugin(EngineConformance):
    LEFT_ON_THE_GPU = frozenset({WEIGHTS})

    @pytest.fixture
    def engine(self, world: GpuWorld, evidence: dict[str, str]) -> SglangEngine:
        updater = FakeUpdater(SimpleNamespace(pause=lambda tag: None, resume=lambda tag: None), world)
        manager = FakeManager(world, updater.release_memory_occupation, updater.resume_memory_occupation)
        return SglangEngine(FakeEngine(world, manager), evidence)


@pytest.fixture
def scheduler(make: Callable[..., Scheduler], world: GpuWorld) -> Scheduler:
    world.open_requests = False
    return make()


@pytest.mark.parametrize("tags", [[KV_CACHE], None, [WEIGHTS, KV_CACHE], [WEIGHTS]], ids=str)
def test_whoever_releases_whatever_the_weights_are_kept_and_listed(
    scheduler: Scheduler, tags: list[str] | None
) -> None:
    before = [scheduler.saver.content(address) for address in scheduler.saver.tagged(WEIGHTS)]
    scheduler.release(Message(tags))
    assert not scheduler.world.there & {WEIGHTS}
    assert scheduler.places.control is not None
    listed = decode_segments((scheduler.places.control / SEGMENTS_FILE).read_bytes())
    assert [segment.address for segment in listed] == sorted(scheduler.saver.tagged(WEIGHTS))
    assert sorted(segment.size for segment in listed) == [GRANULARITY, 3 * GRANULARITY]
    assert {segment.tag for segment in listed} == {WEIGHTS}
    scheduler.resume(Message(tags))
    assert [scheduler.saver.content(address) for address in scheduler.saver.tagged(WEIGHTS)] == before
    assert scheduler.world.there == {WEIGHTS, KV_CACHE}


def test_a_second_release_keeps_what_the_weights_are_by_then(scheduler: Scheduler) -> None:
    full = scheduler.memory.free_bytes()
    scheduler.release(Message([KV_CACHE]))
    scheduler.resume(Message([KV_CACHE]))
    (first, _) = scheduler.saver.tagged(WEIGHTS)
    scheduler.saver.fill(first)
    before = scheduler.saver.content(first)
    scheduler.release(Message([KV_CACHE]))
    scheduler.resume(Message([KV_CACHE]))
    assert scheduler.saver.content(first) == before
    assert scheduler.memory.free_bytes() == full


def test_weights_have_no_copy_on_the_host(scheduler: Scheduler) -> None:
    assert scheduler.saver.backed_up == set()


def _full(*arguments: object) -> None:
    raise OSError(28, "No space left on device")


@pytest.mark.parametrize("why", ["a full store", "two ranks", "no region"])
def test_what_cannot_be_kept_stays_on_the_gpu(
    make: Callable[..., Scheduler], world: GpuWorld, why: str, monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    world.open_requests = False
    scheduler = make(ranks=2 if why == "two ranks" else 1, load=why != "no region")
    if why == "a full store":
        monkeypatch.setattr(SegmentStore, "writing", _full)
    with caplog.at_level(logging.WARNING):
        scheduler.release(Message([KV_CACHE]))
    assert "the weights stay on the GPU" in caplog.text
    assert world.there == {WEIGHTS}
    scheduler.resume(Message([KV_CACHE]))
    assert world.there == {WEIGHTS, KV_CACHE}


def test_weights_that_are_away_but_not_listed_fail_the_release(
    scheduler: Scheduler, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Path, "write_bytes", _full)
    with pytest.raises(OSError, match="No space left"):
        scheduler.release(Message([KV_CACHE]))


def test_a_saver_that_is_off_is_left_alone(make: Callable[..., Scheduler]) -> None:
    off = object()
    assert make().part.create_saver(lambda enable: off, enable=False) is off


@dataclass
class Registry:
    registered: dict[str, Any] = field(default_factory=dict)

    def register(self, target: str, hook: Any, hook_type: str) -> None:
        assert hook_type == "around"
        self.registered[target] = hook


@pytest.fixture
def registry(monkeypatch: pytest.MonkeyPatch) -> Registry:
    made = Registry()
    put_modules(
        monkeypatch,
        {
            "sglang.srt.plugins.hook_registry": {"HookRegistry": made, "HookType": SimpleNamespace(AROUND="around")},
            "sglang.srt.constants": {"GPU_MEMORY_ALL_TYPES": ALL_TAGS},
            MESSAGES: {"ReleaseMemoryOccupationReqOutput": Message, "ResumeMemoryOccupationReqOutput": Message},
            adapter.UPDATER: {"SchedulerWeightUpdaterManager": FakeUpdater},
            adapter.ADAPTER: {"TorchMemorySaverAdapter": SimpleNamespace(create=None)},
            adapter.PARALLEL: {"init_distributed_environment": None},
        },
    )
    return made


def test_the_plugin_hooks_what_it_knows_and_only_where_a_store_is_named(
    registry: Registry, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv(SEGMENTS_ENV, raising=False)
    adapter.plugin()
    assert registry.registered == {}
    monkeypatch.setenv(SEGMENTS_ENV, str(tmp_path))
    adapter.plugin()
    assert {target.rpartition(".")[2] for target in registry.registered} == {
        "create", "release_memory_occupation", "resume_memory_occupation", "init_distributed_environment",
    }  # fmt: skip


def test_the_plugin_names_what_another_sglang_lacks(
    registry: Registry, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv(SEGMENTS_ENV, str(tmp_path))
    put_modules(monkeypatch, {adapter.ADAPTER: {"TorchMemorySaverAdapter": object()}})
    with pytest.raises(HookError, match=r"TorchMemorySaverAdapter\.create") as refused:
        adapter.plugin()
    assert refused.value.reason is HookReason.SYMBOLS_MISSING
    assert registry.registered == {}


@contextlib.contextmanager
def _removed_afterwards(pattern: str) -> Iterator[None]:
    before = set(Path("/dev/shm").glob(pattern))
    yield
    for made in set(Path("/dev/shm").glob(pattern)) - before:
        made.rmdir()


def test_one_rank_meets_itself_at_a_file_and_several_as_they_were_told() -> None:
    met: list[str] = []

    def init(world_size: int = -1, rank: int = -1, distributed_init_method: str = "env://", backend: str = "") -> None:
        met.append(distributed_init_method)

    with _removed_afterwards("sglang-*"):
        adapter.meet_at_a_file(init, backend="nccl", world_size=1, rank=0, distributed_init_method="tcp://127.0.0.1:1")
        adapter.meet_at_a_file(init, 2, 0, "tcp://127.0.0.1:1")
        assert Path(met[0].removeprefix("file://")).parent.is_dir()
    assert met[0].startswith("file:///dev/shm/sglang-")
    assert met[1] == "tcp://127.0.0.1:1"
