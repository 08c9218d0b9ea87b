"""The real driver keeps the table that the fake is made of, and fails with the reasons that are promised."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Callable

import pytest
from gpu.subjects import Subject
from support.cuda_conformance import replay, replay_without_cuda

from dynamo_snapshot.agent.cuda.devices import device_map, record_devices
from dynamo_snapshot.agent.cuda.driver import CheckpointDriver, CudaState
from dynamo_snapshot.errors import SnapshotError
from dynamo_snapshot.model import Reason

StartSubject = Callable[..., Subject]
ELSEWHERE = "GPU-01234567-89ab-cdef-0123-456789abcdef"


def test_the_state_table(driver: CheckpointDriver, subject: StartSubject) -> None:
    process = subject()
    replay(driver, process.pid)
    assert process.ask("tokens") == process.tokens


def test_a_process_without_cuda(driver: CheckpointDriver) -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        replay_without_cuda(driver, process.pid)
        process.kill()


def test_of_a_process_that_has_gone_the_driver_cannot_say(driver: CheckpointDriver) -> None:
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    with pytest.raises(SnapshotError, match="CUDA_ERROR_OPERATING_SYSTEM") as unknown:
        driver.state(process.pid)
    assert unknown.value.reason is Reason.CUDA_PROBE_FAILED


def test_the_inventory_is_that_of_this_host(driver: CheckpointDriver) -> None:
    inventory = driver.inventory()
    listed = subprocess.run(
        ["nvidia-smi", "--query-gpu=uuid,name,driver_version", "--format=csv,noheader"],
        capture_output=True,
        text=True,
        check=True,
    ).stdout.split("\n")
    assert [f"{d.uuid}, {d.name}, {inventory.driver_version}" for d in inventory.devices] == listed[:-1]
    for device in inventory.devices:
        assert 0 < (device.free_bytes or 0) <= device.total_bytes


def test_a_checkpointed_process_holds_nothing_of_the_gpu(driver: CheckpointDriver, subject: StartSubject) -> None:
    before = driver.inventory().devices[0].free_bytes or 0
    process = subject(mib=2048)
    driver.lock(process.pid, 5000)
    driver.checkpoint(process.pid)
    try:
        assert abs((driver.inventory().devices[0].free_bytes or 0) - before) < 64 << 20
    finally:
        driver.restore(process.pid, {})
        driver.unlock(process.pid)
    assert process.ask("tokens") == process.tokens


def test_a_busy_process_times_out_and_runs_on(driver: CheckpointDriver, subject: StartSubject) -> None:
    process = subject()
    process.ask("busy 4")
    time.sleep(0.3)
    began = time.monotonic()
    with pytest.raises(SnapshotError) as timed_out:
        driver.lock(process.pid, 500)
    assert time.monotonic() - began < 3
    assert timed_out.value.reason is Reason.CUDA_LOCK_TIMEOUT
    assert driver.state(process.pid) is CudaState.RUNNING
    assert process.ask("tokens") == process.tokens


def test_another_gpu_is_refused_before_and_by_the_driver(driver: CheckpointDriver, subject: StartSubject) -> None:
    process = subject()
    inventory = driver.inventory()
    here = inventory.devices[0].uuid
    record = record_devices(inventory, [here], [0])
    with pytest.raises(SnapshotError) as refused:
        device_map(record, inventory, [ELSEWHERE])
    assert refused.value.reason is Reason.GPU_UUID_UNMAPPED
    driver.lock(process.pid, 5000)
    driver.checkpoint(process.pid)
    with pytest.raises(SnapshotError) as failed:
        driver.restore(process.pid, {here: ELSEWHERE})
    assert failed.value.reason is Reason.CUDA_RESTORE_FAILED


def test_a_map_onto_the_same_gpu_is_taken(driver: CheckpointDriver, subject: StartSubject) -> None:
    process = subject()
    here = driver.inventory().devices[0].uuid
    driver.lock(process.pid, 5000)
    driver.checkpoint(process.pid)
    driver.restore(process.pid, {here: here})
    driver.unlock(process.pid)
    assert process.ask("tokens") == process.tokens


def test_no_room_on_the_gpu_has_its_reason(driver: CheckpointDriver, subject: StartSubject) -> None:
    """Another process takes the GPU's memory between checkpoint and restore."""
    before = driver.inventory().devices[0].free_bytes or 0
    process = subject(mib=8192)
    record = record_devices(driver.inventory(), [driver.inventory().devices[0].uuid], [9 << 30])
    driver.lock(process.pid, 5000)
    driver.checkpoint(process.pid)
    free = driver.inventory().devices[0].free_bytes or 0
    thief = subject(mib=(free >> 20) - 4096)
    with pytest.raises(SnapshotError) as refused:
        device_map(record, driver.inventory(), [record.devices[0].uuid])
    assert refused.value.reason is Reason.GPU_OUT_OF_MEMORY
    with pytest.raises(SnapshotError) as failed:
        driver.restore(process.pid, {})
    assert failed.value.reason is Reason.GPU_OUT_OF_MEMORY
    for each in (process, thief):
        each.kill()
    deadline = time.monotonic() + 10
    while abs((driver.inventory().devices[0].free_bytes or 0) - before) > 64 << 20:
        assert time.monotonic() < deadline, "memory was left behind"
        time.sleep(0.05)


def test_two_processes_side_by_side(driver: CheckpointDriver, subject: StartSubject) -> None:
    processes = [subject(mib=512), subject(mib=512)]
    for process in processes:
        driver.lock(process.pid, 5000)
    failures: list[BaseException] = []

    def there_and_back(pid: int) -> None:
        try:
            driver.checkpoint(pid)
            driver.restore(pid, {})
            driver.unlock(pid)
        except BaseException as failure:
            failures.append(failure)

    threads = [threading.Thread(target=there_and_back, args=(process.pid,)) for process in processes]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    for process in processes:
        assert process.ask("tokens") == process.tokens
