"""The driver's checkpoint of a whole process tree: all locked before any is checkpointed, or none at all.

Pids are the host's. Calls for different processes run side by side; the driver keeps them apart.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterable, Sequence
from pathlib import Path
from typing import Any

from dynamo_snapshot.agent.cuda.driver import AsyncCheckpointDriver, CudaState, DeviceMap
from dynamo_snapshot.errors import SnapshotError
from dynamo_snapshot.model import Reason
from worker_hooks import guard

NO_MAP: DeviceMap = {}


def process_tree(root: int) -> list[int]:
    """Returns ``root`` and all its descendants, parents first; empty if it has gone."""
    return list(guard.tree(root))


async def cuda_processes(driver: AsyncCheckpointDriver, pids: Iterable[int]) -> dict[int, CudaState]:
    """Returns those of ``pids`` that use CUDA, with their states.

    Raises:
        SnapshotError: ``cuda_probe_failed`` when the driver cannot say of one: unknown is not none.
    """
    listed = list(pids)
    states = await asyncio.gather(*(_probe(driver, pid) for pid in listed))
    return {pid: state for pid, state in zip(listed, states, strict=True) if state is not None}


async def _probe(driver: AsyncCheckpointDriver, pid: int) -> CudaState | None:
    try:
        return await driver.state(pid)
    except SnapshotError:
        if not _has_gone(pid):
            raise
        return None  # it ended since it was listed


def _has_gone(pid: int) -> bool:
    return not Path(f"/proc/{pid}").exists()


async def freeze(driver: AsyncCheckpointDriver, pids: Sequence[int], lock_timeout_ms: int) -> None:
    """Takes the CUDA processes ``pids`` off the GPU; on any failure all of them run again.

    Raises:
        SnapshotError: of the first call that failed. When a process could not be brought back, the message
            says so and the reason is ``cuda_restore_failed``: it must be ended.
    """
    try:
        await _all(driver.lock(pid, lock_timeout_ms) for pid in pids)
        await _all(driver.checkpoint(pid) for pid in pids)
    except BaseException as error:
        try:
            await asyncio.shield(asyncio.ensure_future(thaw(driver, pids)))
        except SnapshotError as stuck:
            raise SnapshotError(
                Reason.CUDA_RESTORE_FAILED,
                f"{error}, and then the tree could not be brought back: {stuck.message}",
                "The worker must be ended.",
            ) from error
        raise


async def thaw(driver: AsyncCheckpointDriver, pids: Sequence[int], devices: DeviceMap = NO_MAP) -> None:
    """Brings the CUDA processes ``pids`` to running, side by side, from whatever state each is in.

    Serves a restored tree, a source that goes on after its capture, and a failed freeze.

    Raises:
        SnapshotError: of the first that failed, once all have been tried. After a restore: end the tree.
    """
    await _all(_thaw(driver, pid, devices) for pid in pids)


async def _thaw(driver: AsyncCheckpointDriver, pid: int, devices: DeviceMap) -> None:
    state = await driver.state(pid)
    if state is CudaState.CHECKPOINTED:
        await driver.restore(pid, devices)
        state = CudaState.LOCKED
    if state is CudaState.LOCKED:
        await driver.unlock(pid)
    elif state is not CudaState.RUNNING:
        raise SnapshotError(
            Reason.CUDA_RESTORE_FAILED,
            f"process {pid} cannot be brought back from CUDA state {state or 'none'}",
            "End the worker; after a failed restore there is no second try.",
        )


async def _all(calls: Iterable[Coroutine[Any, Any, None]]) -> None:
    """Awaits every call to its end, also when cancelled, then raises the first failure.

    A call under way cannot be taken back, so what follows must not begin beside it.
    """
    running = asyncio.gather(*calls, return_exceptions=True)
    try:
        results = await asyncio.shield(running)
    except asyncio.CancelledError:
        await running
        raise
    for result in results:
        if isinstance(result, BaseException):
            raise result
