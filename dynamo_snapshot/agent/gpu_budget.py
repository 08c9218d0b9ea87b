"""Which GPUs a replica gets, and what is left of them with the replicas on their way counted in. Pure.

Nothing is remembered: what is reserved follows from the replicas' records, so it is right after a crash.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

import msgspec

from dynamo_snapshot.agent.cuda.driver import Inventory
from dynamo_snapshot.agent.journal import ReplicaRecord
from dynamo_snapshot.errors import SnapshotError
from dynamo_snapshot.model import Reason


def left(inventory: Inventory, records: Iterable[ReplicaRecord]) -> Inventory:
    """Returns ``inventory`` less what replicas that have not served yet will take.

    Args:
        inventory: this host's GPUs, with what is free on them now.
        records: of the living replicas. The memory of one that has served is not free any more.
    """
    coming: Counter[str] = Counter()
    for record in records:
        if not record.served:
            coming.update(record.gpus)
    devices = (
        device
        if device.free_bytes is None
        else msgspec.structs.replace(device, free_bytes=max(0, device.free_bytes - coming[device.uuid]))
        for device in inventory.devices
    )
    return msgspec.structs.replace(inventory, devices=tuple(devices))


def assign(
    inventory: Inventory,
    records: Iterable[ReplicaRecord],
    count: int,
    replicas_per_gpu: int | None,
    preferred: Sequence[str] = (),
) -> tuple[str, ...]:
    """Returns the UUIDs of ``count`` GPUs for one more replica.

    All of ``preferred`` (those of its capture, in its order) where each takes another replica: then the driver
    needs no device map. Otherwise those with the fewest replicas, and of these with the most free memory.
    Parked replicas take no place until they are woken, but are spread like others, for they are woken where they are.

    Args:
        inventory: as :func:`left` returns it.
        records: of the living replicas.
        replicas_per_gpu: places that each has; None: for a replica that is to be parked.

    Raises:
        SnapshotError: ``gpu_count_mismatch`` when there are fewer at all, ``node_at_capacity`` when too many are full.
    """
    if count > len(inventory.devices):
        raise SnapshotError(
            Reason.GPU_COUNT_MISMATCH,
            f"the replica needs {count} GPUs, this host has {len(inventory.devices)}",
            "Order it on a node that has as many.",
        )
    records = list(records)
    held = held_places(records)
    there = Counter(uuid for record in records for uuid in record.gpus)
    open_ = [device for device in inventory.devices if replicas_per_gpu is None or held[device.uuid] < replicas_per_gpu]
    if len(open_) < count:
        raise SnapshotError(
            Reason.NODE_AT_CAPACITY,
            f"the replica needs {count} GPUs; {len(inventory.devices) - len(open_)} of {len(inventory.devices)} "
            f"have {replicas_per_gpu} replicas, as many as each takes",
            "Drain one, or raise agent.gpu.replicas_per_gpu in fleet.yaml.",
        )
    ranked = sorted(
        open_, key=lambda device: (held[device.uuid], there[device.uuid], -(device.free_bytes or 0), device.uuid)
    )
    if len(preferred) == count and set(preferred) <= {device.uuid for device in open_}:
        fewest = there[ranked[0].uuid] if ranked else 0
        if replicas_per_gpu is not None or all(there[uuid] <= fewest for uuid in preferred):
            return tuple(preferred)
    return tuple(device.uuid for device in ranked[:count])


def require_place(
    inventory: Inventory, records: Iterable[ReplicaRecord], needed: Mapping[str, int], replicas_per_gpu: int
) -> None:
    """Refuses a wake for which there is no room now.

    Args:
        inventory: as :func:`left` returns it.
        records: of the living replicas.
        needed: bytes that the parked replica will take of each of its GPUs, beside what it has.

    Raises:
        SnapshotError: ``node_at_capacity`` or ``gpu_out_of_memory``.
    """
    held = held_places(records)
    for device in inventory.devices:
        if device.uuid not in needed:
            continue
        if held[device.uuid] >= replicas_per_gpu:
            raise SnapshotError(
                Reason.NODE_AT_CAPACITY,
                f"{device.uuid} has {held[device.uuid]} serving replicas, as many as it takes",
                "Drain one, or raise agent.gpu.replicas_per_gpu in fleet.yaml.",
            )
        if device.free_bytes is not None and device.free_bytes < needed[device.uuid]:
            raise SnapshotError(
                Reason.GPU_OUT_OF_MEMORY,
                f"the replica takes {needed[device.uuid]} more bytes of {device.uuid} when it wakes, "
                f"{device.free_bytes} are free",
                "Drain or park a replica there.",
            )


def held_places(records: Iterable[ReplicaRecord]) -> Counter[str]:
    """How many serving places of each GPU are taken; parked replicas take none."""
    return Counter(uuid for record in records if not record.parked for uuid in record.gpus)
