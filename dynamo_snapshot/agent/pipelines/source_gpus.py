"""A source's CUDA side while it is captured: off its GPUs before the dump, back on them right after."""

from __future__ import annotations

from collections.abc import Sequence

from dynamo_snapshot.agent.cuda.collectives import refuse_collectives
from dynamo_snapshot.agent.cuda.devices import record_devices, visible_devices
from dynamo_snapshot.agent.cuda.driver import Inventory
from dynamo_snapshot.agent.cuda.tree import cuda_processes, freeze, process_tree, thaw
from dynamo_snapshot.agent.gpus import VISIBLE_ENV
from dynamo_snapshot.agent.node import Node
from dynamo_snapshot.agent.replica import Replica
from dynamo_snapshot.errors import SnapshotError
from dynamo_snapshot.model import Reason
from dynamo_snapshot.snapshots.manifest import CudaRecord, WeightSegment


async def freeze_source(node: Node, source: Replica, weights: Sequence[WeightSegment]) -> CudaRecord | None:
    """Takes the CUDA processes of ``source``'s tree off the GPU; returns what a restore must know, None without any.

    Whatever fails: they run on. What the source needs to come back stays reserved until it serves.

    Raises:
        SnapshotError: ``collective_alive``, or as :func:`dynamo_snapshot.agent.cuda.tree.freeze`.
    """
    if node.gpus is None or source.pid is None:
        return None
    driver = node.gpus.driver
    pids = list(await cuda_processes(driver, process_tree(source.pid)))
    if not pids:
        return None
    refuse_collectives(pids)
    before = await driver.inventory()
    await freeze(driver, pids, round(node.gpus.settings.lock_timeout_s * 1000))
    after = await driver.inventory()
    spec = source.record.spec
    uuids = tuple(source.record.gpus) or visible_devices(after, spec.environment.get(VISIBLE_ENV))
    needed = [
        _freed(uuid, before, after) + sum(segment.size for segment in weights if segment.device == index)
        for index, uuid in enumerate(uuids)
    ]
    node.note(source, gpus=dict(zip(uuids, needed, strict=True)))
    return record_devices(after, uuids, needed)


async def thaw_source(node: Node, source: Replica) -> None:
    """Brings every CUDA process of ``source``'s tree back to running, from whatever state a capture left it in.

    One that cannot be brought back is beyond help, and the source is ended: the one case in which a source does
    not outlive its capture.

    Raises:
        SnapshotError: ``cuda_restore_failed``, once the source has been ended.
    """
    if node.gpus is None or source.pid is None or source.exit is not None:
        return
    driver = node.gpus.driver
    for last in (False, True):
        try:
            await thaw(driver, list(await cuda_processes(driver, process_tree(source.pid))))
            return
        except SnapshotError as error:
            # A helper that dies says nothing of the source: another one is asked.
            if not last and error.reason is Reason.CUDA_HELPER_DIED:
                continue
            why = f"the capture of {source.id} took it off the GPU for good: {error.message}"
            await node.end(source, Reason.CUDA_RESTORE_FAILED, why)
            raise SnapshotError(Reason.CUDA_RESTORE_FAILED, why, error.remedy) from error


def _freed(uuid: str, before: Inventory, after: Inventory) -> int:
    """How much memory of a GPU a freeze gave free."""
    then, now = _free_bytes(before, uuid), _free_bytes(after, uuid)
    return 0 if then is None or now is None else max(0, now - then)


def _free_bytes(inventory: Inventory, uuid: str) -> int | None:
    return next((device.free_bytes for device in inventory.devices if device.uuid == uuid), None)
