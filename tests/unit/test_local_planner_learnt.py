"""The file of what `up`'s planner has learnt: whose it is, and that it stays."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from dynamo_snapshot.config import Fleet
from dynamo_snapshot.local.demo_fleet import DemoOptions, demo_fleet
from dynamo_snapshot.local.leftovers import KEPT
from dynamo_snapshot.local.processes import DECISION_LOG, planner_configuration
from planner.config import plugin_options


def options(fleet: Fleet) -> dict[str, Any]:
    return plugin_options(planner_configuration(fleet))


def changed(fleet: Fleet, section: str, name: str, value: Any) -> Fleet:
    content = fleet.model_dump(mode="json")
    (content["model"] if section == "model" else content["pools"]["decode"]["worker"])[name] = value
    return Fleet.model_validate(content)


def test_it_lies_beside_the_decisions_and_stays(tmp_path: Path) -> None:
    told = options(demo_fleet(DemoOptions(), tmp_path))
    path = Path(told["learnt_path"])
    assert path.parent == Path(told["decision_log_path"]).parent
    assert path.name in KEPT
    assert DECISION_LOG not in KEPT


@pytest.mark.parametrize(
    ("section", "name", "value"),
    [
        ("model", "name", "other"),
        ("model", "path", "/other"),
        ("worker", "command", ["python", "-m", "dynamo.vllm"]),
        ("worker", "environment", {"MOCKER_BOOT_SECONDS": "9"}),
        ("worker", "gpus", 2),
    ],
)
def test_what_is_learnt_is_of_one_model_run_in_one_way(tmp_path: Path, section: str, name: str, value: Any) -> None:
    fleet = demo_fleet(DemoOptions(), tmp_path)
    of = options(fleet)["learnt_of"]
    assert of.startswith("tiny (")
    assert options(demo_fleet(DemoOptions(), tmp_path))["learnt_of"] == of
    assert options(fleet.model_copy(update={"name": "renamed"}))["learnt_of"] == of
    assert options(changed(fleet, section, name, value))["learnt_of"] != of
