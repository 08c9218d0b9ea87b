"""Which GPUs a replica gets follows from the replicas' records alone, with those on their way counted in."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dynamo_snapshot.agent.cuda.devices import visible_devices
from dynamo_snapshot.agent.cuda.driver import Device, Inventory
from dynamo_snapshot.agent.gpu_budget import assign, left, require_place
from dynamo_snapshot.agent.journal import ReplicaRecord
from dynamo_snapshot.errors import SnapshotError
from dynamo_snapshot.model import Reason, Way, WorkerSpec

NAMES = ("GPU-a", "GPU-b", "GPU-c")


def host(*names: str, free: int | None = 100) -> Inventory:
    devices = tuple(Device(uuid=name, name="G", total_bytes=100, free_bytes=free) for name in names)
    return Inventory(driver_version="580.1", devices=devices)


def replica(served: bool = True, parked: bool = False, **gpus: int) -> ReplicaRecord:
    return ReplicaRecord(
        replica_id="r", pool="p", way=Way.RESTORE, incarnation="i", rpc_port=1, spec=WorkerSpec(command=("w",)),
        order_id="o", ordered_at=0, served=served, parked=parked,
        gpus={f"GPU-{name}": needed for name, needed in gpus.items()},
    )  # fmt: skip


RECORDS = st.lists(st.builds(replica, served=st.booleans(), a=st.integers(0, 90), b=st.integers(0, 90)), max_size=4)


def test_only_what_has_not_served_is_taken_off_what_is_free() -> None:
    found = left(host(*NAMES), [replica(served=False, a=30, b=1), replica(served=False, a=80), replica(a=50)])
    assert [device.free_bytes for device in found.devices] == [0, 99, 100]


def test_what_cannot_be_read_stays_unknown() -> None:
    assert left(host("GPU-a", free=None), [replica(served=False, a=1)]).devices[0].free_bytes is None


def test_the_gpus_of_the_capture_are_preferred_in_their_order() -> None:
    assert assign(host(*NAMES), [], 2, 1, ("GPU-c", "GPU-a")) == ("GPU-c", "GPU-a")


def test_others_are_taken_where_one_of_them_is_full_or_gone() -> None:
    assert assign(host(*NAMES), [replica(c=0)], 2, 1, ("GPU-c", "GPU-a")) == ("GPU-a", "GPU-b")
    assert assign(host(*NAMES), [], 1, 1, ("GPU-z",)) == ("GPU-a",)


def test_the_least_used_comes_first_and_of_these_the_one_with_most_room() -> None:
    inventory = host(*NAMES)
    small, *others = inventory.devices
    inventory = msgspec.structs.replace(inventory, devices=(msgspec.structs.replace(small, free_bytes=7), *others))
    assert assign(inventory, [replica(b=0)], 3, 2) == ("GPU-c", "GPU-a", "GPU-b")


@pytest.mark.parametrize(
    ("count", "records", "reason"),
    [(4, [], Reason.GPU_COUNT_MISMATCH), (3, [replica(b=0)], Reason.NODE_AT_CAPACITY)],
)
def test_too_few_are_refused(count: int, records: list[ReplicaRecord], reason: Reason) -> None:
    with pytest.raises(SnapshotError) as refused:
        assign(host(*NAMES), records, count, 1)
    assert refused.value.reason is reason


@given(RECORDS, st.integers(1, 3), st.integers(1, 3))
def test_no_gpu_ever_has_more_replicas_than_it_takes(records: list[ReplicaRecord], count: int, most: int) -> None:
    before = {name: sum(name in record.gpus for record in records) for name in NAMES}
    try:
        given_to = assign(left(host(*NAMES), records), records, count, most)
    except SnapshotError:
        assert sum(held < most for held in before.values()) < count
        return
    assert len(set(given_to)) == count
    assert all(before[name] < most for name in given_to)


def test_a_parked_replica_takes_no_place_until_it_is_woken() -> None:
    records = [replica(served=False, parked=True, a=0), replica(served=False, parked=True, a=0)]
    assert assign(host("GPU-a"), records, 1, 1) == ("GPU-a",)
    require_place(host("GPU-a"), records, {"GPU-a": 100}, 1)
    records.append(replica(served=False, a=30))
    with pytest.raises(SnapshotError) as full:
        require_place(host("GPU-a"), records, {"GPU-a": 1}, 1)
    assert full.value.reason is Reason.NODE_AT_CAPACITY
    require_place(host("GPU-a", "GPU-b"), records, {"GPU-b": 1}, 1)
    assert assign(host("GPU-a"), records, 1, None) == ("GPU-a",), "to be parked there needs no place"


def test_a_wake_needs_the_memory_that_others_on_their_way_leave() -> None:
    records = [replica(served=False, a=30)]
    require_place(left(host("GPU-a"), records), records, {"GPU-a": 70}, 2)
    with pytest.raises(SnapshotError) as short:
        require_place(left(host("GPU-a"), records), records, {"GPU-a": 71}, 2)
    assert short.value.reason is Reason.GPU_OUT_OF_MEMORY
    require_place(left(host("GPU-a", free=None), records), records, {"GPU-a": 71}, 2)


def test_parked_replicas_are_spread_though_their_capture_was_on_one_gpu() -> None:
    parked = [replica(served=False, parked=True, a=0)]
    assert assign(host(*NAMES), [], 1, None, ("GPU-a",)) == ("GPU-a",)
    assert assign(host(*NAMES), parked, 1, None, ("GPU-a",)) == ("GPU-b",)
    assert assign(host(*NAMES), parked, 1, 1, ("GPU-a",)) == ("GPU-a",), "one that serves goes where no map is needed"
    assert assign(host("GPU-a", "GPU-b"), [replica(b=0)], 1, None) == ("GPU-a",)


@pytest.mark.parametrize(
    ("setting", "seen"),
    [
        (None, NAMES), ("1,0", ("GPU-b", "GPU-a")), ("GPU-c", ("GPU-c",)), ("0,9,1", ("GPU-a",)), ("", ()),
        ("GPU-", ()), (" 2 ", ("GPU-c",)),
    ],
)  # fmt: skip
def test_a_process_sees_what_its_variable_says(setting: str | None, seen: tuple[str, ...]) -> None:
    assert visible_devices(host(*NAMES), setting) == seen
