"""`bench restore` measures the agent's own pipelines: here with the fake driver and a toy engine."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
from test_agent_gpu import WEIGHTS_BYTES, gpu_spec

from dynamo_snapshot.agent import gpus
from dynamo_snapshot.agent.cuda.fake import SCRIPT_ENV
from dynamo_snapshot.agent.teardown import left_behind
from dynamo_snapshot.config import Agent, Gpu
from dynamo_snapshot.errors import SnapshotError
from dynamo_snapshot.local.bench_gpu import Repeats, RestoreSeries, Series, restores, summary
from dynamo_snapshot.local.bench_machine import limit_s
from dynamo_snapshot.local.bench_subjects import Subject, torch_subject, vllm_subject
from dynamo_snapshot.local.report.stages import Stage, stages
from dynamo_snapshot.model import Reason, WorkerSpec

TOY = Subject("toy", "6MiB", lambda detached, segments: gpu_spec(), WEIGHTS_BYTES)
TESTS = Path(__file__).parents[1]


def settings(criu: Path, standby_houses: int = 0) -> Agent:
    gpu = Gpu(loader_lanes=2, loader_buffers=1)
    return Agent(criu=criu, minimum_free_bytes=0, standby_houses=standby_houses, gpu=gpu)


@pytest.fixture
def fake_driver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    driver = tmp_path / "driver.json"
    driver.write_text("{}")
    monkeypatch.setenv(SCRIPT_ENV, str(driver))


@pytest.mark.parametrize(("way", "by_loader"), [("prefetched-small-pages", "2"), ("stock", "0"), ("parked", "2")])
async def test_a_series_has_each_restore_with_its_phases(
    tmp_path: Path, criu: Path, fake_driver: None, way: str, by_loader: str
) -> None:
    said: list[str] = []
    made = RestoreSeries(tmp_path, settings(criu, standby_houses=1), said.append)
    row = await made.measure(Series(TOY, way, 2))
    assert row["errors"] == []
    assert [restore["evidence"]["by_loader"] for restore in row["restores"]] == [by_loader] * 2
    for restore in row["restores"]:
        assert 0 < sum(restore["phases"].values()) <= restore["total_s"] + 0.05
        made_by = restore.get("park", restore["phases"])
        assert {"admit", "house", "restore", "thaw"} <= made_by.keys()
        assert {"admit", "load", "resume"} <= restore["phases"].keys()
    assert row["median_s"] <= row["p95_s"]
    assert row["weight_bytes"] == WEIGHTS_BYTES
    assert row["capture"].keys() >= {"freeze", "dump", "thaw", "drop_zeros"}
    assert limit_s(row, None) is None
    assert limit_s(row, 1.0) == WEIGHTS_BYTES, "a device that takes a byte a second is the limit"
    assert "0 of 2 failed" in summary(row)
    said_beside = summary(row | {"limit_s": row["median_s"] / 2})
    assert f"2.0 times this machine's limit of {row['median_s'] / 2:.3f} s" in said_beside
    assert left_behind(tmp_path / "run") == []


async def test_without_a_gpu_nothing_is_measured_before_that_is_said(
    criu: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    monkeypatch.delenv(SCRIPT_ENV, raising=False)
    monkeypatch.setattr(gpus, "_DRIVER_FILES", ())
    with pytest.raises(SnapshotError, match="no GPU here") as refused:
        await restores([TOY], ["stock"], Repeats(1, 1), settings(criu), said.append)
    assert refused.value.reason is Reason.CUDA_MISSING
    assert said == []


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "made-up-8b"
    folder.mkdir()
    (folder / "model.safetensors").write_bytes(bytes(1000))
    return folder


async def test_vllm_is_measured_through_its_example_from_cold_start_to_tokens(
    tmp_path: Path, criu: Path, fake_driver: None, model: Path
) -> None:
    """vLLM itself is a stand-in, whose memory is the toy's; engine, hooks, agent, loader and CRIU are real."""
    subject = vllm_subject(model, None, ["--max-model-len", "512"])

    def worker(detached: bool, segments: Path) -> WorkerSpec:
        paths = os.pathsep.join(map(str, (TESTS / "support" / "stand_ins", TESTS)))
        return msgspec.structs.replace(subject.worker(detached, segments), environment={"PYTHONPATH": paths})

    made = RestoreSeries(tmp_path, settings(criu), lambda text: None)
    row = await made.measure(Series(replace(subject, worker=worker), "prefetched-small-pages", 2, cold_starts=1))
    assert (row["engine"], row["case"], row["errors"]) == ("vllm", "made-up-8b", [])
    assert row["answers"] == ["5 6 7"]
    assert [restore["evidence"]["weights"] for restore in row["restores"]] == ["by_loader=2"] * 2
    assert len(row["cold_starts_s"]) == 2
    assert all(seconds > 0 for seconds in row["cold_starts_s"])
    assert row["gpus"] == ["NVIDIA H200"]
    for restore in row["restores"]:
        spent = stages(restore)
        assert spent[Stage.CRIU] > 0
        assert 0 < spent[Stage.WEIGHTS] < restore["phases"]["resume"]
        assert sum(spent.values()) == pytest.approx(restore["total_s"], abs=0.05)
    assert left_behind(tmp_path / "run") == []


def test_vllm_needs_a_model(tmp_path: Path, model: Path) -> None:
    for folder in (None, tmp_path / "nowhere", tmp_path):
        with pytest.raises(SnapshotError, match="no model to measure") as refused:
            vllm_subject(folder, None, [])
        assert refused.value.reason is Reason.CONFIGURATION_INVALID
    command = vllm_subject(model, "8b", ["--max-model-len", "512"]).worker(True, tmp_path / "segments").command
    assert command[-2:] == ("--segments", str(tmp_path / "segments"))
    assert command[2:6] == ("--model", str(model), "--max-model-len", "512")


async def test_a_way_that_vllm_does_not_have_is_refused_before_anything_starts(model: Path) -> None:
    subjects = [torch_subject(1), vllm_subject(model, None, [])]
    with pytest.raises(SnapshotError, match="stock, hugepages cannot be measured"):
        await restores(subjects, ["stock", "hugepages", "detached"], Repeats(1, 1), Agent(), lambda text: None)


async def test_what_was_measured_is_kept_before_the_next_series_fails(criu: Path, fake_driver: None) -> None:
    broken = replace(TOY, case="broken", worker=lambda detached, segments: WorkerSpec(command=("/bin/false",), gpus=1))
    kept: list[list[str]] = []
    with pytest.raises(SnapshotError):
        await restores(
            [TOY, broken],
            ["prefetched-small-pages"],
            Repeats(1, 1),
            settings(criu),
            lambda text: None,
            lambda result: kept.append([row["case"] for row in result["rows"]]),
        )
    assert kept == [["6MiB"]]
