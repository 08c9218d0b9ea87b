"""`bench restore` measures the agent's own pipelines: here with the fake driver and a toy engine."""

from __future__ import annotations

from pathlib import Path

import pytest
from test_agent_gpu import WEIGHTS_BYTES, gpu_spec

from dynamo_snapshot.agent.cuda_fake import SCRIPT_ENV
from dynamo_snapshot.agent.teardown import left_behind
from dynamo_snapshot.config import Gpu
from dynamo_snapshot.local.bench_gpu import RestoreSeries, Series, limit_s, summary


@pytest.mark.parametrize(("way", "by_loader"), [("prefetched-small-pages", "2"), ("stock", "0")])
async def test_a_series_has_each_restore_with_its_phases(
    tmp_path: Path, criu: Path, monkeypatch: pytest.MonkeyPatch, way: str, by_loader: str
) -> None:
    driver = tmp_path / "driver.json"
    driver.write_text("{}")
    monkeypatch.setenv(SCRIPT_ENV, str(driver))
    said: list[str] = []
    made = RestoreSeries(tmp_path, criu, Gpu(loader_lanes=2, loader_buffers=1), said.append)
    row = await made.measure(Series("toy", "6MiB", way, 2, WEIGHTS_BYTES), lambda detached: gpu_spec())
    assert row["errors"] == []
    assert [restore["evidence"]["by_loader"] for restore in row["restores"]] == [by_loader] * 2
    for restore in row["restores"]:
        assert 0 < sum(restore["phases"].values()) <= restore["total_s"] + 0.05
        assert {"admit", "load", "house", "restore", "thaw", "resume"} <= restore["phases"].keys()
    assert row["median_s"] <= row["p95_s"]
    assert row["weight_bytes"] == WEIGHTS_BYTES
    assert row["capture"].keys() >= {"freeze", "dump", "thaw", "drop_zeros"}
    assert limit_s(row, None) is None
    assert limit_s(row, 1.0) == WEIGHTS_BYTES, "a device that takes a byte a second is the limit"
    assert "0 of 2 failed" in summary(row)
    assert left_behind(tmp_path / "run") == []
