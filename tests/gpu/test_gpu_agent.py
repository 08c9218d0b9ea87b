"""The torch engine through the agent's own pipelines: bit-identical, however its weights come back."""

from __future__ import annotations

from pathlib import Path

import pytest

from dynamo_snapshot.agent.teardown import left_behind
from dynamo_snapshot.config import Agent
from dynamo_snapshot.local.bench_gpu import RestoreSeries, Series
from dynamo_snapshot.local.bench_subjects import torch_subject

GIB = 1 << 30


@pytest.mark.parametrize(
    ("way", "weights"),
    [
        ("prefetched-small-pages", "by_loader=1"),
        ("pinned", "by_loader=1"),
        ("parked", "by_loader=1"),
        ("detached", "by_loader=0"),
        ("stock", None),
    ],
)
async def test_every_way_gives_the_source_s_answer(
    tmp_path: Path, criu_path: Path, way: str, weights: str | None
) -> None:
    said: list[str] = []
    made = RestoreSeries(tmp_path, Agent(criu=criu_path, minimum_free_bytes=0), said.append)
    row = await made.measure(Series(torch_subject(1), way, 2))
    assert row["errors"] == []
    assert [restore["evidence"].get("weights") for restore in row["restores"]] == [weights] * 2
    assert len(row["answers"]) == 1
    assert (row["image_bytes"] < GIB) == (way != "stock")
    assert (row["weight_bytes"] == GIB) == (way != "stock")
    assert left_behind(tmp_path / "run") == []
