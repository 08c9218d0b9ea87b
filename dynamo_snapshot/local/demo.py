"""The demo: one fleet through a spike, a kill and a scale-in, recorded and judged."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import aiohttp

from dynamo_snapshot.errors import SnapshotError
from dynamo_snapshot.local.checks import PINNED_REQUESTS
from dynamo_snapshot.local.demo_fleet import MODEL, DemoOptions, demo_fleet, demo_load
from dynamo_snapshot.local.demo_result import Played, assemble
from dynamo_snapshot.local.leftovers import Leftover
from dynamo_snapshot.local.load_meter import LoadMeter
from dynamo_snapshot.local.observe import read_view
from dynamo_snapshot.local.planner_log import planner_changes
from dynamo_snapshot.local.ports import free_port
from dynamo_snapshot.local.processes import DECISION_LOG
from dynamo_snapshot.local.recorder import Record, Recorder
from dynamo_snapshot.local.tiny_model import write_tiny_model
from dynamo_snapshot.local.up import LocalFleet
from dynamo_snapshot.model import OrderKind, OrderStatus, Reason, Way
from dynamo_snapshot.replay.chat import Endpoint
from dynamo_snapshot.replay.load import LoadGenerator
from dynamo_snapshot.replay.migrations import migration_total, migrations
from dynamo_snapshot.replay.pin import pinned_requests

FIRST_WORKER_S = 120.0
PLANNER_S = 60.0
SCALE_IN_S = 120.0
IDLE_RESTORE_S = 30.0
IDLE_RESTORES = 2
KILL_FROM_REPLICAS = 4
KILL_FROM_REQUESTS = 6
SETTLED_S = 1.0
FRONTEND_LEARNS_S = 0.3
"""A request pinned to an instance that the frontend has not heard of yet would be refused."""

Say = Callable[[str], None]


class Demo:
    """One run. ``local`` is its fleet, for who wants to look on."""

    def __init__(self, options: DemoOptions, say: Say) -> None:
        self.options = options
        self._say = say
        self._folder = Path(tempfile.mkdtemp(prefix="dynamo-snapshot-demo-"))
        self.fleet = demo_fleet(options, self._folder)
        self.local = LocalFleet(self.fleet, say, planner_port=free_port())
        self._endpoint = Endpoint(self.local.frontend_url, MODEL)
        self._generator = LoadGenerator(demo_load(options), self._endpoint)
        self._meter = LoadMeter(self._generator, lambda: self.local.supervisor.pid("frontend"))
        self._played = Played()

    async def run(self) -> dict[str, Any]:
        """Plays the demo, takes its fleet down, and returns what ``--json`` writes.

        Raises:
            SnapshotError: a step did not come to its end; the logs are kept and named then.
        """
        write_tiny_model(self._folder / "model")
        try:
            await self.local.start_servers()
            pool = next(iter(self.fleet.pools.values()))
            prefix = f"v1/instances/{self.fleet.namespace}/{pool.component}/{pool.endpoint}/"
            async with Recorder(self.local.bus, self.local.runtime_dir, self.local.etcd_url, prefix) as recorder:
                await self.local.start_workers()
                await self._play(recorder)
            self._played.migrations = migrations(self.local.runtime_dir / "logs" / "frontend.log")
            self._played.migrations_by_metric = migration_total(await self._metrics())
            self._played.planner = planner_changes(self.local.runtime_dir / DECISION_LOG)
        except asyncio.CancelledError:
            await asyncio.shield(self.local.stop())
            shutil.rmtree(self._folder, ignore_errors=True)
            raise
        except BaseException:
            await asyncio.shield(self.local.stop())
            logs = self.local.runtime_dir / "logs"
            useless = (self.fleet.agent.store_dir, self.fleet.model.path) if logs.is_dir() else (self._folder,)
            for folder in useless:
                shutil.rmtree(folder, ignore_errors=True)
            if logs.is_dir():
                self._say(f"the logs are kept in {logs}")
            raise
        left = await self.local.stop()
        shutil.rmtree(self._folder, ignore_errors=True)
        if self._folder.exists():
            left.append(Leftover("file", str(self._folder)))
        self._played.load = self._generator.summary()
        self._played.load_planned = self._generator.progress.planned
        return assemble(self.options, self.fleet, recorder.record, self._played, self._meter, left)

    async def _play(self, recorder: Recorder) -> None:
        record, generator = recorder.record, self._generator
        await self._until(recorder, lambda: bool(record.serving()), FIRST_WORKER_S, "the first worker serves")
        if self.options.gated:
            await self._until(recorder, lambda: _captured(record), FIRST_WORKER_S, "a snapshot of it is published")
        decisions = self.local.runtime_dir / DECISION_LOG
        await self._until(recorder, lambda: _has_content(decisions), PLANNER_S, "the planner has decided")
        beside = [asyncio.create_task(self._pin_restored(recorder), name="pin")]
        if self.options.gated:
            beside.append(asyncio.create_task(self._kill_one(record), name="kill"))
        try:
            self._say(f"replaying {generator.progress.planned} requests at ×{self.options.speed:g}")
            self._played.mark("load", f"load ×{self.options.speed:g}")
            async with self._meter:
                await generator.run()
            self._played.mark("end", "load ends")
            self._say(f"load done: {generator.progress.failed} of {generator.progress.sent} requests failed")
            if self.options.gated:
                await self._until(recorder, lambda: len(_living(record)) == 1, SCALE_IN_S, "one replica is left")
                self._played.left_serving = len(record.serving())
                self._played.mark("scaled_in", "1 replica")
                await self._idle_restores(recorder)
        finally:
            for task in beside:
                task.cancel()
            ended = await asyncio.gather(*beside, return_exceptions=True)
        for problem in ended:
            if isinstance(problem, Exception):
                raise problem
        await asyncio.sleep(FRONTEND_LEARNS_S)
        await self._pin_all(record)

    async def _until(self, recorder: Recorder, condition: Callable[[], bool], timeout_s: float, what: str) -> None:
        begun = time.monotonic()
        if not await recorder.wait_for(condition, timeout_s):
            raise SnapshotError(
                Reason.DEADLINE_EXCEEDED,
                f"waited {timeout_s:.0f} s in vain until {what}",
                f"The logs in {self.local.runtime_dir / 'logs'} tell why.",
            )
        self._say(f"{what} after {time.monotonic() - begun:.1f} s")

    async def _pin_restored(self, recorder: Recorder) -> None:
        """Sends each restored worker its pinned requests soon after it has come into discovery."""
        while True:
            await self._pin_all(recorder.record)
            await recorder.next_change()
            await asyncio.sleep(FRONTEND_LEARNS_S)

    async def _pin_all(self, record: Record) -> None:
        pins = self._played.pins
        for replica_id in record.serving():
            registration = record.registration_of(replica_id)
            if record.reports[replica_id].way is Way.RESTORE and replica_id not in pins and registration is not None:
                instance_id = registration.instance_id
                pins[replica_id] = await pinned_requests(self._endpoint, instance_id, PINNED_REQUESTS)

    async def _kill_one(self, record: Record) -> None:
        """Kills a restored worker that serves requests, once the fleet is large enough and settled."""
        settled_since = time.monotonic()
        while True:
            await asyncio.sleep(0.1)
            pool = record.statuses[-1].pools[0] if record.statuses else None
            settled = pool is not None and pool.serving == pool.target >= KILL_FROM_REPLICAS and not pool.pending
            in_flight = self._generator.progress.in_flight
            if not settled or in_flight < KILL_FROM_REQUESTS:
                settled_since = time.monotonic()
            elif time.monotonic() - settled_since >= SETTLED_S and (victim := self._victim(record)):
                replica_id, pid = victim
                os.kill(pid, signal.SIGKILL)
                self._played.killed = (replica_id, time.time())
                self._played.mark("kill", f"SIGKILL {replica_id}")
                self._say(f"killed worker {replica_id} (process {pid}) with {in_flight} requests in flight")
                return

    def _victim(self, record: Record) -> tuple[str, int] | None:
        """The restored worker with the most running requests, of those that have answered their pinned ones."""
        status = read_view(self.local.runtime_dir).status
        loads = {replica.replica_id: replica.load for replica in status.replicas} if status else {}
        running = [
            (load.running, replica_id)
            for replica_id in record.serving()
            if replica_id in self._played.pins and (load := loads.get(replica_id)) is not None and load.running > 0
        ]
        if not running:
            return None
        replica_id = max(running)[1]
        pid = record.reports[replica_id].pid
        return None if pid is None else (replica_id, pid)

    async def _idle_restores(self, recorder: Recorder) -> None:
        """Raises the planner's floor one by one, so that each restore has the machine to itself."""
        record = recorder.record
        self._played.idle_from = time.time()
        for count in range(2, 2 + IDLE_RESTORES):
            await asyncio.sleep(SETTLED_S)
            await self._set_floor(count)

            def served(count: int = count) -> bool:
                return len(record.serving()) >= count

            await self._until(recorder, served, IDLE_RESTORE_S, f"{count} replicas serve")

    async def _set_floor(self, replicas: int) -> None:
        url = f"http://127.0.0.1:{self.local.planner_port}/v1/min-endpoints"
        async with aiohttp.ClientSession() as session, session.patch(url, json={"min_endpoint": replicas}) as answer:
            if answer.status != 200:
                raise SnapshotError(
                    Reason.SERVER_UNREACHABLE, f"the planner refused a floor of {replicas}: {await answer.text()}"
                )

    async def _metrics(self) -> str:
        async with aiohttp.ClientSession() as session, session.get(f"{self.local.frontend_url}/metrics") as answer:
            return await answer.text()


def _captured(record: Record) -> bool:
    captures = [order for order in record.orders.values() if order.kind is OrderKind.CAPTURE]
    outcomes = [record.outcomes.get(order.id) for order in captures]
    return any(outcome is not None and outcome.status is OrderStatus.DONE for outcome in outcomes)


def _living(record: Record) -> list[str]:
    return [replica_id for replica_id, report in record.reports.items() if report.exit is None]


def _has_content(path: Path) -> bool:
    return path.exists() and path.stat().st_size > 0
