"""What an agent must still know after a crash: orders begun, outcomes, replicas, the highest fence.

An append-only file of JSON lines. A line is written before its effect; :meth:`Journal.synced` waits until
all lines so far are on the device, in a thread that syncs once for everyone who waits. The file is
rewritten as its own summary when it is opened and when it has grown.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from pathlib import Path

import msgspec
import structlog

from dynamo_snapshot.errors import SnapshotError
from dynamo_snapshot.model import Order, Outcome, Reason, Value, Way, WorkerSpec, encode

log = structlog.get_logger()

KEEP_OUTCOMES = 1000
"""Outcomes remembered after their orders left the wanted list: should one come back, it is not carried out again."""
_COMPACT_LINES = 5000


class ReplicaRecord(Value, frozen=True):
    """What an agent needs to adopt a replica of its predecessor."""

    replica_id: str
    pool: str
    way: Way
    incarnation: str
    rpc_port: int
    spec: WorkerSpec
    order_id: str
    ordered_at: float
    """Wall-clock seconds at which the fleet issued the order that made it."""
    capture: bool = False
    snapshot_id: str | None = None
    served: bool = False
    """It has registered: from then on it survives its agent."""


class FenceSeen(Value, frozen=True, tag="fence"):
    fence: int


class Begun(Value, frozen=True, tag="begun"):
    order: Order


class Committed(Value, frozen=True, tag="committed"):
    order_id: str
    phase: str


class Ended(Value, frozen=True, tag="ended"):
    outcome: Outcome


class ReplicaNoted(Value, frozen=True, tag="replica"):
    record: ReplicaRecord


class ReplicaGone(Value, frozen=True, tag="gone"):
    replica_id: str


Entry = FenceSeen | Begun | Committed | Ended | ReplicaNoted | ReplicaGone


class JournalState:
    """The sum of a journal's entries."""

    def __init__(self) -> None:
        self.fence = 0
        self.open: dict[str, Order] = {}
        """Orders begun and not ended, by id."""
        self.committed: dict[str, str] = {}
        """By order id: the committing phase that was begun."""
        self.outcomes: dict[str, Outcome] = {}
        """By order id, oldest first."""
        self.replicas: dict[str, ReplicaRecord] = {}

    def apply(self, entry: Entry) -> None:
        match entry:
            case FenceSeen(fence=fence):
                self.fence = max(self.fence, fence)
            case Begun(order=order):
                self.open[order.id] = order
            case Committed(order_id=order_id, phase=phase):
                self.committed[order_id] = phase
            case Ended(outcome=outcome):
                self.open.pop(outcome.order_id, None)
                self.committed.pop(outcome.order_id, None)
                # The first outcome stands: an order ends once.
                self.outcomes.setdefault(outcome.order_id, outcome)
                while len(self.outcomes) > KEEP_OUTCOMES:
                    self.outcomes.pop(next(iter(self.outcomes)))
            case ReplicaNoted(record=record):
                self.replicas[record.replica_id] = record
            case ReplicaGone(replica_id=replica_id):
                self.replicas.pop(replica_id, None)

    def entries(self) -> list[Entry]:
        """The shortest list of entries with this sum."""
        return [
            FenceSeen(fence=self.fence),
            *(Ended(outcome=outcome) for outcome in self.outcomes.values()),
            *(Begun(order=order) for order in self.open.values()),
            *(Committed(order_id=order_id, phase=phase) for order_id, phase in self.committed.items()),
            *(ReplicaNoted(record=record) for record in self.replicas.values()),
        ]


class Journal:
    """The journal of one agent. Used from one event loop."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.state = JournalState()
        path.parent.mkdir(parents=True, exist_ok=True)
        self._read()
        self._lines = 0
        self._written = self._flushed = 0
        self._flushing: asyncio.Task[None] | None = None
        self._file = self._rewrite()

    def append(self, entry: Entry) -> None:
        """Writes ``entry``: it survives this process at once, the host's crash after :meth:`synced`."""
        self.state.apply(entry)
        self._file.write(encode(entry) + b"\n")
        self._written += 1
        self._lines += 1
        if self._lines > _COMPACT_LINES:
            self._file.close()
            self._file = self._rewrite()

    async def synced(self) -> None:
        """Returns once every entry appended so far is on the device."""
        wanted = self._written
        while self._flushed < wanted:
            if self._flushing is None:
                self._flushing = asyncio.create_task(self._flush(), name="journal-sync")
            await asyncio.shield(self._flushing)

    async def commit(self, order_id: str, phase: str) -> None:
        """Notes, on the device, that a phase which cannot be taken back is about to begin."""
        self.append(Committed(order_id=order_id, phase=phase))
        await self.synced()

    def close(self) -> None:
        self._file.close()

    async def _flush(self) -> None:
        written, descriptor = self._written, os.dup(self._file.fileno())
        try:
            await asyncio.to_thread(os.fdatasync, descriptor)
            self._flushed = max(self._flushed, written)
        finally:
            os.close(descriptor)
            self._flushing = None

    def _read(self) -> None:
        try:
            lines = self.path.read_bytes().split(b"\n")
        except FileNotFoundError:
            return
        for number, line in enumerate(lines, 1):
            if not line:
                continue
            try:
                self.state.apply(msgspec.json.decode(line, type=Entry))
            except msgspec.MsgspecError as error:
                if number == len(lines):  # cut short by a crash: its effect was never begun
                    log.warning("last journal line is cut short", path=str(self.path))
                    return
                raise SnapshotError(
                    Reason.INTERNAL_ERROR,
                    f"{self.path}:{number}: not a journal entry: {error}",
                    "Something else wrote there. Move it away: replicas of the earlier agent are then ended.",
                ) from error

    def _rewrite(self) -> _Appender:
        """Replaces the file by the summary of its state, and opens that."""
        temporary = self.path.with_name(f".{self.path.name}.tmp")
        entries = self.state.entries()
        try:
            with temporary.open("wb") as file:
                file.write(b"".join(encode(entry) + b"\n" for entry in entries))
                file.flush()
                os.fsync(file.fileno())
            temporary.rename(self.path)
        except OSError:
            with contextlib.suppress(OSError):
                temporary.unlink()
            raise
        self._lines = len(entries)
        self._flushed = self._written
        return _Appender(self.path)


class _Appender:
    """An unbuffered file: a line that was written is the kernel's, whatever happens to this process."""

    def __init__(self, path: Path) -> None:
        self._descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC)

    def write(self, data: bytes) -> None:
        while data:
            data = data[os.write(self._descriptor, data) :]

    def fileno(self) -> int:
        return self._descriptor

    def close(self) -> None:
        os.close(self._descriptor)
