"""Which GPUs a snapshot may go onto is decided before anything is started."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dynamo_snapshot.agent.cuda.devices import device_map, record_devices, weights_bytes, without_weights
from dynamo_snapshot.agent.cuda.driver import Device, Inventory
from dynamo_snapshot.errors import SnapshotError
from dynamo_snapshot.model import Reason
from dynamo_snapshot.snapshots.manifest import CudaRecord, WeightSegment

GIB = 1 << 30


def device(uuid: str, **changes: Any) -> Device:
    return msgspec.structs.replace(
        Device(uuid=uuid, name="NVIDIA H200", total_bytes=140 * GIB, free_bytes=100 * GIB), **changes
    )


def host(*devices: Device, driver_version: str = "580.1") -> Inventory:
    return Inventory(driver_version=driver_version, devices=devices)


def record(*uuids: str, needed: int = 20 * GIB) -> CudaRecord:
    return record_devices(host(*map(device, uuids)), uuids, [needed] * len(uuids))


def refusal(kept: CudaRecord, inventory: Inventory, assigned: Sequence[str]) -> Reason:
    with pytest.raises(SnapshotError) as refused:
        device_map(kept, inventory, assigned)
    return refused.value.reason


def test_identical_devices_need_no_map() -> None:
    assert device_map(record("A", "B"), host(device("B"), device("A")), ["A", "B"]) == {}


def test_one_moved_device_puts_all_into_the_map() -> None:
    inventory = host(device("A"), device("B"), device("C"))
    assert device_map(record("A", "B"), inventory, ["A", "C"]) == {"A": "A", "B": "C"}
    assert device_map(record("A", "B"), inventory, ["B", "A"]) == {"A": "B", "B": "A"}


def test_what_is_parked_needs_all_but_its_weights() -> None:
    weights = [
        WeightSegment(address=0, size=size, device=index, tag="weights", digest="d")
        for index, size in ((0, 16 * GIB), (1, 5 * GIB), (0, 3 * GIB), (2, GIB))
    ]
    parked = without_weights(record("A", "B"), weights)
    assert [device.needed_bytes for device in parked.devices] == [GIB, 15 * GIB]
    assert weights_bytes(record("A", "B"), weights) == [19 * GIB, 5 * GIB]
    assert without_weights(record("A", needed=GIB), weights).devices[0].needed_bytes == 0
    small = host(device("A", free_bytes=2 * GIB))
    assert refusal(record("A"), small, ["A"]) is Reason.GPU_OUT_OF_MEMORY
    assert device_map(without_weights(record("A"), weights), small, ["A"]) == {}


@pytest.mark.parametrize(
    ("inventory", "assigned", "reason"),
    [
        (host(device("A"), driver_version="570.9"), ["A"], Reason.DRIVER_MISMATCH),
        (host(device("A"), device("B")), ["A", "B"], Reason.GPU_COUNT_MISMATCH),
        (host(device("A")), [], Reason.GPU_COUNT_MISMATCH),
        (host(device("B")), ["A"], Reason.GPU_UUID_UNMAPPED),
        (host(device("A", mig=True)), ["A"], Reason.MIG_UNSUPPORTED),
        (host(device("B", name="NVIDIA B200")), ["B"], Reason.GPU_MODEL_MISMATCH),
        (host(device("B", total_bytes=80 * GIB)), ["B"], Reason.GPU_MODEL_MISMATCH),
        (host(device("A", free_bytes=20 * GIB - 1)), ["A"], Reason.GPU_OUT_OF_MEMORY),
    ],
)
def test_what_does_not_fit_is_refused(inventory: Inventory, assigned: list[str], reason: Reason) -> None:
    assert refusal(record("A"), inventory, assigned) is reason


def test_one_gpu_twice_is_refused() -> None:
    assert refusal(record("A", "B"), host(device("A"), device("B")), ["A", "A"]) is Reason.GPU_UUID_UNMAPPED


def test_exactly_enough_memory_is_enough_and_unknown_memory_is_tried() -> None:
    assert device_map(record("A"), host(device("A", free_bytes=20 * GIB)), ["A"]) == {}
    assert device_map(record("A"), host(device("A", free_bytes=None)), ["A"]) == {}


def test_a_partitioned_gpu_is_refused_at_capture() -> None:
    with pytest.raises(SnapshotError) as refused:
        record_devices(host(device("A", mig=True)), ["A"], [0])
    assert refused.value.reason is Reason.MIG_UNSUPPORTED


@given(st.permutations(["A", "B", "C", "D"]), st.integers(1, 4))
def test_a_map_names_every_gpu_of_the_capture_and_each_target_once(order: list[str], count: int) -> None:
    kept = record(*"ABCD"[:count])
    assigned = order[:count]
    pairs = device_map(kept, host(*map(device, "ABCD")), assigned)
    assert pairs == {} or (list(pairs) == list("ABCD"[:count]) and list(pairs.values()) == assigned)
    assert (pairs == {}) is (assigned == list("ABCD"[:count]))
