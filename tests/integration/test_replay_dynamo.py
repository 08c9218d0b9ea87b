"""The load generator against a real frontend and real mocker workers, one of which is killed."""

from __future__ import annotations

import asyncio
import sys
import urllib.request
import uuid
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from subprocess import DEVNULL, Popen
from typing import BinaryIO

import pytest
from support.dynamo_world import environment, frontend_command, inherited, instances, models

from dynamo_snapshot.replay.chat import Endpoint
from dynamo_snapshot.replay.load import LoadGenerator
from dynamo_snapshot.replay.migrations import migration_total, migrations
from dynamo_snapshot.replay.pin import pinned_requests
from dynamo_snapshot.replay.trace import TraceRequest


class Deployment:
    """A frontend with migration and two slow workers; ``workers`` by instance id."""

    def __init__(self, url: str, log: Path, model: str, workers: dict[int, Popen[bytes]]) -> None:
        self.url = url
        self.log = log
        self.model = model
        self.workers = workers

    @property
    def endpoint(self) -> Endpoint:
        return Endpoint(self.url, self.model)

    def migration_count(self) -> int:
        with urllib.request.urlopen(f"{self.url}/metrics", timeout=10) as answer:
            return migration_total(answer.read().decode())


@pytest.fixture
def deployment(
    tmp_path: Path, etcd_url: str, nats_url: str, tiny_model: Path, free_port: Callable[[], int]
) -> Iterator[Deployment]:
    namespace = f"replay-{uuid.uuid4().hex[:8]}"
    variables = environment(etcd_url, nats_url, namespace)
    port, log = free_port(), tmp_path / "frontend.log"
    frontend = [*frontend_command(sys.executable, port, variables), "--migration-limit", "3", "--namespace", namespace]
    command = [sys.executable, "-m", "dynamo.mocker", "--model-path", str(tiny_model), "--model-name", namespace]
    command += ["--endpoint", f"dyn://{namespace}.backend.generate", "--speedup-ratio", "0.2"]
    workers: dict[int, Popen[bytes]] = {}
    with ExitStack() as stack, (tmp_path / "workers.log").open("ab") as output:

        def start(command: list[str], output: BinaryIO) -> Popen[bytes]:
            process = Popen(command, env={**inherited(), **variables}, stdin=DEVNULL, stdout=output, stderr=output)
            stack.callback(process.wait)
            stack.callback(process.kill)
            return process

        start(frontend, stack.enter_context(log.open("ab")))
        for _ in range(2):
            worker = start(command, output)
            found = asyncio.run(_new_instance(etcd_url, namespace, set(workers)))
            workers[found] = worker
        asyncio.run(_until(lambda: _knows(f"http://127.0.0.1:{port}", namespace)))
        yield Deployment(f"http://127.0.0.1:{port}", log, namespace, workers)


async def _new_instance(etcd_url: str, namespace: str, known: set[int]) -> int:
    await _until(lambda: bool(set(instances(etcd_url, namespace)) - known))
    return (set(instances(etcd_url, namespace)) - known).pop()


def _knows(url: str, model: str) -> bool:
    try:
        return model in models(url)
    except OSError:  # it does not listen yet
        return False


async def _until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(30):
        while True:
            if condition():
                return
            await asyncio.sleep(0.05)


async def test_a_killed_worker_costs_no_request_and_only_its_own_migrate(deployment: Deployment) -> None:
    # 30 requests over 1.5 s, each some 1.5 s long: the kill hits several in flight.
    generator = LoadGenerator([TraceRequest(index * 0.05, 16, 50) for index in range(30)], deployment.endpoint)
    run = asyncio.create_task(generator.run())
    await asyncio.sleep(1.0)
    killed, victim = next(iter(deployment.workers.items()))
    victim.kill()
    summary = await run
    assert (summary.sent, summary.failed, summary.errors) == (30, 0, {})
    assert summary.tokens == 30 * 50
    assert set(summary.by_worker) <= {str(instance) for instance in deployment.workers}

    moved = migrations(deployment.log)
    assert moved
    assert {migration.from_worker for migration in moved} == {killed}
    assert deployment.migration_count() == len(moved)
    by_id = {record.id: record for record in generator.records}
    assert all(migration.request_id in by_id for migration in moved)


async def test_each_instance_answers_what_is_pinned_to_it(deployment: Deployment) -> None:
    for instance in deployment.workers:
        result = await pinned_requests(deployment.endpoint, instance, 20)
        assert (result.succeeded, result.errors) == (20, ())
    assert deployment.migration_count() == 0


async def test_a_pinned_request_does_not_move_when_its_instance_dies(deployment: Deployment) -> None:
    instance, victim = next(iter(deployment.workers.items()))
    pinned = asyncio.create_task(pinned_requests(deployment.endpoint, instance, 3, output_tokens=80))
    await asyncio.sleep(1.0)
    victim.kill()
    result = await pinned
    assert result.succeeded == 0
    assert len(result.errors) == 3
    assert deployment.migration_count() == 0
