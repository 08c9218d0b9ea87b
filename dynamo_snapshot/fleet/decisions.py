"""The controller's side of its Dynamo child: started, restarted, listened to, and never waited for."""

from __future__ import annotations

import asyncio
import contextlib
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

import aetcd
import msgspec
import structlog

from dynamo_snapshot.backoff import Backoff
from dynamo_snapshot.discovery.client import connected, etcd_errors
from dynamo_snapshot.errors import SnapshotError
from dynamo_snapshot.fleet.bridge_messages import Alive, Complete, Decided, FromChild, Loads
from dynamo_snapshot.model import Decision, WorkerLoad

log = structlog.get_logger()

SILENT_S = 15.0
"""A child that says nothing for so long hangs, and is ended. Dynamo may take some seconds to connect."""
LINE_LIMIT = 1 << 20
_CHILD = (sys.executable, "-m", "dynamo_snapshot.fleet.dynamo_bridge")

OnDecision = Callable[[Decision], None]
OnLoads = Callable[[dict[int, WorkerLoad]], None]


class Planner(Protocol):
    """Where decisions and loads come from."""

    async def run(self, on_decision: OnDecision, on_loads: OnLoads) -> None:
        """Listens until it is cancelled; a decision that was not completed may come again."""

    def complete(self, decision: Decision) -> None:
        """Acknowledges a decision. Never raises and never waits."""


class DynamoPlanner:
    """Dynamo's planner, through its virtual connector.

    Args:
        etcd_url: where the planner's keys are.
        namespace: Dynamo's.
        endpoints: ``NAMESPACE.COMPONENT.ENDPOINT`` of the pools whose loads are wanted.
        environment: the child's, where Dynamo finds its servers; None: this process's.
        command: the child to run, for tests.
    """

    def __init__(
        self,
        etcd_url: str,
        namespace: str,
        endpoints: Sequence[str],
        environment: Mapping[str, str] | None = None,
        command: Sequence[str] = _CHILD,
    ) -> None:
        self._etcd_url = etcd_url
        self._key = f"v1/{namespace}/planner/decision_id".encode()
        flags = [word for endpoint in endpoints for word in ("--endpoint", endpoint)]
        self._command = [*command, "--namespace", namespace, *flags]
        self._environment = environment
        self._child: Process | None = None
        self._revision = 0
        self._last: int | None = None

    async def run(self, on_decision: OnDecision, on_loads: OnLoads) -> None:
        backoff = Backoff(first_s=0.5, limit_s=5.0)
        async with connected(self._etcd_url) as client:
            while True:
                try:
                    await self._live(client, backoff, on_decision, on_loads)
                except OSError as error:
                    log.warning("bridge_not_started", cause=str(error))
                delay = backoff.next()
                log.info("bridge_restarts", in_s=round(delay, 2))
                await asyncio.sleep(delay)

    def complete(self, decision: Decision) -> None:
        child = self._child
        if child is None or child.stdin is None or child.stdin.is_closing():
            return  # the next child is given the decision again, and it is completed then
        with contextlib.suppress(OSError, RuntimeError):
            child.stdin.write(msgspec.json.encode(Complete(id=decision.id)) + b"\n")

    async def _live(self, client: aetcd.Client, backoff: Backoff, on_decision: OnDecision, on_loads: OnLoads) -> None:
        """One life of the child."""
        child = await asyncio.create_subprocess_exec(
            *self._command, stdin=PIPE, stdout=PIPE, env=self._environment, limit=LINE_LIMIT
        )
        self._child = child
        assert child.stdout is not None
        try:
            while True:
                try:
                    async with asyncio.timeout(SILENT_S):
                        line = await child.stdout.readline()
                except TimeoutError:
                    log.warning("bridge_hangs", silent_s=SILENT_S)
                    return
                if not line:
                    log.warning("bridge_ended", status=await child.wait())
                    return
                match msgspec.json.decode(line, type=FromChild):
                    case Alive():
                        backoff.reset()
                    case Loads(loads=loads):
                        on_loads({int(instance): load for instance, load in loads.items() if instance.isdecimal()})
                    case Decided() as decided:
                        decision = await self._identified(client, decided)
                        if decision is None:
                            return  # the next child is given it again
                        on_decision(decision)
        except (msgspec.DecodeError, ValueError) as error:
            log.warning("bridge_talks_nonsense", cause=str(error))
        finally:
            self._child = None
            ending = asyncio.create_task(_end(child), name="bridge-end")
            try:
                await asyncio.shield(ending)
            finally:
                await asyncio.wait({ending})  # a keeper that is cancelled meanwhile leaves no child behind either

    async def _identified(self, client: aetcd.Client, decided: Decided) -> Decision | None:
        """Ids begin anew with each planner; with the revision in which its key was made they do not repeat.

        An id that is higher than the last one was not seen before, whoever gave it: only the others
        cost the way to etcd, which would otherwise be a good part of the time from decision to order.
        None: nobody can tell now whether it repeats the last one or is another planner's.
        """
        if self._last is None or decided.id <= self._last:
            try:
                with etcd_errors(self._etcd_url, "read the planner's decision key"):
                    key = await client.get(self._key)
                if key is not None:
                    self._revision = key.create_revision
            except SnapshotError as error:
                log.warning("decision_revision_unknown", cause=str(error))
                if self._last is not None:
                    return None
        self._last = decided.id
        return Decision(revision=self._revision, id=decided.id, prefill=decided.prefill, decode=decided.decode)


async def _end(child: Process) -> None:
    if child.stdin is not None:
        child.stdin.close()
    with contextlib.suppress(ProcessLookupError):
        child.kill()  # nothing in it is worth a farewell
    await child.wait()
