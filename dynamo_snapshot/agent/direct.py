"""Captures and restores on one host for a person at a terminal: orders without a fleet."""

from __future__ import annotations

import asyncio
import itertools
import os
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import TypeVar

import msgspec

from dynamo_snapshot.agent.direct_folder import DIRECT_DIR, own_folder
from dynamo_snapshot.agent.entry import build_node
from dynamo_snapshot.agent.failed_logs import FailedLogs
from dynamo_snapshot.agent.node import Node
from dynamo_snapshot.agent.orders import Orders
from dynamo_snapshot.agent.replica import Replica
from dynamo_snapshot.config import Agent as Settings
from dynamo_snapshot.errors import SnapshotError
from dynamo_snapshot.model import Exit, Order, OrderKind, OrderStatus, Outcome, Reason, ReplicaPhase, WorkerSpec
from dynamo_snapshot.snapshots.compatibility import CompatibilityParts
from dynamo_snapshot.snapshots.store import SnapshotStore

Say = Callable[[str], None]
T = TypeVar("T")

SERVER_PREFIXES = ("DYN_", "ETCD_", "NATS_")
"""The caller's variables that a worker gets: they say where its servers are."""
REPLICA = "worker"
CAPTURE_REFUSED = "capture_refused"
"""In a worker's evidence: why it went on without waiting for a capture."""
_CAPTURE_S = 600.0
_SLOW_S = 10.0
"""After this long a person is told what is waited for."""
_SERVES = (ReplicaPhase.RESUMING, ReplicaPhase.REGISTERED, ReplicaPhase.DRAINING)


class Direct:
    """One replica on this host, ordered by one caller."""

    def __init__(self, node: Node, pool: str, spec: WorkerSpec, say: Say) -> None:
        self.node, self._pool, self._spec, self._say = node, pool, spec, say
        self._orders = Orders(node, lambda: None)
        self._numbers = itertools.count(1)
        self._changed = asyncio.Event()
        self._phase: ReplicaPhase | None = None
        node.on_change = self._on_change

    @property
    def replica(self) -> Replica | None:
        return self.node.replicas.get(REPLICA)

    def begin(self, kind: OrderKind, within_s: float, *, snapshot_id: str | None = None, capture: bool = False) -> str:
        """Begins an order; returns its id."""
        now = self.node.clock()
        order = Order(
            id=f"{kind.value}-{next(self._numbers)}",
            kind=kind,
            replica_id=REPLICA,
            pool=self._pool,
            fence=0,
            issued_at=now,
            deadline=now + within_s,
            snapshot_id=snapshot_id,
            capture=capture,
        )
        self._orders.begin(order, self._spec)
        return order.id

    async def done(self, order_id: str, stop: asyncio.Event | None = None) -> Outcome:
        """Returns an order's outcome; raises the error that made it fail, or ``cancelled`` once ``stop`` is set."""
        outcome = await self.until(lambda: self.node.journal.state.outcomes.get(order_id), stop)
        if outcome.status is not OrderStatus.DONE:
            raise _failure(outcome)
        return outcome

    async def until(self, look: Callable[[], T | None], stop: asyncio.Event | None = None) -> T:
        """Returns the first answer of ``look`` that is not None; raises ``cancelled`` once ``stop`` is set."""
        stopped = asyncio.create_task(stop.wait()) if stop else None
        try:
            while (found := look()) is None:
                changed = asyncio.create_task(self._changed.wait())
                await asyncio.wait({changed, stopped} if stopped else {changed}, return_when=asyncio.FIRST_COMPLETED)
                changed.cancel()
                self._changed.clear()
                if stopped and stopped.done():
                    raise SnapshotError(Reason.CANCELLED, "stopped before it was done")
            return found
        finally:
            if stopped:
                stopped.cancel()

    async def waits_for_capture(self, start: str) -> bool:
        """Returns whether the worker that the order ``start`` made waits to be captured; no: the order is over."""
        outcomes = self.node.journal.state.outcomes

        def look() -> bool | None:
            if start in outcomes:
                return False
            waits = self.replica is not None and self.replica.phase is ReplicaPhase.READY_FOR_SNAPSHOT
            return True if waits else None

        return await self.until(look)

    async def is_woken(self, wake: asyncio.Event, stop: asyncio.Event) -> bool:
        """Returns whether ``wake`` was set before the parked worker ended or ``stop`` was set."""
        replica = self.replica
        assert replica is not None
        woken = asyncio.create_task(wake.wait())
        woken.add_done_callback(lambda _: self._changed.set())
        try:
            return await self.until(
                lambda: False if replica.exit is not None else True if wake.is_set() else None, stop
            )
        except SnapshotError:
            return False
        finally:
            woken.cancel()

    async def serve(self, stop: asyncio.Event) -> Exit:
        """Returns how the worker ended: by itself, or drained after ``stop`` was set."""
        replica = self.replica
        assert replica is not None
        try:
            return await self.until(lambda: replica.exit, stop)
        except SnapshotError:
            await self.done(self.begin(OrderKind.DRAIN, self._spec.drain_timeout_s + 10))
            return await self.until(lambda: replica.exit)

    @contextmanager
    def saying_if_slow(self, what: str) -> Iterator[None]:
        """Says ``what`` is waited for, and where the worker's log is, if the block takes long."""

        def say() -> None:
            house = self.replica.house if self.replica else None
            self._say(f"{what}; its log: {house.log}" if house else what)

        slow = asyncio.get_running_loop().call_later(_SLOW_S, say)
        try:
            yield
        finally:
            slow.cancel()

    async def remove(self) -> None:
        """Ends the replica and forgets it; another may be ordered in its place."""
        replica = self.replica
        if replica is not None:
            if replica.exit is None:
                await self.node.end(replica, Reason.CANCELLED, "not needed any more")
            await self.node.forget(replica)

    async def close(self) -> None:
        await self._orders.stop()

    def _on_change(self) -> None:
        self._changed.set()
        phase = self.replica.phase if self.replica else None
        if phase is not self._phase and phase is not None:
            self._say(phase.value.replace("_", " "))
        self._phase = phase


async def capture(
    settings: Settings, pool: str, spec: WorkerSpec, stop: asyncio.Event, say: Say, *, keep: bool = False
) -> str:
    """Starts ``spec``'s worker, captures it and returns the snapshot's id; with ``keep`` it then serves until ``stop``.

    Raises:
        SnapshotError: what made a phase fail; ``cancelled`` when ``stop`` was set before the capture was done.
    """
    _require_store(settings.store_dir)
    async with one_replica(settings, pool, spec, say) as direct:
        start = direct.begin(OrderKind.COLD_START, spec.boot_timeout_s + _CAPTURE_S, capture=True)

        def ready() -> bool | None:
            outcomes, replica = direct.node.journal.state.outcomes, direct.replica
            if replica is not None and replica.ready_at is not None:
                return True
            return False if start in outcomes or (replica is not None and replica.phase in _SERVES) else None

        with direct.saying_if_slow("the worker has not said ready-for-snapshot yet"):
            is_ready = await direct.until(ready, stop)
        if not is_ready:
            if (started := direct.node.journal.state.outcomes.get(start)) is not None:
                if started.reason == Reason.PHASE_TIMED_OUT and started.phases and started.phases[-1].name == "boot":
                    raise _never_ready(spec.boot_timeout_s)
                await direct.done(start)
            raise _not_captured(direct.replica)
        order = direct.begin(OrderKind.CAPTURE, _CAPTURE_S)
        try:
            outcome = await direct.done(order, stop)
        except SnapshotError as error:
            if error.reason is not Reason.CANCELLED:
                raise
            # A dump is let end, and by then the snapshot may be published: that is no failure.
            await direct.close()
            late = direct.node.journal.state.outcomes.get(order)
            if late is None or late.status is not OrderStatus.DONE:
                raise
            outcome = late
        assert outcome.snapshot_id is not None
        phases = ", ".join(f"{phase.name} {phase.seconds:.2f} s" for phase in outcome.phases)
        say(f"captured in {outcome.finished_at - outcome.started_at:.2f} s ({phases})")
        if keep:
            await direct.serve(stop)
        return outcome.snapshot_id


async def restore(
    settings: Settings,
    snapshot_id: str,
    environment: Mapping[str, str],
    stop: asyncio.Event,
    say: Say,
    wake: asyncio.Event | None = None,
) -> Exit:
    """Restores a snapshot, follows its worker until it ends or ``stop`` is set, and returns how it ended.

    Args:
        environment: the new incarnation's own, for its restore context.
        wake: the worker stays parked until this is set; None: it serves at once.

    Raises:
        SnapshotError: what made a phase fail; ``cancelled`` when ``stop`` was set before the worker served.
    """
    captured = (await asyncio.to_thread(SnapshotStore(settings.store_dir).check_unchanged, snapshot_id)).capture
    compatible = captured.compatibility
    spec = WorkerSpec(
        command=compatible.command, environment=compatible.environment, incarnation_environment=dict(environment)
    )
    async with one_replica(settings, captured.pool, spec, say) as direct:
        of_node = direct.node.parts

        async def parts(pool: str, spec: WorkerSpec) -> CompatibilityParts:
            # Where the model's folder was is not in the manifest, and the worker has its content in memory.
            known = {"engine": compatible.engine, "engine_version": compatible.engine_version}
            return msgspec.structs.replace(await of_node(pool, spec), model_files=compatible.model_files, **known)

        direct.node.parts = parts
        unset = "" if "ETCD_ENDPOINTS" in environment else " (ETCD_ENDPOINTS is not set here)"
        kind = OrderKind.RESTORE
        if wake is not None:
            outcome = await direct.done(direct.begin(OrderKind.PARK, _CAPTURE_S, snapshot_id=snapshot_id), stop)
            say(f"parked {_took(outcome)}; `kill -USR1 {os.getpid()}` wakes it")
            if not await direct.is_woken(wake, stop):
                return await direct.serve(stop)
            kind = OrderKind.WAKE
        with direct.saying_if_slow(f"the worker has not registered in discovery yet{unset}"):
            outcome = await direct.done(direct.begin(kind, _CAPTURE_S, snapshot_id=snapshot_id), stop)
        say(f"serving {_took(outcome)}")
        return await direct.serve(stop)


def _took(outcome: Outcome) -> str:
    phases = ", ".join(f"{phase.name} {phase.seconds * 1e3:.0f} ms" for phase in outcome.phases)
    return f"after {outcome.finished_at - outcome.started_at:.2f} s ({phases})"


def _failure(outcome: Outcome) -> SnapshotError:
    reason = outcome.reason or Reason.INTERNAL_ERROR.value
    if reason in set(Reason):
        return SnapshotError(Reason(reason), outcome.message)
    return SnapshotError(Reason.WORKER_EXITED, f"{outcome.message} ({reason})", "docs/reasons.md explains each reason.")


def _require_store(folder: Path) -> None:
    """Looks whether snapshots can be kept in ``folder``, before a worker boots for it."""
    existing = next(parent for parent in (folder, *folder.parents) if parent.exists())
    if not existing.is_dir() or not os.access(existing, os.W_OK):
        what = "cannot be written to" if existing.is_dir() else "is not a folder"
        raise SnapshotError(Reason.CONFIGURATION_INVALID, f"{existing} {what}", "Name another folder with --store.")


def _never_ready(limit_s: float) -> SnapshotError:
    return SnapshotError(
        Reason.PHASE_TIMED_OUT,
        f"the worker did not say ready-for-snapshot within {limit_s:g} s and was ended",
        "Run it through `dynamo-snapshot-worker run --` or the worker hooks; if it only boots slowly, "
        "raise --boot-timeout.",
    )


def _not_captured(replica: Replica | None) -> SnapshotError:
    why = replica.state.evidence.get(CAPTURE_REFUSED) if replica and replica.state else None
    if why:
        return SnapshotError(
            Reason.WORKER_NOT_READY,
            f"the worker found in itself what cannot be captured, and serves without: {why}",
            "docs/worker-hooks.md says how to avoid each kind.",
        )
    return SnapshotError(
        Reason.WORKER_NOT_READY,
        "the worker serves already: it never waited to be captured",
        "Run it through `dynamo-snapshot-worker run -- COMMAND`.",
    )


@asynccontextmanager
async def one_replica(settings: Settings, pool: str, spec: WorkerSpec, say: Say) -> AsyncIterator[Direct]:
    """One replica in a runtime folder of its own; afterwards there is nothing of it."""
    async with own_folder(settings.runtime_dir) as removed:
        for what in removed:
            say(f"removed what a command that was killed had left: replica {what}")
        node, _ = await asyncio.to_thread(build_node, settings)
        node.failed_logs = FailedLogs(DIRECT_DIR / "logs")  # its own folder goes
        direct = Direct(node, pool, spec, say)
        try:
            await node.houses.begin()
            yield direct
        finally:
            await direct.close()
            await node.houses.close()
            for replica in list(node.replicas.values()):
                await replica.close()
            if node.gpus is not None:
                await node.gpus.close()
            node.journal.close()


def servers_of(environment: Mapping[str, str]) -> dict[str, str]:
    """What of ``environment`` says where a worker's servers are."""
    return {name: value for name, value in environment.items() if name.startswith(SERVER_PREFIXES)}
