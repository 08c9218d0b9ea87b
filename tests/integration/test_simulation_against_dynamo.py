"""The simulator beside Dynamo's offline replay: the same requests, engines, router, sizes and start-up times."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from dynamo._core import run_mocker_trace_replay

from dynamo_snapshot.replay.simulation.outcome import Outcome
from dynamo_snapshot.replay.simulation.run import simulate
from dynamo_snapshot.replay.simulation.setting import Router, Setting
from dynamo_snapshot.replay.simulation.signals import Signals
from dynamo_snapshot.replay.simulation.startup import StartupModel
from dynamo_snapshot.replay.simulation.timing import EngineTiming
from dynamo_snapshot.replay.trace import TraceRequest, bundled_trace

TTFT_OBJECTIVE_S = 1.5
BLOCK = 512


class Seen(NamedTuple):
    ttft_attainment: float
    gpu_hours: float
    ttfts: list[float]


Sizes = Callable[[float], int]
"""How many replicas are wanted at a second."""


class Planned:
    """A policy of the simulator that follows ``sizes``."""

    name = "planned"
    interval_s = 1.0

    def __init__(self, sizes: Sizes) -> None:
        self._sizes = sizes

    def decide(self, signals: Signals) -> int | None:
        return self._sizes(signals.now)


class DynamoPolicy:
    """The same for Dynamo's replay."""

    def __init__(self, sizes: Sizes, until_s: float) -> None:
        self._sizes = sizes
        self._until_s = until_s

    def initial_tick_ms(self) -> float:
        return 1000.0

    def on_tick(self, snapshot: dict[str, Any]) -> dict[str, Any]:
        now = snapshot["now_ms"] / 1000
        return {
            "target_prefill": None,
            "target_decode": self._sizes(now),
            "next_tick_ms": (now + 1) * 1000 if now < self._until_s else None,
        }


def in_dynamo(
    folder: Path,
    requests: Sequence[TraceRequest],
    timing: EngineTiming,
    sizes: Sizes | int,
    startup_s: float = 0.0,
) -> Seen:
    trace = folder / "trace.jsonl"
    blocks = 0
    with trace.open("w") as lines:
        for request in requests:
            count = math.ceil(request.input_tokens / BLOCK)
            row = {
                "timestamp": request.offset_s * 1000,
                "input_length": request.input_tokens,
                "output_length": request.output_tokens,
                "hash_ids": list(range(blocks, blocks + count)),
            }
            blocks += count
            lines.write(json.dumps(row) + "\n")
    engine = {
        "enable_prefix_caching": False,
        "speedup_ratio": timing.speed,
        "decode_speedup_ratio": timing.decode_speed,
        "max_num_batched_tokens": timing.max_batched_tokens,
        "max_num_seqs": timing.max_requests,
        "num_gpu_blocks": timing.kv_tokens // 64,
    }
    scaled = not isinstance(sizes, int)
    result = run_mocker_trace_replay(
        [str(trace)],
        extra_engine_args={"engine": engine, "startup_time": startup_s},
        num_workers=sizes(0.0) if scaled else sizes,
        trace_block_size=BLOCK,
        capture_per_request=True,
        scaling_policy=DynamoPolicy(sizes, requests[-1].offset_s) if scaled else None,
    )
    ttfts = [row["ttft_ms"] / 1000 for row in result.per_request]
    met = sum(ttft <= TTFT_OBJECTIVE_S for ttft in ttfts)
    return Seen(met / len(ttfts), result.summary["gpu_hours"], sorted(ttfts))


def here(requests: Sequence[TraceRequest], timing: EngineTiming, sizes: Sizes | int, startup_s: float = 0.0) -> Outcome:
    setting = Setting(engine=timing, router=Router.ROUND_ROBIN, ttft_objective_s=TTFT_OBJECTIVE_S)
    startup = StartupModel(name="constant", cold_s=startup_s, spread=0.0)
    policy = Planned(sizes if not isinstance(sizes, int) else lambda now: sizes)
    return simulate(requests, policy, setting, startup)


def assert_alike(ours: Outcome, theirs: Seen) -> None:
    assert ours.unfinished == 0
    assert ours.ttft_attainment == pytest.approx(theirs.ttft_attainment, abs=0.02)
    assert ours.gpu_hours == pytest.approx(theirs.gpu_hours, rel=0.05)


def synthetic(seed: int, seconds: float, rate: Callable[[float], float]) -> list[TraceRequest]:
    """A Poisson process of varying rate (requests a second, at most 12), with long-tailed lengths."""
    dice = random.Random(seed)
    requests, at = [], 0.0
    while at < seconds:
        at += dice.expovariate(12.0)
        if dice.random() < rate(at) / 12.0:
            tokens_in = min(30_000, round(dice.lognormvariate(7.3, 1.0)) + 1)
            tokens_out = min(1_000, round(dice.lognormvariate(3.5, 1.0)) + 1)
            requests.append(TraceRequest(at, tokens_in, tokens_out))
    return requests


@pytest.mark.parametrize("speed", [0.2, 1.0])
@pytest.mark.parametrize("replicas", [2, 5])
def test_requests_wait_as_long_as_in_dynamo(tmp_path: Path, replicas: int, speed: float) -> None:
    requests, timing = bundled_trace(), EngineTiming(speed=speed)
    theirs = in_dynamo(tmp_path, requests, timing, replicas)
    ours = here(requests, timing, replicas)
    assert_alike(ours, theirs)
    for share, ttft in ((0.50, ours.ttft_p50), (0.95, ours.ttft_p95), (0.99, ours.ttft_p99)):
        assert ttft == pytest.approx(theirs.ttfts[math.ceil(share * len(theirs.ttfts)) - 1], rel=0.01)


@pytest.mark.parametrize(
    "timing",
    [
        EngineTiming(speed=0.2, max_batched_tokens=2048, max_requests=16),
        EngineTiming(speed=0.3, kv_tokens=48 * 1024),
        EngineTiming(decode_speed=0.5, max_requests=8),
    ],
    ids=["small batches", "a small KV cache", "eight slots"],
)
def test_narrow_engines_queue_as_in_dynamo(tmp_path: Path, timing: EngineTiming) -> None:
    requests = synthetic(3, 200.0, lambda at: 5.0)
    assert_alike(here(requests, timing, 3), in_dynamo(tmp_path, requests, timing, 3))


@pytest.mark.parametrize("startup_s", [0.0, 2.0, 20.0])
def test_a_pool_that_changes_its_size_serves_as_in_dynamo(tmp_path: Path, startup_s: float) -> None:
    def rate(at: float) -> float:
        return 10.0 if 60 <= at < 120 else 2.0

    def sizes(at: float) -> int:
        return 8 if 61 <= at < 125 else 2

    requests, timing = synthetic(7, 240.0, rate), EngineTiming(speed=0.3)
    theirs = in_dynamo(tmp_path, requests, timing, sizes, startup_s)
    ours = here(requests, timing, sizes, startup_s)
    assert_alike(ours, theirs)
    assert 0.3 < ours.ttft_attainment < 0.999, "a comparison where everybody is in time would show nothing"


def test_the_time_of_each_start_is_its_own(tmp_path: Path) -> None:
    """Dynamo's replay has one start-up time; it follows ours when each replica is asked for as it becomes ready."""
    requests, timing = synthetic(11, 240.0, lambda at: 10.0 if at >= 60 else 2.0), EngineTiming(speed=0.3)
    setting = Setting(engine=timing, router=Router.ROUND_ROBIN, ttft_objective_s=TTFT_OBJECTIVE_S)
    startup = StartupModel(name="mixed", restore_s=4.0, cold_s=40.0, failures=0.5, spread=0.3)
    ours = simulate(requests, Planned(lambda at: 8 if at >= 61 else 2), setting, startup, seed=5)
    grown = [(entry.at_s, entry.ready) for entry in ours.replicas]
    assert len(grown) > 5, "starts were to end one by one"

    def ready(at: float) -> int:
        return [count for since, count in grown if since <= at][-1]

    theirs = in_dynamo(tmp_path, requests, timing, ready)
    assert ours.ttft_attainment == pytest.approx(theirs.ttft_attainment, abs=0.02)
    waited_s = sum(entry.starting * (after.at_s - entry.at_s) for entry, after in pairwise(ours.replicas))
    assert ours.gpu_hours - waited_s / 3600 == pytest.approx(theirs.gpu_hours, rel=0.05)
