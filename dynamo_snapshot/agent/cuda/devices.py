"""Which GPUs a snapshot may be restored onto: decided from its record before CRIU starts. Pure."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from dynamo_snapshot.agent.cuda.driver import Device, Inventory
from dynamo_snapshot.errors import SnapshotError
from dynamo_snapshot.model import Reason
from dynamo_snapshot.snapshots.manifest import CudaRecord, DeviceRecord, WeightSegment


def record_devices(inventory: Inventory, uuids: Sequence[str], needed_bytes: Sequence[int]) -> CudaRecord:
    """Returns the record of a capture on the GPUs ``uuids``, which need ``needed_bytes`` each.

    Raises:
        SnapshotError: ``mig_unsupported``, ``gpu_uuid_unmapped``.
    """
    found = [_found(inventory, uuid) for uuid in uuids]
    return CudaRecord(
        driver_version=inventory.driver_version,
        devices=tuple(
            DeviceRecord(uuid=device.uuid, name=device.name, total_bytes=device.total_bytes, needed_bytes=needed)
            for device, needed in zip(found, needed_bytes, strict=True)
        ),
    )


def weights_bytes(record: CudaRecord, weights: Sequence[WeightSegment]) -> list[int]:
    """Returns how many bytes of weights each of the record's GPUs holds."""
    return [sum(segment.size for segment in weights if segment.device == index) for index in range(len(record.devices))]


def without_weights(record: CudaRecord, weights: Sequence[WeightSegment]) -> CudaRecord:
    """Returns the record of a replica that is parked: its weights stay off the GPU."""
    devices = (
        msgspec.structs.replace(device, needed_bytes=max(0, device.needed_bytes - size))
        for device, size in zip(record.devices, weights_bytes(record, weights), strict=True)
    )
    return msgspec.structs.replace(record, devices=tuple(devices))


def device_map(record: CudaRecord, inventory: Inventory, assigned: Sequence[str]) -> dict[str, str]:
    """Returns where each of the record's GPUs goes; empty when each stays what it was.

    The driver wants every GPU that the process could see in the map, or no map at all
    (``cuCheckpointProcessRestore``); it restores onto the same chip type only.

    Args:
        record: of the snapshot.
        inventory: this host's GPUs, with what is free on them now.
        assigned: the UUIDs given to the replica, in the worker's order.

    Raises:
        SnapshotError: ``driver_mismatch``, ``gpu_count_mismatch``, ``gpu_uuid_unmapped``, ``mig_unsupported``,
            ``gpu_model_mismatch`` or ``gpu_out_of_memory``.
    """
    if record.driver_version != inventory.driver_version:
        raise SnapshotError(
            Reason.DRIVER_MISMATCH,
            f"the snapshot was made under NVIDIA driver {record.driver_version}, here runs {inventory.driver_version}",
            "Restore on a node with that driver; a cold start here can be captured anew.",
        )
    if len(assigned) != len(record.devices):
        raise SnapshotError(
            Reason.GPU_COUNT_MISMATCH,
            f"the snapshot needs {len(record.devices)} GPUs, the replica was given {len(assigned)}",
            "Give it as many as its worker had at capture.",
        )
    if len(set(assigned)) != len(assigned):
        raise SnapshotError(
            Reason.GPU_UUID_UNMAPPED,
            f"the replica was given one GPU twice: {', '.join(assigned)}",
            "Map each of the snapshot's GPUs to a GPU of its own.",
        )
    for old, uuid in zip(record.devices, assigned, strict=True):
        _refuse_unfit(old, _found(inventory, uuid))
    pairs = {old.uuid: new for old, new in zip(record.devices, assigned, strict=True)}
    return {} if all(old == new for old, new in pairs.items()) else pairs


def visible_devices(inventory: Inventory, setting: str | None) -> tuple[str, ...]:
    """Returns the UUIDs of the GPUs that a process sees, in its order.

    Args:
        setting: its ``CUDA_VISIBLE_DEVICES``: indexes, or beginnings of UUIDs; what follows one that is neither
            is not seen (CUDA programming guide, "CUDA environment variables"). None: all are seen.
    """
    everyone = [device.uuid for device in inventory.devices]
    if setting is None:
        return tuple(everyone)
    seen: list[str] = []
    for entry in setting.split(","):
        name = entry.strip()
        if name.isdigit():
            found = everyone[int(name) : int(name) + 1]
        else:
            found = [uuid for uuid in everyone if name and uuid.startswith(name)]
        if len(found) != 1:
            break
        seen += found
    return tuple(seen)


def _found(inventory: Inventory, uuid: str) -> Device:
    for device in inventory.devices:
        if device.uuid == uuid:
            if device.mig:
                raise SnapshotError(
                    Reason.MIG_UNSUPPORTED,
                    f"{device.name} {uuid} is in MIG mode, which the driver's checkpoint does not support",
                    "Use a GPU that is not partitioned.",
                )
            return device
    have = ", ".join(device.uuid for device in inventory.devices) or "none"
    raise SnapshotError(
        Reason.GPU_UUID_UNMAPPED, f"there is no GPU {uuid} here; there are: {have}", "`nvidia-smi -L` lists them."
    )


def _refuse_unfit(old: DeviceRecord, new: Device) -> None:
    if (old.name, old.total_bytes) != (new.name, new.total_bytes):
        raise SnapshotError(
            Reason.GPU_MODEL_MISMATCH,
            f"the snapshot was made on {old.name} with {old.total_bytes} bytes, "
            f"{new.uuid} is {new.name} with {new.total_bytes}",
            "The driver restores only onto the same model.",
        )
    if new.free_bytes is not None and new.free_bytes < old.needed_bytes:
        raise SnapshotError(
            Reason.GPU_OUT_OF_MEMORY,
            f"the snapshot needs {old.needed_bytes} bytes of {new.name} {new.uuid}, {new.free_bytes} are free",
            "Drain or park a replica there.",
        )
