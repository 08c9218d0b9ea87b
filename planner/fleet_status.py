"""Reads the fleet's status, from its file or its NATS subject; whatever goes wrong, there is none.

The policy must work without it: a planner outlives its fleet controller, and a fleet can run on
another host. So nothing here raises, and a status older than ``max_age_s`` counts as none.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from pathlib import Path
from typing import Any, Protocol

import msgspec

from dynamo_snapshot.model import FleetStatus, PoolStatus, ReplicaState, ReplicaStatus, Way, decode
from planner.nats_client import RETRY_S, connected, ended
from planner.observation import PoolView, Role, Starting
from planner.startup import restore_times

log = logging.getLogger(__name__)

_PENDING = frozenset({ReplicaState.ORDERED, ReplicaState.STARTING, ReplicaState.RESTORING, ReplicaState.RESUMING})
_NOT_SERVING = _PENDING | {ReplicaState.PARKED, ReplicaState.DRAINING, ReplicaState.STOPPED, ReplicaState.FAILED}


class FleetStatusSource(Protocol):
    """Where a FleetStatus comes from."""

    async def start(self) -> None:
        """Begins to listen; returns at once and never raises because a server is away."""

    def latest(self) -> FleetStatus | None:
        """The newest status received, of whatever age; None: none that could be read."""

    async def close(self) -> None: ...


class NoFleetStatus:
    """For a planner that is not told about the fleet."""

    async def start(self) -> None:
        return None

    def latest(self) -> FleetStatus | None:
        return None

    async def close(self) -> None:
        return None


class FleetStatusFile:
    """The file that the fleet controller replaces; it is read again when it has changed."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._identity: tuple[int, int] | None = None
        self._status: FleetStatus | None = None

    async def start(self) -> None:
        return None

    def latest(self) -> FleetStatus | None:
        try:
            stat = self._path.stat()
            identity = (stat.st_ino, stat.st_mtime_ns)
            if identity != self._identity:
                self._status = _decoded(self._path.read_bytes(), str(self._path))
                self._identity = identity
        except OSError:
            self._identity, self._status = None, None
        return self._status

    async def close(self) -> None:
        return None


class FleetStatusSubject:
    """The NATS subject that the fleet controller publishes on."""

    def __init__(self, url: str, subject: str) -> None:
        self._url = url
        self._subject = subject
        self._status: FleetStatus | None = None
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        if self._task is None:
            self._task = asyncio.create_task(self._listen(), name="fleet-status")

    def latest(self) -> FleetStatus | None:
        return self._status

    async def close(self) -> None:
        if self._task is not None:
            await ended(self._task)
            self._task = None

    async def _listen(self) -> None:
        import nats.errors  # here, as in planner.nats_client

        async def received(message: Any) -> None:
            status = _decoded(message.data, self._subject)
            if status is not None:
                self._status = status

        while True:
            closed = asyncio.Event()
            client = await connected(self._url, "fleet status", closed.set)
            try:
                # One that has closed already cannot be subscribed with.
                with contextlib.suppress(nats.errors.Error):
                    await client.subscribe(self._subject, cb=received)
                    await closed.wait()
            finally:
                await client.close()
            await asyncio.sleep(RETRY_S)


def pool_view(status: FleetStatus | None, role: Role, now: float, max_age_s: float) -> PoolView | None:
    """What ``status`` says of the pool with ``role``.

    Args:
        now: wall-clock seconds, as ``status.at`` is.
        max_age_s: an older status is none; nor is one from as far ahead, for a clock that was set back would keep it
            new for ever.
    """
    if status is None or abs(now - status.at) > max_age_s:
        return None
    pool: PoolStatus | None = next((pool for pool in status.pools if pool.role == role.value), None)
    if pool is None:
        return None
    return PoolView(
        target=pool.target,
        achievable=pool.achievable,
        unachievable_reason=pool.unachievable_reason,
        not_serving=frozenset(
            str(replica.instance_id)
            for replica in status.replicas
            if replica.pool == pool.pool and replica.instance_id is not None and replica.state in _NOT_SERVING
        ),
        discovery_known=status.discovery_known,
        starting=tuple(
            Starting(way=replica.way.value, age_s=_age(replica, now))
            for replica in status.replicas
            if replica.pool == pool.pool and replica.state in _PENDING and not replica.parks
        ),
        start_times=_start_times(status, pool),
        parked=pool.parked,
    )


def _age(replica: ReplicaStatus, now: float) -> float:
    return max(0.0, now - (replica.since if replica.ordered_at is None else replica.ordered_at))


def _start_times(status: FleetStatus, pool: PoolStatus) -> dict[str, tuple[float, ...]]:
    """Seconds by way; those of a restore are the present snapshot's, or other snapshots' brought to its size."""
    times = {}
    own = [series for series in status.start_times if series.pool == pool.pool]
    cold = tuple(second for series in own if series.way is Way.COLD_START for second in series.seconds)
    restores = [(series.snapshot_id, series.seconds) for series in own if series.way is Way.RESTORE]
    if cold:
        times[Way.COLD_START.value] = cold
    wakes = tuple(second for series in own if series.way is Way.WAKE for second in series.seconds)
    if wakes:
        times[Way.WAKE.value] = wakes
    restore = restore_times(restores, pool.snapshot_id, status.snapshot_bytes)
    if restore:
        times[Way.RESTORE.value] = restore
    return times


def _decoded(data: bytes, source: str) -> FleetStatus | None:
    try:
        return decode(data, FleetStatus)
    except (msgspec.ValidationError, msgspec.DecodeError) as error:
        log.warning("fleet status in %s cannot be read: %s", source, error)
        return None
