"""Beside CRIU a loader takes the threads that it needs, and leaves it the memory bandwidth of the others."""

from __future__ import annotations

from pathlib import Path
from typing import cast

import pytest

from dynamo_snapshot.agent.loader.client import lanes_beside
from dynamo_snapshot.agent.loader.pinned import PinnedSegments
from dynamo_snapshot.agent.loader.run import LoadRun, Reading
from dynamo_snapshot.agent.loader.wire import Load, SegmentBytes
from worker_hooks.weights.host_memory import HostMemory
from worker_hooks.weights.pump import Pump

GIB = 1 << 30


@pytest.mark.parametrize(
    ("image_bytes", "weight_bytes", "lanes"),
    [
        (0, GIB, 14),
        (0.41 * GIB, 16 * GIB, 14),
        (2.3 * GIB, 15.3 * GIB, 6),
        (2.0 * GIB, 1.2 * GIB, 1),
        (2.0 * GIB, 0, 1),
    ],
)
def test_as_many_lanes_as_bring_the_weights_with_the_image(image_bytes: float, weight_bytes: float, lanes: int) -> None:
    assert lanes_beside(int(image_bytes), int(weight_bytes), most=14) == lanes


def test_never_more_than_there_are() -> None:
    assert lanes_beside(GIB, 400 * GIB, most=3) == 3


class RecordingPump:
    """Moves nothing; keeps how many lanes it was to use."""

    def __init__(self) -> None:
        self.lanes: list[int | None] = []

    def load(self, transfers: object, cancelled: object, lanes: int | None) -> None:
        self.lanes.append(lanes)


@pytest.mark.parametrize(("reading", "lanes"), [(Reading.PAGE_CACHE, 3), (Reading.DIRECT, None)])
def test_past_the_page_cache_all_take_part(tmp_path: Path, reading: Reading, lanes: int | None) -> None:
    (tmp_path / "segment").write_bytes(bytes(4096))
    segment = SegmentBytes(path=str(tmp_path / "segment"), size=4096, digest="segment")
    ask = Load(name="load", socket=str(tmp_path / "socket"), segments=(segment,), lanes=3)
    memory, recording = HostMemory(), RecordingPump()
    pump = cast(Pump, recording)
    load = LoadRun(ask, memory, pump, PinnedSegments(memory, pump, 0), reading)
    load.start()
    load.finished()
    load.cancel()
    assert recording.lanes == [lanes]
