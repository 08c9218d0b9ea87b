"""A node agent as a process of its own, with a bus to order from and the toy worker to run."""

from __future__ import annotations

import asyncio
import itertools
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml

from dynamo_snapshot.agent.process import wait_pid
from dynamo_snapshot.bus.directory import DirectoryBus
from dynamo_snapshot.model import Order, OrderKind, Outcome, ReplicaPhase, ReplicaReport, Reported, Wanted, WorkerSpec

TOY = Path(__file__).with_name("toy_worker.py")
NODE = "here"
POOL = "toy"
# Not the environment this project is installed in: its content is part of the key, and may be edited meanwhile.
PYTHON = getattr(sys, "_base_executable", sys.executable)


def toy_spec(*, memory_mib: int = 4, flaw: str = "", **fields: Any) -> WorkerSpec:
    """A pool of toy workers; ``flaw``: see the toy."""
    environment = {"TOY_MEMORY_MIB": str(memory_mib), "TOY_FLAW": flaw}
    return WorkerSpec(command=(PYTHON, str(TOY)), environment=environment, **fields)


def criu_that(folder: Path, criu: Path, action: str, does: str) -> str:
    """A criu that runs shell text before ``action``, and is itself otherwise."""
    script = folder / "criu-drill"
    script.write_text(f'#!/bin/sh\nif [ "$1" = {action} ]; then\n{does}\nfi\nexec {criu} "$@"\n')
    script.chmod(0o755)
    return str(script)


class AgentHost:
    """One runtime folder, one store, and at most one agent at a time."""

    def __init__(self, folder: Path, port: int, store_dir: Path | None = None, **agent: object) -> None:
        self.runtime_dir, self.store_dir = folder / "run", store_dir or folder / "store"
        self.fleet_file = folder / "fleet.yaml"
        self.log = folder / "agent.log"
        self.bus = DirectoryBus(self.runtime_dir / "bus")
        self.fence = 1
        self.spec = toy_spec()
        self.others: dict[str, WorkerSpec] = {}
        """Of pools beside :data:`POOL`."""
        self._orders: dict[str, Order] = {}
        self._sequence = itertools.count(1)
        self._process: subprocess.Popen[bytes] | None = None
        section = {
            "runtime_dir": str(self.runtime_dir), "store_dir": str(self.store_dir), "minimum_free_bytes": 0,
            "rpc_ports": [port, port + 50], **agent,
        }  # fmt: skip
        pools = {POOL: {"worker": {"command": list(self.spec.command)}}}
        model = {"name": "toy", "path": str(folder)}
        self.fleet_file.write_text(yaml.safe_dump({"model": model, "pools": pools, "agent": section}))

    def start(self, **environment: str) -> None:
        command = [sys.executable, "-m", "dynamo_snapshot.cli.main", "agent", str(self.fleet_file), "--node", NODE]
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env={**os.environ, **environment}
            )

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    async def ended(self) -> int:
        """Waits for the agent's end; returns its exit status."""
        assert self._process is not None
        async with asyncio.timeout(30):
            await wait_pid(self._process.pid)
        return self._process.wait()

    async def stop(self, number: int = signal.SIGTERM) -> int:
        assert self._process is not None
        self._process.send_signal(number)
        return await self.ended()

    def houses(self) -> list[str]:
        """The replicas that have a house on disk."""
        folder = self.runtime_dir / "replicas"
        return sorted(path.name for path in folder.iterdir()) if folder.is_dir() else []

    def is_running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    async def order(
        self, kind: OrderKind, replica_id: str, *, pool: str = POOL, within_s: float = 60, **fields: Any
    ) -> str:
        """Adds an order to the wanted list; returns its id."""
        order_id = f"{kind.value}-{replica_id}-{next(self._sequence)}"
        now = time.time()
        self._orders[order_id] = Order(
            id=order_id, kind=kind, replica_id=replica_id, pool=pool, fence=self.fence, issued_at=now,
            deadline=now + within_s, **fields,
        )  # fmt: skip
        await self.publish()
        return order_id

    async def publish(self) -> None:
        await self.bus.publish_wanted(
            Wanted(
                node=NODE,
                fence=self.fence,
                sequence=next(self._sequence),
                workers={POOL: self.spec, **self.others},
                orders=tuple(self._orders.values()),
            )
        )

    async def withdraw(self, order_id: str) -> None:
        del self._orders[order_id]
        await self.publish()

    async def until(self, look: Callable[[Reported], object], within_s: float = 30) -> Reported:
        """Returns the first report that ``look`` finds something in."""
        last: Reported | None = None
        try:
            async with asyncio.timeout(within_s):
                async for reported in self.bus.watch_reported():
                    last = reported
                    if look(reported):
                        return reported
        except TimeoutError:
            log = self.log.read_text()[-3000:] if self.log.exists() else ""
            raise AssertionError(f"not reported in {within_s} s; last: {last}\n{log}") from None
        raise AssertionError("the bus ended")

    async def outcome(self, order_id: str, within_s: float = 30) -> Outcome:
        reported = await self.until(lambda r: _outcome(r, order_id), within_s)
        found = _outcome(reported, order_id)
        assert found is not None
        return found

    async def replica(self, replica_id: str, phase: ReplicaPhase, within_s: float = 30) -> ReplicaReport:
        def look(reported: Reported) -> ReplicaReport | None:
            found = replica_of(reported, replica_id)
            return found if found and found.phase is phase else None

        reported = await self.until(look, within_s)
        found = look(reported)
        assert found is not None
        return found

    async def captured(self, replica_id: str = "source", *, pool: str = POOL, within_s: float = 30) -> str:
        """Starts a worker, captures it, waits until it serves on; returns the snapshot's id."""
        start = await self.order(OrderKind.COLD_START, replica_id, pool=pool, capture=True)
        ready = await self.replica(replica_id, ReplicaPhase.READY_FOR_SNAPSHOT, within_s)
        outcome = await self.outcome(await self.order(OrderKind.CAPTURE, replica_id, pool=pool), within_s)
        assert outcome.snapshot_id, outcome
        assert (await self.outcome(start)).status == "done"
        serves = await self.replica(replica_id, ReplicaPhase.REGISTERED)
        assert serves.incarnation != ready.incarnation, "the source goes on as another life than its clones' origin"
        return outcome.snapshot_id


def replica_of(reported: Reported, replica_id: str) -> ReplicaReport | None:
    return next((replica for replica in reported.replicas if replica.replica_id == replica_id), None)


def _outcome(reported: Reported, order_id: str) -> Outcome | None:
    found = [outcome for outcome in reported.outcomes if outcome.order_id == order_id]
    assert len(found) <= 1, f"two outcomes for {order_id}"
    return found[0] if found else None


MakeHost = Callable[..., AgentHost]
