"""What the pipelines of one node share: its replicas, and the tools to make and end them."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import msgspec

from dynamo_snapshot.agent.criu.command import Criu
from dynamo_snapshot.agent.cuda.collectives import NAMES_ENV
from dynamo_snapshot.agent.cuda.driver import Inventory
from dynamo_snapshot.agent.failed_logs import FailedLogs
from dynamo_snapshot.agent.gpu_budget import assign, left
from dynamo_snapshot.agent.gpus import VISIBLE_ENV, Gpus
from dynamo_snapshot.agent.house import CONTROL_INSIDE, Houses
from dynamo_snapshot.agent.journal import Journal, ReplicaGone, ReplicaNoted, ReplicaRecord
from dynamo_snapshot.agent.ports import Ports
from dynamo_snapshot.agent.process import KILL_GRACE_S
from dynamo_snapshot.agent.replica import Replica, new_incarnation
from dynamo_snapshot.config import Agent as Settings
from dynamo_snapshot.errors import SnapshotError
from dynamo_snapshot.model import Exit, Order, OrderKind, Reason, Way, WorkerSpec
from dynamo_snapshot.snapshots.compatibility import CompatibilityParts
from dynamo_snapshot.snapshots.store import SnapshotStore
from worker_hooks import control
from worker_hooks.weights.segment import SEGMENTS_ENV

# The host's own settings that any program needs; all else is the worker's specification.
_NO_SGLANG_LOGGING = "DYN_SKIP_SGLANG_LOG_FORMATTING"
"""Dynamo's: else each of its processes leaves a file for SGLang's loggers in the folder for temporary files."""
_FROM_HOST = ("HOME", "LANG", "LC_ALL", "LD_LIBRARY_PATH", "PYTHONPATH", "TMPDIR", "TZ", "USER", "VIRTUAL_ENV")


class Guard(Protocol):
    """Looks at a process tree from outside for what must not be captured."""

    def __call__(self, pid: int) -> Sequence[object]:
        """Returns what stands in the way of a capture, each finding as text by ``str``. May block."""


Discoverable = Callable[[int], Awaitable[bool]]
"""Whether an instance with this TCP port is registered."""
Parts = Callable[[str, WorkerSpec], Awaitable[CompatibilityParts]]
"""What a pool's worker is compatible with, here and now."""


def nothing_found(pid: int) -> Sequence[object]:
    """A guard for programs that are none of ours: CRIU itself is the judge."""
    return ()


async def nowhere(port: int) -> bool:
    """For a node without discovery."""
    return False


@dataclass
class Node:
    """One host's replicas and tools."""

    settings: Settings
    houses: Houses
    store: SnapshotStore
    criu: Criu
    journal: Journal
    parts: Parts
    guard: Guard = nothing_found
    discoverable: Discoverable = nowhere
    gpus: Gpus | None = None
    """None: this host has none."""
    clock: Callable[[], float] = time.time
    """Wall-clock seconds."""
    monotonic: Callable[[], float] = time.monotonic
    on_change: Callable[[], None] = lambda: None
    """Called whenever there is something new to report."""
    replicas: dict[str, Replica] = field(default_factory=dict)
    distrusted: dict[str, str] = field(default_factory=dict)
    """Snapshots whose content turned out wrong though their files look untouched: id to what was found."""

    def __post_init__(self) -> None:
        self.ports = Ports(*self.settings.rpc_ports)
        self.failed_logs = FailedLogs(self.settings.runtime_dir / "logs")
        self.restore_slots = asyncio.Semaphore(self.settings.max_concurrent_restores)
        self.prefetch_slot = asyncio.Semaphore(1)

    def admit(self, order: Order, spec: WorkerSpec, way: Way, gpus: Sequence[str] = ()) -> Replica:
        """Takes in the replica that ``order`` wants, with a port of its own, on ``gpus``.

        Raises:
            SnapshotError: ``node_at_capacity``, ``port_in_use``; ``internal_error`` for an id that is taken.
        """
        known = self.replicas.get(order.replica_id)
        if known is not None and known.exit is None:
            raise SnapshotError(Reason.INTERNAL_ERROR, f"replica {order.replica_id} is already on this node")
        alive = sum(replica.exit is None for replica in self.replicas.values())
        if alive >= self.settings.max_replicas:
            raise SnapshotError(
                Reason.NODE_AT_CAPACITY,
                f"this node has {alive} replicas of at most {self.settings.max_replicas}",
                "Raise agent.max_replicas in fleet.yaml, or drain one.",
            )
        record = ReplicaRecord(
            replica_id=order.replica_id,
            pool=order.pool,
            way=way,
            incarnation=new_incarnation(),
            rpc_port=self.ports.take(),
            spec=spec,
            order_id=order.id,
            ordered_at=order.issued_at,
            capture=order.capture,
            snapshot_id=order.snapshot_id,
            parked=order.kind is OrderKind.PARK,
            gpus=dict.fromkeys(gpus, 0),
        )
        try:
            return self.add(record)
        except SnapshotError:
            self.ports.release(record.rpc_port)
            raise

    def replica(self, record: ReplicaRecord) -> Replica:
        """What ``record`` says, as a replica that is not this node's yet."""
        return Replica(record, self.clock, self.on_change, self.failed_logs)

    def add(self, record: ReplicaRecord) -> Replica:
        """Takes in a replica, and notes it in the journal before anything of it exists."""
        self.journal.append(ReplicaNoted(record=record))
        self.ports.hold(record.rpc_port)
        replica = self.replicas[record.replica_id] = self.replica(record)
        self.on_change()
        return replica

    async def inventory(self) -> Inventory:
        """This host's GPUs, less what replicas on their way will take; raises ``cuda_missing`` where there are none."""
        if self.gpus is None:
            raise SnapshotError(
                Reason.CUDA_MISSING,
                "the replica needs a GPU, and this node's agent uses none",
                "Order it on a node with an NVIDIA driver; agent.gpu.enabled must be true there.",
            )
        return left(await self.gpus.driver.inventory(), self.living())

    def assign_gpus(
        self, inventory: Inventory, count: int, preferred: Sequence[str] = (), *, parks: bool = False
    ) -> tuple[str, ...]:
        """See :func:`dynamo_snapshot.agent.gpu_budget.assign`. To be noted before anything else is awaited."""
        places = None if parks else self.settings.gpu.replicas_per_gpu
        return assign(inventory, self.living(), count, places, preferred)

    def living(self) -> list[ReplicaRecord]:
        return [replica.record for replica in self.replicas.values() if replica.exit is None]

    def note(
        self,
        replica: Replica,
        *,
        served: bool | None = None,
        parked: bool | None = None,
        incarnation: str | None = None,
        gpus: Mapping[str, int] | None = None,
    ) -> None:
        """Writes what changed about ``replica`` to the journal."""
        record = replica.record
        replica.record = msgspec.structs.replace(
            record,
            served=record.served if served is None else served,
            parked=record.parked if parked is None else parked,
            incarnation=incarnation or record.incarnation,
            gpus=record.gpus if gpus is None else dict(gpus),
        )
        self.journal.keep(ReplicaNoted(record=replica.record))

    async def forget(self, replica: Replica) -> None:
        """Ends whatever is left of ``replica`` and takes it out of the report."""
        await replica.close()
        await self.houses.remove(replica.id)
        self.ports.release(replica.record.rpc_port)
        if self.replicas.get(replica.id) is replica:
            del self.replicas[replica.id]
        self.journal.keep(ReplicaGone(replica_id=replica.id))
        self.on_change()

    async def end(self, replica: Replica, reason: Reason, message: str) -> Exit:
        """Kills the worker, and its house if that is not enough; returns how it ended."""
        if replica.exit is None and replica.ending is None:
            replica.ending = (reason, message)
        if replica.exit is None and replica.house is not None:
            try:
                await replica.house.holder.signal(signal.SIGKILL)
                async with asyncio.timeout(KILL_GRACE_S):
                    await replica.gone()
            except (SnapshotError, TimeoutError):
                replica.house.holder.end()
                try:
                    async with asyncio.timeout(KILL_GRACE_S):
                        await replica.gone()
                except TimeoutError:
                    await self.houses.remove(replica.id)
        return await replica.gone()

    async def drain(self, replica: Replica, timeout_s: float) -> Exit | None:
        """Asks the worker to finish and go; returns how it did, or None if it has not in ``timeout_s``."""
        assert replica.house is not None
        if replica.exit is None:
            # A holder that cannot be asked has ended with its worker, which is seen in a moment, or hangs.
            with contextlib.suppress(SnapshotError):
                await replica.house.holder.signal(signal.SIGTERM)
        try:
            async with asyncio.timeout(timeout_s):
                return await replica.gone()
        except TimeoutError:
            return None

    def release_environment(self, replica: Replica) -> dict[str, str]:
        """What an incarnation has of its own, for its restore context."""
        record = replica.record
        environment = {
            **record.spec.incarnation_environment,
            "DYN_TCP_RPC_PORT": str(record.rpc_port),
            control.INCARNATION_ENV: record.incarnation,
            # Not part of a snapshot's key, so a clone may have been captured with another.
            control.DRAIN_TIMEOUT_ENV: f"{record.spec.drain_timeout_s:g}",
        }
        if self.gpus is not None:
            environment[SEGMENTS_ENV] = str(self.store.segments.folder)
        if record.spec.gpus:
            environment[VISIBLE_ENV] = ",".join(record.gpus)
        return environment

    def worker_environment(self, replica: Replica) -> dict[str, str]:
        """The whole environment of a cold worker."""
        record = replica.record
        beside = str(Path(sys.executable).parent)  # so that `python` is the one this project is installed in
        environment = {name: os.environ[name] for name in _FROM_HOST if name in os.environ}
        environment["PATH"] = f"{beside}{os.pathsep}{os.environ.get('PATH', os.defpath)}"
        if not any("sglang" in word for word in record.spec.command):
            environment[_NO_SGLANG_LOGGING] = "1"
        environment |= record.spec.environment | self.release_environment(replica)
        environment[control.STATE_DIR_ENV] = CONTROL_INSIDE
        if record.capture and self.gpus is not None:
            environment.setdefault(NAMES_ENV, "1")
        if record.capture:
            environment[control.CONTROL_DIR_ENV] = environment[control.LEGACY_CONTROL_DIR_ENV] = CONTROL_INSIDE
        return environment
