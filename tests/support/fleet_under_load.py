"""A small real fleet with streams of requests on it, for tests that kill its parts."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import aiohttp
import msgspec

from dynamo_snapshot.agent.cgroups import Cgroups
from dynamo_snapshot.agent.entry import JOURNAL
from dynamo_snapshot.agent.house import MARK
from dynamo_snapshot.agent.journal import Ended, Entry
from dynamo_snapshot.agent.mounts import mount_points
from dynamo_snapshot.config import Fleet
from dynamo_snapshot.local import leftovers
from dynamo_snapshot.local.etcd import Etcd
from dynamo_snapshot.local.observe import read_view
from dynamo_snapshot.local.ports import free_port
from dynamo_snapshot.local.service import ServiceState
from dynamo_snapshot.local.tiny_model import write_tiny_model
from dynamo_snapshot.local.up import LocalFleet
from dynamo_snapshot.model import FleetStatus, Order, OrderKind, Outcome, ReplicaPhase, ReplicaReport, Reported
from dynamo_snapshot.replay.chat import Endpoint, ask, client_session
from dynamo_snapshot.replay.prompts import prompt
from dynamo_snapshot.snapshots.store import SnapshotStore

MODEL = "tiny"
NAMESPACE = "faults"
POOL = "decode"
STREAMS = 3
TOKENS = 12
PAUSE_S = 0.2
"""Between two requests of a stream: a frontend that is away refuses at once."""
FRESH_S = 3.0
"""A controller that works writes its status every second."""


def small_fleet(folder: Path) -> Fleet:
    """A fleet whose size is the planner's floor: no load asks for a second replica."""
    command = [
        "dynamo-snapshot-worker", "run", "--", "python", "-m", "dynamo.mocker",
        "--model-path", "{model_path}", "--model-name", "{model_name}", "--decode-speedup-ratio", "0.12",
    ]  # fmt: skip
    # Long beside what a restore is expected to take before one was measured: restores are what is wanted.
    environment = {"MOCKER_BOOT_SECONDS": "3", "MOCKER_RESIDENT_MIB": "32"}
    return Fleet.model_validate(
        {
            "name": "faults",
            "namespace": NAMESPACE,
            "model": {"name": MODEL, "path": write_tiny_model(folder / "model")},
            "pools": {POOL: {"worker": {"command": command, "environment": environment}, "max_replicas": 4}},
            "agent": {
                "runtime_dir": folder / "run",
                "store_dir": folder / "snapshots",
                "max_concurrent_restores": 1,  # one after the other, so that some are under way for a while
            },
            "frontend": {"port": free_port()},
            "planner": {"tick_s": 0.5, "target_requests_per_replica": 1000, "scale_down_after_s": 2},
        }
    )


@dataclass(frozen=True)
class Sent:
    """One request of a stream, by the monotonic clock; ``error`` is None if it was answered in full."""

    sent_at: float
    ended_at: float
    error: str | None


class Traffic:
    """Streams of requests, each stream one after the other."""

    def __init__(self, url: str) -> None:
        self._endpoint = Endpoint(url, MODEL, timeout_s=60)
        self._tasks: list[asyncio.Task[None]] = []
        self.requests: list[Sent] = []

    def start(self) -> None:
        self._tasks = [asyncio.create_task(self._stream(index), name=f"stream {index}") for index in range(STREAMS)]

    async def stop(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def answered(self, since: float) -> int:
        return sum(request.error is None and request.sent_at >= since for request in self.requests)

    def lost(self, since: float) -> list[Sent]:
        """Requests sent at ``since`` or later that were not answered in full."""
        return [request for request in self.requests if request.error is not None and request.sent_at >= since]

    async def _stream(self, index: int) -> None:
        async with client_session() as session:
            while True:
                sent_at = time.monotonic()
                answer = await ask(session, self._endpoint, prompt(index, 16), TOKENS, clock=time.monotonic)
                self.requests.append(Sent(sent_at, time.monotonic(), answer.error))
                await asyncio.sleep(PAUSE_S)


class Ledger:
    """Every order and every outcome that was seen on the bus."""

    def __init__(self, local: LocalFleet) -> None:
        self._local = local
        self._tasks: list[asyncio.Task[None]] = []
        self.orders: dict[str, Order] = {}
        self.outcomes: dict[str, set[Outcome]] = defaultdict(set)

    def start(self) -> None:
        self._tasks = [asyncio.create_task(self._follow_reports(), name="ledger reports")]

    async def stop(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def violations(self) -> list[str]:
        """Orders that ended twice, or did not end though nobody wants them any more."""
        # A version of the report may be skipped; what it said was in the journal before.
        for outcome in journalled(self._local.runtime_dir / JOURNAL):
            self.outcomes[outcome.order_id].add(outcome)
        return [
            f"{order.kind} {order.id} has {len(ended)} outcomes: {ended}"
            for order in self.orders.values()
            if len(ended := self.outcomes[order.id]) != 1
        ]

    async def _follow_reports(self) -> None:
        nodes: set[str] = set()
        async for reported in self._local.bus.watch_reported():
            if reported.node not in nodes:
                nodes.add(reported.node)
                self._tasks.append(asyncio.create_task(self._follow_orders(reported.node), name="ledger orders"))
            for outcome in reported.outcomes:
                self.outcomes[outcome.order_id].add(outcome)

    async def _follow_orders(self, node: str) -> None:
        async for wanted in self._local.bus.watch_wanted(node):
            self.orders.update({order.id: order for order in wanted.orders})


def journalled(path: Path) -> Iterator[Outcome]:
    """The outcomes in an agent's journal, whose last line may be under way."""
    for line in path.read_bytes().splitlines(keepends=True) if path.exists() else ():
        if line.endswith(b"\n"):
            entry = msgspec.json.decode(line, type=Entry)
            if isinstance(entry, Ended):
                yield entry.outcome


class FleetUnderLoad:
    """The fleet, its traffic and the ledger of its orders."""

    def __init__(self, folder: Path) -> None:
        self.said: list[str] = []
        self.local = LocalFleet(small_fleet(folder), self.said.append, planner_port=free_port())
        self.traffic = Traffic(self.local.frontend_url)
        self.ledger = Ledger(self.local)
        self._store = SnapshotStore(self.local.fleet.agent.store_dir)

    async def start(self) -> None:
        """Returns once one worker serves and its snapshot is there."""
        await self.local.start()
        self.ledger.start()
        await self.settled(1)
        await self.until(lambda: bool(self._store.list()), "a snapshot")
        self.traffic.start()

    async def stop(self) -> list[leftovers.Leftover]:
        await self.traffic.stop()
        await self.ledger.stop()
        return await self.local.stop()

    # what is done to it

    async def scale(self, replicas: int) -> None:
        """Tells the planner to keep at least ``replicas``; waits for a planner that boots."""
        url = f"http://127.0.0.1:{self.local.planner_port}/v1/min-endpoints"
        async with aiohttp.ClientSession() as session, asyncio.timeout(60):
            while True:
                try:
                    async with session.patch(url, json={"min_endpoint": replicas}) as answer:
                        assert answer.status == 200, await answer.text()
                        return
                except aiohttp.ClientConnectionError:
                    await asyncio.sleep(0.2)

    def kill(self, service: str) -> float:
        """Kills a service; returns when, by the monotonic clock. The supervisor starts it again."""
        assert self.local.supervisor.pid(service) is not None
        self.local.supervisor.kill(service)
        return time.monotonic()

    @contextmanager
    def frozen(self, service: str) -> Iterator[None]:
        pid = self.local.supervisor.pid(service)
        assert pid is not None
        os.kill(pid, signal.SIGSTOP)
        try:
            yield
        finally:
            os.kill(pid, signal.SIGCONT)

    # what is seen of it

    def status(self) -> FleetStatus:
        status = read_view(self.local.runtime_dir).status
        assert status is not None
        return status

    def report(self) -> Reported:
        (report,) = read_view(self.local.runtime_dir).reports.values()
        return report

    def living(self) -> dict[str, ReplicaReport]:
        return {seen.replica_id: seen for seen in self.report().replicas if seen.phase is not ReplicaPhase.EXITED}

    async def under_way(self) -> list[Order]:
        """What is wanted and has not ended."""
        report = self.report()
        wanted = await self.local.bus.read_wanted(report.node)
        ended = {outcome.order_id for outcome in report.outcomes}
        return [order for order in wanted.orders if order.id not in ended] if wanted else []

    async def under_way_is(self, kind: OrderKind, serving: int = 1) -> None:
        """Returns while at least one order of ``kind`` is under way and ``serving`` replicas serve."""
        async with asyncio.timeout(30):
            while True:
                kinds = {order.kind for order in await self.under_way()}
                if kind in kinds and self.status().pools[0].serving >= serving:
                    return
                await asyncio.sleep(0.01)

    async def registered(self) -> set[int]:
        """The ports of the workers in discovery."""
        keys = await Etcd(self.local.etcd_url).keys(f"v1/instances/{NAMESPACE}/backend/generate/")
        return {
            int(msgspec.json.decode(key.value)["transport"]["tcp"].split("/", 1)[0].rsplit(":", 1)[1]) for key in keys
        }

    async def settled(self, replicas: int, timeout_s: float = 60) -> None:
        """Returns once the target is ``replicas``, discovery shows just the living, and nothing is under way."""
        seen = "nothing"
        try:
            async with asyncio.timeout(timeout_s):
                while seen:
                    await asyncio.sleep(0.1)
                    seen = await self._unsettled(replicas)
        except TimeoutError:
            logs = self.local.runtime_dir / "logs"
            tails = {path.name: path.read_text(errors="replace")[-1500:] for path in logs.glob("[acp]*.log")}
            raise AssertionError(f"not settled at {replicas}: {seen}\n{self.said[-20:]}\n{tails}") from None

    async def _unsettled(self, replicas: int) -> str:
        view = read_view(self.local.runtime_dir)
        if view.status is None or not view.reports:
            return f"status {view.status}, reports {view.reports}"
        status, pool = view.status, view.status.pools[0]
        down = [service.name for service in self.local.supervisor.status() if service.state is not ServiceState.READY]
        ports = {seen.rpc_port for seen in self.living().values()}
        if down or time.time() - status.at > FRESH_S or not status.discovery_known:
            return f"down: {down}, status of {time.time() - status.at:.1f} s ago, {status.discovery_known=}"
        if (pool.target, pool.serving, pool.pending, pool.draining) != (replicas, replicas, 0, 0):
            return str(status)
        if ports != await self.registered() or len(ports) != replicas:
            return f"living {ports}, registered {await self.registered()}"
        return str(await self.under_way() or "")

    async def until(self, condition: Callable[[], bool], what: str, timeout_s: float = 30) -> None:
        try:
            async with asyncio.timeout(timeout_s):
                while not condition():  # noqa: ASYNC110 - what is waited for has no event
                    await asyncio.sleep(0.05)
        except TimeoutError:
            raise AssertionError(f"not within {timeout_s:g} s: {what}; {self.said[-20:]}") from None

    async def broken(self) -> list[str]:
        """What does not hold of a settled fleet, and must whatever was done to it."""
        living, reported = set(self.living()), {seen.replica_id for seen in self.report().replicas}
        houses = {path.name for path in (self.local.runtime_dir / "replicas").iterdir()}
        groups = {path.name for path in Cgroups(self.local.runtime_dir).existing()}
        store = self.local.fleet.agent.store_dir
        found = self.ledger.violations()
        found += [f"stranger: {process}" for process in self._strangers()]
        found += [f"mount: {point}" for point in mount_points(self.local.runtime_dir)]
        found += [f"lives without a house: {name}" for name in living - houses]
        found += [f"house of nobody: {name}" for name in houses - reported]
        found += [f"cgroup of nobody: {name}" for name in groups - houses]
        found += [f"in the store: {path}" for hidden in (".staging", ".removed") for path in (store / hidden).iterdir()]
        for summary in self._store.list():
            if not summary.admitted or summary.reason is not None:
                found.append(f"not usable: {summary}")
            await asyncio.to_thread(self._store.verify, summary.id)
        return found

    def _strangers(self) -> list[str]:
        """Processes of this fleet that are neither a service's nor a living replica's."""
        services = {service.pid for service in self.local.supervisor.status()}
        living = set(self.living())
        found = []
        for pid in leftovers.processes(self.local.runtime_dir):
            line = _ancestry(pid)
            house = next((name for ancestor in line if (name := _house(ancestor))), None)
            if house not in living if house else services.isdisjoint(line):
                found.append(leftovers.describe(pid))
        return found


def _ancestry(pid: int) -> list[int]:
    line = []
    while pid > 0:
        line.append(pid)
        try:
            pid = int(Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[1])
        except OSError:
            break
    return line


def _house(pid: int) -> str | None:
    """The replica that process ``pid`` says it serves."""
    try:
        entries = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:
        return None
    marks = [entry.decode() for entry in entries if entry.startswith(f"{MARK}=".encode())]
    return Path(marks[0].split("=", 1)[1]).name if marks else None
