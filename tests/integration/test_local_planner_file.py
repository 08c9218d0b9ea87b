"""What `up` writes for Dynamo's planner is what that planner, and the plugin in it, take."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dynamo_snapshot.config import Fleet
from dynamo_snapshot.errors import SnapshotError
from dynamo_snapshot.local.preflight import require_planner
from dynamo_snapshot.local.processes import planner_configuration, whole_ticks
from planner.config import NEVER_S, plugin_options
from planner.engine import engine_from_options


def fleet(planner: Mapping[str, Any], **pool: Any) -> Fleet:
    pools = {"decode": {"worker": {"command": ["x"]}, **pool}}
    return Fleet.model_validate({"model": {"name": "m", "path": "p"}, "pools": pools, "planner": planner})


@pytest.mark.parametrize("tick_s", [0.05, 0.3, 1.3, 7, 59.37, 60])
def test_dynamos_planner_takes_a_tick_of_any_length(tick_s: float) -> None:
    from dynamo.planner.config.planner_config import PlannerConfig

    read = PlannerConfig.model_validate(planner_configuration(fleet({"tick_s": tick_s})))
    assert read.scheduling.scale_interval_seconds == tick_s
    assert read.load_adjustment_interval_seconds >= NEVER_S


@given(st.floats(0.05, 60))
def test_a_whole_number_of_ticks_is_one_for_each_tick(tick_s: float) -> None:
    ticks = whole_ticks(NEVER_S, tick_s) / tick_s
    assert ticks == pytest.approx(round(ticks), rel=1e-12)


def settings() -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
    for headroom in (0, 7, 8, 10**15):
        for numbers in ({}, {"miss_cost_s": 1e15, "target_requests_per_replica": 1e-300, "ttft_objective_s": 1e-300}):
            yield {"headroom_replicas": headroom, **numbers}, {}
    yield {"hints": "park", "ttft_objective_s": 1, "parked_most": 64}, {"parked": 64}
    yield {"tick_s": 60, "scale_down_after_s": 1e-9}, {"min_replicas": 0, "max_replicas": 2**53}
    yield {"gpu_budget": 8}, {"worker": {"command": ["x"], "gpus": 1}, "gpu_cost": 1e15}
    yield {"policy": "dynamo-latency", "headroom_replicas": 9}, {}


def taken(made: Fleet) -> bool:
    """Whether the plugin, where there is one, starts."""
    configuration = planner_configuration(made)
    try:
        if "plugin_registration" in configuration:
            engine_from_options(**plugin_options(configuration))
    except ValueError:
        return False
    return True


@pytest.mark.parametrize(("planner", "pool"), list(settings()))
def test_what_the_plugin_refuses_is_refused_before_anything_starts(
    planner: dict[str, Any], pool: dict[str, Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("NATS_SERVER", "nats://127.0.0.1:4222")
    made = fleet(planner, **pool)
    made = made.model_copy(update={"agent": made.agent.model_copy(update={"runtime_dir": tmp_path})})
    if taken(made):
        require_planner(made)
    else:
        with pytest.raises(SnapshotError, match="headroom_replicas must be below max_replicas"):
            require_planner(made)
    assert list(tmp_path.iterdir()) == []
