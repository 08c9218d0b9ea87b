"""What an agent must still know after a crash: orders begun, outcomes, replicas, the highest fence.

An append-only file of JSON lines. A line is written before its effect; :meth:`Journal.synced` waits until
all lines so far are on the device, in a thread that syncs once for everyone who waits. The file is
rewritten as its own summary when it is opened, when it has grown, and when a line could not be written.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
from pathlib import Path

import msgspec
import structlog

from dynamo_snapshot.durable import sync_path
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
    gpus: dict[str, int] = msgspec.field(default_factory=dict)
    """The GPUs it is on, by UUID in its own order: the bytes it needs of each, 0 where nobody knows.

    Of a parked one: what it is still to take before it is parked, then nothing.
    """
    parked: bool = False
    """Made to be parked, and not woken since: it takes up no serving place of its GPUs."""
    served: bool = False
    """It has registered: from then on it survives its agent, and its GPU memory shows as used."""


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
        self._behind = False
        """The state has what the file has not."""
        self._written = self._flushed = 0
        self._flushing: asyncio.Task[None] | None = None
        try:
            self._file = self._rewrite()
        except OSError as error:
            raise self._unwritable(error) from error

    def append(self, entry: Entry) -> None:
        """Writes what is about to be done: it survives this process at once, the host's crash after :meth:`synced`.

        Raises:
            SnapshotError: ``disk_full``, or ``disk_failed`` for another fault of the disk; ``entry`` is in
                neither file nor state then, and must not be done.
        """
        try:
            self._write(entry)
        except OSError as error:
            raise self._unwritable(error) from error
        self._apply(entry)

    def keep(self, entry: Entry) -> None:
        """Writes what has happened already: it is so even where it cannot be written, and is written later."""
        try:
            self._write(entry)
        except OSError as error:
            log.error("journal_not_written", path=str(self.path), cause=str(error))
            self._behind = True
        self._apply(entry)

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

    def _write(self, entry: Entry) -> None:
        if self._behind or self._lines >= _COMPACT_LINES:
            self._file, old = self._rewrite(), self._file
            old.close()
            self._behind = False
        self._file.write(encode(entry) + b"\n")

    def _apply(self, entry: Entry) -> None:
        self.state.apply(entry)
        self._written += 1
        self._lines += 1

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
        except OSError as error:
            raise SnapshotError(
                Reason.NOT_PRIVILEGED if isinstance(error, PermissionError) else Reason.DISK_FAILED,
                f"{self.path} cannot be read: {error.strerror}",
                "Run the agent as root. A journal that cannot be read may be moved away: replicas of the earlier "
                "agent are then ended.",
            ) from error
        for number, line in enumerate(lines, 1):
            if not line:
                continue
            try:
                self.state.apply(msgspec.json.decode(line, type=Entry))
            except msgspec.MsgspecError as error:
                if number == len(lines):  # cut short by a crash: its effect was never begun
                    log.warning("journal_line_cut_short", path=str(self.path))
                    return
                raise SnapshotError(
                    Reason.STATE_CORRUPT,
                    f"{self.path}:{number}: not a journal entry: {error}",
                    "Something else wrote there. Move it away: replicas of the earlier agent are then ended.",
                ) from error

    def _rewrite(self) -> _Appender:
        """Replaces the file by the summary of its state, and opens that; where it fails the old file stays."""
        temporary = self.path.with_name(f".{self.path.name}.tmp")
        entries = self.state.entries()
        try:
            with temporary.open("wb") as file:
                file.write(b"".join(encode(entry) + b"\n" for entry in entries))
                file.flush()
                os.fsync(file.fileno())
            opened = _Appender(temporary)
            try:
                temporary.rename(self.path)
            except OSError:
                opened.close()
                raise
        except OSError:
            with contextlib.suppress(OSError):
                temporary.unlink()
            raise
        try:
            sync_path(self.path.parent)  # else a power cut could bring back the old file, without what follows here
        except OSError as error:
            log.error("journal_folder_not_synced", path=str(self.path), cause=str(error))
        self._lines = len(entries)
        self._flushed = self._written
        return opened

    def _unwritable(self, error: OSError) -> SnapshotError:
        what = f"{self.path} cannot be written: {error.strerror}"
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            remedy = "Free space in agent.runtime_dir: until then no order is begun."
            return SnapshotError(Reason.DISK_FULL, what, remedy)
        if isinstance(error, PermissionError):
            return SnapshotError(Reason.NOT_PRIVILEGED, what, "Run the agent as root.")
        return SnapshotError(
            Reason.DISK_FAILED, what, "Look after the disk of agent.runtime_dir: until then no order is begun."
        )


class _Appender:
    """An unbuffered file: a line that was written is the kernel's, whatever happens to this process."""

    def __init__(self, path: Path) -> None:
        self._descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC)
        self._size = os.fstat(self._descriptor).st_size

    def write(self, line: bytes) -> None:
        """Writes all of ``line`` or, where that fails, nothing: a torn line in the middle could never be read."""
        left = line
        try:
            while left:
                left = left[os.write(self._descriptor, left) :]
        except OSError:
            os.ftruncate(self._descriptor, self._size)
            raise
        self._size += len(line)

    def fileno(self) -> int:
        return self._descriptor

    def close(self) -> None:
        os.close(self._descriptor)
