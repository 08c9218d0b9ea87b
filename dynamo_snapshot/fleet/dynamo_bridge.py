"""A process of its own for Dynamo's runtime: the planner's decisions and the workers' loads as JSON lines.

Dynamo's runtime cannot be torn down, and once etcd was away for longer than its lease it answers
nothing for ever. So it lives here, and this process ends as soon as the runtime goes deaf; the
controller starts another one. It also ends when its standard input does.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
import time
from typing import Any, TypeAlias

import msgspec

from dynamo_snapshot.fleet.bridge_messages import Alive, Complete, Decided, FromChild, Loads
from dynamo_snapshot.model import WorkerLoad

ALIVE_S = 1.0
"""Between two questions to the runtime whether it still answers."""
LOADS_S = 0.25
DEAF_S = 5.0
"""A runtime that does not answer for so long is deaf."""

Content: TypeAlias = tuple[int, int | None, int | None]
"""A decision's id, and how many prefill and decode workers it wants."""


class Output:
    """The controller's end of the pipe, kept apart from standard output, on which libraries may write."""

    def __init__(self) -> None:
        self._descriptor = os.dup(sys.stdout.fileno())
        os.dup2(sys.stderr.fileno(), sys.stdout.fileno())

    def write(self, message: FromChild) -> None:
        line = msgspec.json.encode(message) + b"\n"
        while line:
            line = line[os.write(self._descriptor, line) :]


class Decisions:
    """Hands on each decision that is not acknowledged, and acknowledges those that the controller took."""

    def __init__(self, client: Any, output: Output) -> None:
        self._client = client
        self._output = output
        self._open: dict[int, Any] = {}
        self._acknowledged = asyncio.Event()
        self._handed: Content | None = None
        self._looked: Content | None = None

    async def run(self) -> None:
        while True:
            await self._client.wait()
            decision = await self._client.get()
            if decision.decision_id not in self._open:
                self._hand_on(decision)
            # wait() returns at once while a decision is open; the planner may also replace it meanwhile.
            try:
                async with asyncio.timeout(ALIVE_S):
                    await self._acknowledged.wait()
            except TimeoutError:
                continue

    async def complete(self, decision_id: int) -> None:
        decision = self._open.pop(decision_id, None)
        if decision is not None:
            await self._client.complete(decision)
        self._acknowledged.set()

    async def watch_over(self) -> None:
        """Says that the runtime answers; raises TimeoutError, or the runtime's own error, when it does not."""
        while True:
            async with asyncio.timeout(DEAF_S):
                decision = await self._client.get()
            self._output.write(Alive())
            self._look(decision)
            await asyncio.sleep(ALIVE_S)

    def _look(self, decision: Any) -> None:
        """Hands on what ``wait`` keeps back: ids at or below the last acknowledged one.

        A planner that was restarted counts from 0 again, and would not be heard until it has decided as
        often as the one before it. Two looks must agree: the planner writes number after number.
        """
        content = content_of(decision)
        if decision.decision_id >= 0 and content == self._looked and content != self._handed:
            self._hand_on(decision)
        self._looked = content

    def _hand_on(self, decision: Any) -> None:
        self._acknowledged.clear()
        self._open = {decision.decision_id: decision}
        self._handed = content_of(decision)
        number, prefill, decode = self._handed
        self._output.write(Decided(id=number, prefill=prefill, decode=decode))


def content_of(decision: Any) -> Content:
    return decision.decision_id, known(decision.num_prefill_workers), known(decision.num_decode_workers)


def known(number: int) -> int | None:
    """Dynamo writes -1 for a number that it does not set."""
    return None if number < 0 else number


class LoadReader:
    """Turns forward-pass metrics into one load a worker."""

    def __init__(self) -> None:
        self._seen: dict[tuple[str, int], tuple[bytes, float]] = {}

    def read(self, stats: dict[tuple[str, int], bytes], now: float) -> dict[str, WorkerLoad]:
        """Returns the loads by instance id; ``stats`` is by (worker id, data-parallel rank).

        A message is as old as its first sight: workers repeat theirs, with a new counter, when idle.
        """
        from dynamo.common.forward_pass_metrics import decode

        loads: dict[str, WorkerLoad] = {}
        current = {}
        for key, data in stats.items():
            before = self._seen.get(key)
            at = before[1] if before is not None and before[0] == data else now
            current[key] = (data, at)
            metrics = decode(data)
            if metrics is None or not key[0]:
                continue
            scheduled, queued = metrics.scheduled_requests, metrics.queued_requests
            rest = loads.get(key[0], WorkerLoad(running=0, queued=0, at=at))
            loads[key[0]] = WorkerLoad(
                running=rest.running + scheduled.num_prefill_requests + scheduled.num_decode_requests,
                queued=rest.queued + queued.num_prefill_requests + queued.num_decode_requests,
                at=min(rest.at, at),
            )
        self._seen = current
        return loads


async def send_loads(subscribers: list[Any], output: Output) -> None:
    """Hands on the loads of all endpoints, several times a second."""
    readers = [LoadReader() for _ in subscribers]
    while True:
        loads: dict[str, WorkerLoad] = {}
        for subscriber, reader in zip(subscribers, readers, strict=True):
            loads |= reader.read(subscriber.get_recent_stats(), time.time())
        output.write(Loads(loads=loads))
        await asyncio.sleep(LOADS_S)


async def obey(decisions: Decisions) -> None:
    """Reads what the controller says, until it says no more."""
    reader = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    while line := await reader.readline():
        async with asyncio.timeout(DEAF_S):
            await decisions.complete(msgspec.json.decode(line, type=Complete).id)


async def run(namespace: str, endpoints: list[str], output: Output) -> None:
    """Runs until the first of its tasks ends, or fails."""
    from dynamo._core import VirtualConnectorClient
    from dynamo.llm import FpmEventSubscriber
    from dynamo.runtime import DistributedRuntime

    runtime = DistributedRuntime(
        asyncio.get_running_loop(),
        os.environ.get("DYN_DISCOVERY_BACKEND", "etcd"),
        os.environ.get("DYN_REQUEST_PLANE", "tcp"),
        event_plane=os.environ.get("DYN_EVENT_PLANE", "nats"),
    )
    decisions = Decisions(VirtualConnectorClient(runtime, namespace), output)
    subscribers = [FpmEventSubscriber(runtime.endpoint(endpoint)) for endpoint in endpoints]
    for subscriber in subscribers:
        subscriber.start_tracking()
    work = (decisions.run(), decisions.watch_over(), send_loads(subscribers, output), obey(decisions))
    tasks = [asyncio.create_task(part) for part in work]
    done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    for task in done:
        task.result()


def main() -> None:
    """The process; exits 0 when the controller closed its end, 1 when the runtime fails or goes deaf."""
    parser = argparse.ArgumentParser(prog="dynamo_bridge", description=__doc__)
    parser.add_argument("--namespace", required=True)
    parser.add_argument("--endpoint", action="append", default=[], help="NAMESPACE.COMPONENT.ENDPOINT, repeatable")
    arguments = parser.parse_args()
    status = 0
    try:
        asyncio.run(run(arguments.namespace, arguments.endpoint, Output()))
    except Exception as error:  # whatever it was, the controller starts another process
        print(f"dynamo bridge: {type(error).__name__}: {error}", file=sys.stderr, flush=True)
        status = 1
    # Dynamo's runtime threads would hold an ordinary exit up.
    os._exit(status)


if __name__ == "__main__":
    main()
