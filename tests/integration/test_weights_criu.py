"""Weights stay out of a real CRIU image and are handed to the restored process at their old addresses."""

from __future__ import annotations

import asyncio
import json
import sys
import time
from asyncio.subprocess import DEVNULL
from collections.abc import Callable
from pathlib import Path

import pytest

from dynamo_snapshot.agent.criu.zero_pages import drop_zero_pages
from dynamo_snapshot.agent.loader.client import WeightLoader
from dynamo_snapshot.agent.loader.process import MemoryKind, Settings
from worker_hooks.weights.segment import SegmentStore, decode_segments

SUBJECT = Path(__file__).parents[1] / "support" / "weights_subject.py"


async def until(condition: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline, f"{what} did not come"
        await asyncio.sleep(0.01)


@pytest.mark.parametrize("with_loader", [True, False], ids=["by a loader", "by the worker"])
async def test_weights_come_back(criu: Path, tmp_path: Path, with_loader: bool) -> None:
    images = tmp_path / "images"
    images.mkdir()
    with (tmp_path / "log").open("ab") as log:
        worker = await asyncio.create_subprocess_exec(
            sys.executable, SUBJECT, tmp_path, stdin=DEVNULL, stdout=log, stderr=log, start_new_session=True
        )
    await until((tmp_path / "kept").exists, "the worker")
    dump = [criu, "dump", "-t", str(worker.pid), "-D", images, "-o", "dump.log", "-v4"]
    dumping = await asyncio.create_subprocess_exec(*dump, stderr=DEVNULL)
    assert await dumping.wait() == 0, (images / "dump.log").read_text()[-3000:]
    await worker.wait()
    segments = decode_segments((tmp_path / "kept").read_bytes())
    store = SegmentStore(tmp_path / "segments")
    drop_zero_pages(images, criu)
    image_bytes = sum(path.stat().st_size for path in images.iterdir())
    assert image_bytes < sum(segment.size for segment in segments) / 2

    loader = WeightLoader("GPU-none", tmp_path / "loader.log", Settings(memory=MemoryKind.HOST, lanes=2, buffers=2))
    if with_loader:
        await loader.load("r1", tmp_path, segments, store)
    house = ["unshare", "--pid", "--mount", "--fork", "--mount-proc", "--kill-child"]
    restore = [criu, "restore", "-D", images, "-o", "restore.log", "-v4"]
    restored = await asyncio.create_subprocess_exec(*house, *restore, stderr=DEVNULL)
    try:
        (tmp_path / "go").touch()
        await until((tmp_path / "attached").exists, "the restored worker")
        result = json.loads((tmp_path / "attached").read_text())
    finally:
        restored.kill()
        await restored.wait()
        await loader.close()
    assert result["attached"]["by_loader"] == (len(segments) if with_loader else 0)
    assert result["digests"] == [segment.digest for segment in segments]
