"""Dynamo without its workers: etcd, NATS, the frontend, and an ear for the workers' forward-pass metrics."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import subprocess
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
from support.dynamo_world import LOOPBACK, instances, models

from dynamo_snapshot.discovery.etcd import EtcdDiscovery
from dynamo_snapshot.local.ports import free_port
from dynamo_snapshot.local.servers import embedded_etcd, embedded_nats
from dynamo_snapshot.local.service import Service, http_ok
from dynamo_snapshot.replay.chat import WORKER_HEADER, Endpoint, ask, client_session
from dynamo_snapshot.replay.pin import pinned_requests

MODEL = "model"
NAMESPACE = "bench"
ENDPOINT = f"{NAMESPACE}.backend.generate"
ROUTER = ("--router-mode", "kv", "--no-router-kv-events")
"""Dynamo 1.4.2 pins requests in this mode only."""
ANSWER_S, SOON_S = 120.0, 30.0
PINNED = 20
PROMPTS = ("a captured worker", "answers as it did", "before it was frozen")
GREEDY_TOKENS = 16


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
    frontend: str
    variables: dict[str, str]
    """A worker's, so that it finds the others."""
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
        while time.time() - began < ANSWER_S:
            answer = await ask(self.session, self.endpoint, PROMPTS[0], GREEDY_TOKENS, clock=time.time)
            if answer.error is None and answer.first_token_at is not None and answer.last_token_at is not None:
                return {
                    "first_token_s": answer.first_token_at - began,
                    "first_answer_s": answer.last_token_at - began,
                    "refused_before": refused,
                }
            refused += 1
            await asyncio.sleep(0.005)
        raise TimeoutError(f"no answer within {ANSWER_S:g} s")

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
        """Takes a killed worker out of discovery, as a fleet does once it is told of the exit."""
        await EtcdDiscovery(self.etcd, NAMESPACE).revoke(instance)
        await self.forgotten(instance)

    async def forgotten(self, instance: int) -> None:
        """Returns once neither discovery's instances nor, if it was the last, the frontend's list has it."""

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
        world = World(etcd.url, url, variables, session)
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

    try:
        async with asyncio.timeout(60):
            assert await process.stdout.readline(), f"no metrics can be heard: {folder / 'metrics.log'}"
        hearing = asyncio.create_task(hear(process.stdout))
        try:
            yield
        finally:
            hearing.cancel()
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()
