"""One replica as its agent knows it, and the task that keeps that up to date."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec
import structlog

from dynamo_snapshot.agent.control import ControlDirectory
from dynamo_snapshot.agent.failed_logs import FailedLogs
from dynamo_snapshot.agent.house import House, read_exit
from dynamo_snapshot.agent.journal import ReplicaRecord
from dynamo_snapshot.agent.watch import changes
from dynamo_snapshot.errors import SnapshotError
from dynamo_snapshot.model import Exit, Reason, ReplicaPhase, ReplicaReport, Way
from worker_hooks import holder
from worker_hooks.control import WorkerState
from worker_hooks.lifecycle import State

log = structlog.get_logger()

if TYPE_CHECKING:
    from dynamo_snapshot.agent.pipelines.held_snapshot import HeldSnapshot

T = TypeVar("T")

_BEFORE_READY = frozenset({State.BOOTING, State.ENGINE_READY, State.QUIESCING, State.READY_FOR_SNAPSHOT, State.FAILED})
_LOG_TAIL_BYTES = 2000


def new_incarnation() -> str:
    """A name that no other life of any worker has."""
    return secrets.token_hex(8)


def phase_of(way: Way, ready: bool, released: bool, state: WorkerState | None) -> ReplicaPhase:
    """What is known of a worker, as the fleet needs it.

    Args:
        ready: ``ready-for-snapshot`` is there; the worker's account says so a moment earlier.
        released: it was let go on after that, or after its restore.
        state: the worker's own account.
    """
    name = state.state if state else None
    if name == State.REGISTERED:
        return ReplicaPhase.REGISTERED
    if name in (State.DRAINING, State.STOPPED):
        return ReplicaPhase.DRAINING
    if name == State.PARKED:
        return ReplicaPhase.PARKED
    if released:
        return ReplicaPhase.RESUMING
    if way is Way.RESTORE:
        return ReplicaPhase.RESTORING
    if ready:
        return ReplicaPhase.READY_FOR_SNAPSHOT
    # A worker that has failed was in one of these, and is about to end.
    return ReplicaPhase.STARTING if name is None or name in _BEFORE_READY else ReplicaPhase.RESUMING


class WorkerEnded(SnapshotError):
    """A worker ended before it served.

    Args:
        own: the reason the worker gave, or the agent's for ending it; None: neither.
    """

    def __init__(self, message: str, own: str | None) -> None:
        super().__init__(Reason.WORKER_EXITED, message)
        self.own = own


class Replica:
    """A replica between the order that makes it and the moment its node forgets it.

    Args:
        clock: wall-clock seconds.
        on_change: called whenever there is something new to report.
        failed_logs: where the worker's log goes if it fails.
    """

    def __init__(
        self,
        record: ReplicaRecord,
        clock: Callable[[], float],
        on_change: Callable[[], None],
        failed_logs: FailedLogs | None = None,
    ) -> None:
        self.record = record
        self.house: House | None = None
        self.inner_pid: int | None = None
        """The worker's, inside the house."""
        self.pid: int | None = None
        self.state: WorkerState | None = None
        self.exit: Exit | None = None
        self.phase = ReplicaPhase.STARTING if record.way is Way.COLD_START else ReplicaPhase.RESTORING
        self.since = clock()
        self.ready_at: float | None = None
        """When the worker became ready-for-snapshot."""
        self.capturing = False
        self.ending: tuple[Reason, str] | None = None
        """Why the agent itself ends it."""
        self.released = False
        self.kept_log: Path | None = None
        """Where the log of the worker that failed is."""
        self._failed_logs = failed_logs
        self._log: Path | None = None
        """The worker's."""
        self.waking = False
        """A wake is under way."""
        self.woken = False
        """It has been let go on after it was parked."""
        self.snapshot: HeldSnapshot | None = None
        """Kept for it while it is parked."""
        self._clock, self._on_change = clock, on_change
        self._changed = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    def __repr__(self) -> str:
        return f"<Replica {self.record.replica_id} {self.phase} {self.record.incarnation}>"

    @property
    def id(self) -> str:
        return self.record.replica_id

    def report(self) -> ReplicaReport:
        state = self.state
        return ReplicaReport(
            replica_id=self.id,
            pool=self.record.pool,
            incarnation=self.record.incarnation,
            way=self.record.way,
            phase=self.phase,
            since=self.since,
            rpc_port=self.record.rpc_port,
            pid=self.pid,
            snapshot_id=self.record.snapshot_id,
            self_test_at=state.self_test_at if state else None,
            evidence=dict(state.evidence) if state else {},
            exit=self.exit,
        )

    def move_in(self, house: House) -> None:
        """Begins to follow what happens in ``house``."""
        self.house, self._log = house, house.log
        self._task = asyncio.create_task(self._follow(house), name=f"replica-{self.id}")

    def locate(self, inner_pid: int) -> None:
        """Notes which process of the house is the worker."""
        assert self.house is not None
        self.inner_pid = inner_pid
        self.pid = self.house.host_pid(inner_pid)

    def let_go(self, environment: dict[str, str]) -> None:
        """Releases the worker, which waits at ready-for-snapshot or was just restored, as this record's incarnation.

        One that is to be parked goes no further than that.
        """
        assert self.house is not None
        self.house.control.release(self.record.incarnation, dict(environment), park=self.record.parked)
        self.released = True
        self.update()

    def wake(self) -> None:
        """Lets the parked worker go on to serving."""
        assert self.house is not None
        self.house.control.wake(self.record.incarnation)
        self.woken = True
        self.update()

    def leave_snapshot(self) -> None:
        """What was kept for it may be removed."""
        if self.snapshot is not None:
            self.snapshot.leave()
            self.snapshot = None

    def update(self) -> None:
        """Takes in what the worker says now."""
        if self.exit is None:
            assert self.house is not None
            self.state = self._account(self.house.control)
            if self.ready_at is None and self.house.control.is_ready_for_snapshot():
                self.ready_at = self._clock()
            phase = phase_of(self.record.way, self.ready_at is not None, self.released, self.state)
            if self.capturing and phase is ReplicaPhase.READY_FOR_SNAPSHOT:
                phase = ReplicaPhase.CAPTURING
            if self.woken and phase is ReplicaPhase.PARKED:  # it has not heard yet
                phase = ReplicaPhase.RESUMING
        else:
            phase = ReplicaPhase.EXITED
        if phase is not self.phase:
            self.phase, self.since = phase, self._clock()
        self._changed.set()
        self._changed = asyncio.Event()
        self._on_change()

    async def until(self, look: Callable[[], T | None]) -> T:
        """Returns the first answer of ``look`` that is not None; it is asked again at every change.

        Raises:
            WorkerEnded: when it ends before.
        """
        while (found := look()) is None:
            if self.exit is not None:
                raise self.exited_error()
            await self._changed.wait()
        return found

    def exited_error(self) -> WorkerEnded:
        assert self.exit is not None
        how = f"with status {self.exit.code}" if self.exit.code >= 0 else f"by signal {-self.exit.code}"
        why = f": {self.exit.message}" if self.exit.reason else self._last_words()
        return WorkerEnded(f"the worker of {self.id} ended {how} before it served{why}", self.exit.reason)

    def keep_log(self) -> None:
        """Keeps the worker's log, as that of one that failed, before its house is removed."""
        if self.kept_log is None and self._failed_logs is not None and self._log is not None:
            self.kept_log = self._failed_logs.keep(self.record.pool, self._log)

    async def gone(self) -> Exit:
        """Returns how the worker ended, once it has."""
        while self.exit is None:
            await self._changed.wait()
        return self.exit

    async def close(self) -> None:
        """Stops following; the house is left as it is."""
        self.leave_snapshot()
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        if self.house is not None:
            await self.house.holder.close()

    async def _follow(self, house: House) -> None:
        client = house.holder
        async with changes(house.control.path) as changed:
            waiter: asyncio.Task[bool] | None = None
            try:
                while not client.exited.done() and not client.lost.done():
                    changed.clear()
                    self.update()
                    waiter = asyncio.create_task(changed.wait())
                    news: set[asyncio.Future[Any]] = {waiter, client.exited, client.lost}
                    await asyncio.wait(news, return_when=asyncio.FIRST_COMPLETED)
                    waiter.cancel()
            finally:
                if waiter is not None:
                    waiter.cancel()
        # The last lines of both may have come with the end itself.
        self.state = self._account(house.control)
        self.settle(client.exited.result() if client.exited.done() else read_exit(house.path))

    def settle(self, exit_: Exit | None, left: Path | None = None) -> None:
        """Notes the worker's end; None: nobody saw it, since its holder went too.

        Args:
            left: the folder of its house, where it ended before this agent could follow it.
        """
        if left is not None:
            self.state, self._log = self._account(ControlDirectory(left / holder.CONTROL)), left / holder.WORKER_LOG
        if exit_ is None:
            exit_ = Exit(code=-9, at=self._clock())
            if self.ending is None:
                self.ending = (Reason.HOLDER_FAILED, "the holder ended, and everything in its house with it")
        reason: str | None = None
        message = ""
        if self.state and self.state.state == State.FAILED:
            reason, message = self.state.reason, self.state.message
        if reason is None and self.ending is not None:
            reason, message = self.ending[0].value, self.ending[1]
        if exit_.code and self.ending is None:
            self.keep_log()
            message = message or (f"exit status {exit_.code}" if exit_.code > 0 else f"ended by signal {-exit_.code}")
            message += f"; its log is kept: {self.kept_log}" if self.kept_log else ""
        self.exit = msgspec.structs.replace(exit_, reason=reason, message=message)
        self.leave_snapshot()
        self.update()

    def _account(self, control: ControlDirectory) -> WorkerState | None:
        """What the worker says; what it said before, where that cannot be read now."""
        try:
            return control.state() or self.state
        except SnapshotError as error:
            log.warning("worker_state_unreadable", replica=self.id, cause=str(error))
            return self.state

    def _last_words(self) -> str:
        line = last_line(self._log) if self._log else ""
        return f"; its log ends with: {line}" if line else ""


def last_line(log: Path) -> str:
    """The last line of a worker's log that says anything."""
    try:
        with log.open("rb") as file:
            file.seek(max(0, file.seek(0, 2) - _LOG_TAIL_BYTES))
            lines = file.read().decode(errors="replace").split("\n")
    except OSError:
        return ""
    return next((line.strip() for line in reversed(lines) if line.strip()), "")
