"""The shell around the core: feeds it events, carries its commands out, and decides nothing itself.

One task owns the state. Commands go to tasks of their own through mailboxes, so that a server that
is slow or away holds up nobody else; each is checked again just before it is carried out.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine
from typing import Any

import structlog

from dynamo_snapshot.backoff import Backoff
from dynamo_snapshot.bus.interface import Bus
from dynamo_snapshot.discovery.interface import Discovery
from dynamo_snapshot.errors import SnapshotError
from dynamo_snapshot.fleet.core import State, initial, step
from dynamo_snapshot.fleet.core.messages import (
    Command,
    CompleteDecision,
    Decided,
    DiscoverySeen,
    Event,
    Hinted,
    LoadsSeen,
    Memory,
    NodeReported,
    PublishStatus,
    Remember,
    Resign,
    RevokeLease,
    SetWanted,
    Started,
    Ticked,
)
from dynamo_snapshot.fleet.core.rules import Rules
from dynamo_snapshot.fleet.decisions import Planner
from dynamo_snapshot.fleet.hints import Hints, NoHints
from dynamo_snapshot.fleet.mailbox import Mailbox
from dynamo_snapshot.fleet.persistence import Store
from dynamo_snapshot.fleet.publisher import Publisher
from dynamo_snapshot.fleet.status import fleet_status
from dynamo_snapshot.model import Decision, Reason, ScalingHint, Wanted

log = structlog.get_logger()

TICK_S = 0.5
STATUS_AT_LEAST_S = 1.0
STATUS_AT_MOST_S = 0.05
"""Between two publications: at least this long, so that a burst of changes makes few."""


class Controller:
    """One fleet's controller. ``state`` is for reading only."""

    def __init__(
        self,
        rules: Rules,
        bus: Bus,
        discovery: Discovery,
        store: Store,
        planner: Planner,
        publisher: Publisher,
        hints: Hints | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._bus = bus
        self._discovery = discovery
        self._store = store
        self._planner = planner
        self._publisher = publisher
        self._hints = hints or NoHints()
        self._clock = clock
        self.state: State = initial(rules)
        self._events: asyncio.Queue[Event] = asyncio.Queue()
        self._wanted: Mailbox[str, Wanted] = Mailbox()
        self._leases: Mailbox[int, str] = Mailbox()
        self._intent = asyncio.Event()
        self._unsaved: Memory | None = None
        self._unacknowledged: list[Decision] = []
        self._changed = asyncio.Event()

    async def run(self) -> None:
        """Works until it is cancelled.

        Raises:
            SnapshotError: ``stale_fence`` when another controller is in charge; whatever the bus raises
                when it cannot be watched any more.
        """
        self._step(await self._take_over())
        parts: dict[str, Coroutine[Any, Any, None]] = {
            "core": self._decide(),
            "reports": self._watch_reports(),
            "discovery": self._watch_discovery(),
            "planner": self._planner.run(self._on_decision, self._on_loads),
            "hints": self._hints.run(self._on_hint),
            "clock": self._tick(),
            "wanted": self._write_wanted(),
            "leases": self._revoke_leases(),
            "memory": self._remember(),
            "status": self._publish_status(),
        }
        try:
            async with asyncio.TaskGroup() as group:
                for name, part in parts.items():
                    group.create_task(part, name=name)
        except BaseExceptionGroup as errors:
            known = errors.subgroup(SnapshotError)
            if known is None:
                raise
            raise known.exceptions[0] from errors

    # Into the core

    async def _take_over(self) -> Started:
        """Becomes the one writer; waits for servers that are away."""
        backoff = Backoff()
        while True:
            try:
                reports = await self._bus.read_reported()
                lists = [await self._bus.read_wanted(node) for node in reports]
                wanted = tuple(item for item in lists if item is not None)
                fences = [*(report.fence for report in reports.values()), *(item.fence for item in wanted)]
                fence = await self._store.take_fence(at_least=1 + max(fences, default=0))
                memory = await self._store.load()
            except SnapshotError as error:
                if error.reason is not Reason.SERVER_UNREACHABLE:
                    raise
                delay = backoff.next()
                log.warning("waiting_for_servers", cause=error.message, next_try_in_s=round(delay, 2))
                await asyncio.sleep(delay)
            else:
                log.info("controller_started", fence=fence, targets=memory.targets, nodes=sorted(reports))
                return Started(fence=fence, memory=memory, wanted=wanted)

    async def _decide(self) -> None:
        while True:
            self._step(await self._events.get())

    def _step(self, event: Event) -> None:
        before = self.state
        self.state, commands = step(before, event, self._clock())
        for record in self.state.records[_new_from(before, self.state) :]:
            log.info("decision", pool=record.pool, what=record.what, reason=record.reason)
        if before.discovery_known != self.state.discovery_known:
            log.info("discovery", known=self.state.discovery_known)
        for command in commands:
            self._hand_out(command)

    async def _watch_reports(self) -> None:
        async for report in self._bus.watch_reported():
            self._events.put_nowait(NodeReported(reported=report))

    async def _watch_discovery(self) -> None:
        async for view in self._discovery.watch():
            self._events.put_nowait(DiscoverySeen(instances=view))

    def _on_decision(self, decision: Decision) -> None:
        self._events.put_nowait(Decided(decision=decision))

    def _on_hint(self, hint: ScalingHint) -> None:
        self._events.put_nowait(Hinted(hint=hint))

    def _on_loads(self, loads: dict[int, Any]) -> None:
        self._events.put_nowait(LoadsSeen(loads=loads))

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(TICK_S)
            self._events.put_nowait(Ticked())

    # Out of the core

    def _hand_out(self, command: Command) -> None:
        match command:
            case SetWanted(wanted=wanted):
                self._wanted.put(wanted.node, wanted)
            case RevokeLease(instance_id=instance_id, replica_id=replica_id):
                self._leases.put(instance_id, replica_id)
            case Remember(memory=memory):
                self._unsaved = memory
                self._intent.set()
            case CompleteDecision(decision=decision):
                self._unacknowledged.append(decision)
                self._intent.set()
            case PublishStatus():
                self._changed.set()
            case Resign(fence=fence):
                raise SnapshotError(
                    Reason.STALE_FENCE,
                    f"a node obeys fence {fence}, this controller has {self.state.fence}: another one has started",
                    "Run one controller for each Dynamo namespace.",
                )

    async def _write_wanted(self) -> None:
        backoff = Backoff()
        while True:
            node, wanted = await self._wanted.take()
            try:
                await self._bus.publish_wanted(wanted)
                backoff.reset()
            except SnapshotError as error:
                log.warning("wanted_not_written", node=node, cause=str(error))
                self._wanted.put_back(node, wanted)
                await asyncio.sleep(backoff.next())

    async def _revoke_leases(self) -> None:
        backoff = Backoff()
        while True:
            instance_id, replica_id = await self._leases.take()
            if instance_id not in self.state.revoking:
                continue  # it left discovery meanwhile
            try:
                await self._discovery.revoke(instance_id)
                log.info("lease_revoked", instance=f"{instance_id:x}", replica=replica_id)
                backoff.reset()
            except SnapshotError as error:
                log.warning("lease_not_revoked", instance=f"{instance_id:x}", replica=replica_id, cause=str(error))
                self._leases.put_back(instance_id, replica_id)
                await asyncio.sleep(backoff.next())

    async def _remember(self) -> None:
        """Remembers what a decision made, then acknowledges it; acknowledges it also where that fails."""
        backoff = Backoff()
        while True:
            await self._intent.wait()
            self._intent.clear()
            memory, self._unsaved = self._unsaved, None
            decisions, self._unacknowledged = self._unacknowledged, []
            failure: SnapshotError | None = None
            if memory is not None:
                try:
                    await self._store.save(memory)
                    backoff.reset()
                except SnapshotError as error:
                    failure = error
            for decision in decisions:
                self._planner.complete(decision)
            if failure is not None:
                if failure.reason is Reason.STALE_FENCE:
                    raise failure
                log.warning("targets_not_remembered", cause=str(failure))
                self._unsaved = self._unsaved or memory
                await asyncio.sleep(backoff.next())
                self._intent.set()

    async def _publish_status(self) -> None:
        while True:
            self._changed.clear()
            await self._publisher.publish(fleet_status(self.state, self._clock()))
            await asyncio.sleep(STATUS_AT_MOST_S)
            try:
                async with asyncio.timeout(STATUS_AT_LEAST_S):
                    await self._changed.wait()
            except TimeoutError:
                continue


def _new_from(before: State, after: State) -> int:
    """Where the records begin that ``before`` did not have; old ones fall off the front."""
    if not before.records:
        return 0
    last = before.records[-1]
    for index in range(len(after.records) - 1, -1, -1):
        if after.records[index] is last:
            return index + 1
    return 0
