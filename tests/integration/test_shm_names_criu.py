"""A semaphore of ``multiprocessing`` comes back with a real CRIU from a source that ran on after its capture."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

from dynamo_snapshot.agent.criu import shm
from dynamo_snapshot.agent.criu.command import Criu
from dynamo_snapshot.agent.house import LOG_INSIDE, HostHouses

SUBJECT = """
import multiprocessing, os, signal, sys, time
from worker_hooks.shm_names import put_back
semaphore = multiprocessing.get_context("spawn").Semaphore(3)
semaphore.acquire()
put_back(os.getpid())
print("ready", flush=True)
while True:
    time.sleep(0.02)
    print("value", semaphore.get_value(), flush=True)
"""


def wait_for(log: Path, text: str) -> None:
    deadline = time.monotonic() + 20
    while not log.exists() or text not in log.read_text():
        assert time.monotonic() < deadline, log.read_text() if log.exists() else "no log"
        time.sleep(0.02)


async def test_a_semaphore_is_in_the_snapshot(criu: Path, tmp_path: Path) -> None:
    houses, program, images = HostHouses(tmp_path / "run"), Criu.locate(criu), tmp_path / "images"
    images.mkdir()
    try:
        source = await houses.make("source", None)
        environment = {"PATH": os.environ["PATH"], "PYTHONPATH": str(Path(__file__).parents[2])}
        inner = await source.holder.start([sys.executable, "-c", SUBJECT], environment, "/", LOG_INSIDE)
        wait_for(source.log, "ready")
        await program.dump(source, inner, images)
        shm.save(source.shm, images)
        await houses.remove("source")
        restored = await houses.make("restored", None)
        shm.load(images, restored.shm)
        await restored.holder.expect(inner)
        await program.restore(restored, images, LOG_INSIDE)
        wait_for(restored.log, "value 2")
    finally:
        for name in houses.existing():
            await houses.remove(name)
        houses.dismantle()
