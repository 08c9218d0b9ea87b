"""Dynamo's own vLLM worker, unmodified, through Dynamo's frontend: captured, restored, cloned and captured again.

Needs ai-dynamo 1.4.2 and vLLM 0.26 in this Python, etcd and nats-server on PATH. ``DYNAMO_SNAPSHOT_RESULTS`` names a
file for the figures.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
from pathlib import Path
from typing import Any

import pytest
from gpu.dynamo_deployment import PINNED
from gpu.dynamo_vllm import GPU_ARGUMENTS, Options, measure, write_model

RESULTS_ENV = "DYNAMO_SNAPSHOT_RESULTS"
FIRST_ANSWER_S = 2.3
"""From the order to the whole answer, where no other worker of the model is there."""


@pytest.mark.timeout(580)
def test_a_restored_worker_answers_at_once_as_its_source_did_and_under_its_own_name(tmp_path: Path) -> None:
    write_model(tmp_path / "model", "qwen3-0.6b")
    measured = asyncio.run(measure(Options(tmp_path, tmp_path / "model", GPU_ARGUMENTS)))
    if named := os.environ.get(RESULTS_ENV):
        Path(named).write_text(json.dumps(measured, indent=1) + "\n")
    source, again = measured["capture"], measured["second_capture"]
    beside = [measured["beside_source"], measured["beside_clone"]]
    restored = [*measured["restores"], *beside, measured["second_restore"]]
    for row in (source, again, *restored):
        _answered(row)
    _answered(measured["beside_clone"]["other"])
    assert len({row["instance"] for row in (source, again, *restored)}) == len(restored) + 2
    assert measured["unnamed_metrics"] == 0
    assert all(row["same_words"] for row in restored)
    assert {row["evidence"]["answer"] for row in (source, again, *restored)} == {source["evidence"]["answer"]}
    assert all(re.fullmatch("by_loader=[1-9][0-9]*", row["evidence"]["weights"]) for row in restored)
    assert measured["first_answer_max_s"] <= FIRST_ANSWER_S


def _answered(row: dict[str, Any]) -> None:
    """Every pinned request by the instance it was pinned to, whose metrics told of it."""
    assert (row["pinned"], row["pinned_answered"], row["pinned_errors"]) == (PINNED, PINNED, [])
    assert row["metrics_with_requests"] > 0
