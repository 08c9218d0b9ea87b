"""Takes down all that an agent made on this host, and says what is still there."""

from __future__ import annotations

import asyncio
import contextlib
import signal
from pathlib import Path

from dynamo_snapshot.agent.cgroups import Cgroups
from dynamo_snapshot.agent.control import ControlDirectory
from dynamo_snapshot.agent.gpus import outlive_residents, residents
from dynamo_snapshot.agent.house import MARK, STANDBY, HostHouses, House
from dynamo_snapshot.agent.mounts import mount_points
from dynamo_snapshot.agent.process import marked_processes
from dynamo_snapshot.errors import SnapshotError
from worker_hooks import holder

RESIDENTS_S = 10.0
"""What a CUDA helper or loader whose agent has gone gets to end by itself."""


async def teardown(runtime_dir: Path, drain_timeout_s: float = 0.0) -> list[str]:
    """Ends every replica of ``runtime_dir`` and removes its houses, once its agent has gone.

    Args:
        drain_timeout_s: how long workers may finish what is in flight; then, or at once with 0, they are killed.

    Returns:
        What could not be removed, as :func:`left_behind`.
    """
    houses = HostHouses(runtime_dir)
    if drain_timeout_s > 0:
        found = await asyncio.gather(*(houses.find(replica_id) for replica_id in houses.existing()))
        await asyncio.gather(*(_drain(house, drain_timeout_s) for house in found if house is not None))
    await asyncio.gather(*(houses.remove(replica_id) for replica_id in houses.existing()))
    await houses.clear()
    await outlive_residents(runtime_dir, RESIDENTS_S)
    houses.dismantle()
    return left_behind(runtime_dir) + _left_of_agent(runtime_dir)


def left_behind(runtime_dir: Path) -> list[str]:
    """Processes, mounts, cgroups and files of replicas of ``runtime_dir`` that are still on this host."""
    replicas = runtime_dir / "replicas"
    found = [f"process {pid}" for pid in _processes(replicas) + _moved_in(runtime_dir / STANDBY)]
    found += [f"mount {point}" for point in mount_points(replicas)]
    found += [f"cgroup {group}" for group in Cgroups(runtime_dir).existing()]
    if replicas.is_dir():
        found += [f"file {path}" for path in sorted(replicas.rglob("*"))]
    return found


def _left_of_agent(runtime_dir: Path) -> list[str]:
    """The same of what an agent keeps for itself: houses made ahead, resident processes."""
    standby = runtime_dir / STANDBY
    pids = [*_processes(standby), *residents(runtime_dir)]
    return [f"process {pid}" for pid in pids] + [f"file {path}" for path in sorted(standby.rglob("*"))]


async def _drain(house: House, timeout_s: float) -> None:
    try:
        with contextlib.suppress(TimeoutError, SnapshotError):
            if ControlDirectory(house.path / holder.CONTROL).state() is not None:
                await house.holder.signal(signal.SIGTERM)
                async with asyncio.timeout(timeout_s):
                    await house.holder.lost
    finally:
        await house.holder.close()


def _moved_in(standby: Path) -> list[int]:
    """Holders of houses that were made ahead and then became a replica's."""
    still = {pid for house in standby.glob("*") for pid in marked_processes(MARK, str(house))}
    return [pid for pid in _processes(standby) if pid not in still]


def _processes(replicas: Path) -> list[int]:
    """Holders, and what serves them; a worker lives no longer than its holder."""
    return marked_processes(MARK, f"{replicas}/", prefix=True)
