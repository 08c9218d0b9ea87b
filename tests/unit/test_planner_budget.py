"""A GPU budget over several roles: it binds at every tick, and what a replica costs is never guessed."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from planned_fleet import KNOBS, context, message

from dynamo_snapshot.config import Fleet, load_fleet
from dynamo_snapshot.errors import SnapshotError
from dynamo_snapshot.local.processes import planner_configuration
from planner.config import RoleBounds, planner_config, plugin_options
from planner.engine import ScalingEngine, engine_from_options
from planner.fleet_status import NoFleetStatus
from planner.forecast import Forecast
from planner.joint import SHARE_KEPT_S, JointPolicy
from planner.observation import Observation, Role
from planner.outlook import Choice
from planner.policy import Action, LoadPolicy, Memory, Proposal
from planner.records import DecisionLog

ROLES = {"decode": KNOBS, "prefill": KNOBS}


@pytest.mark.parametrize(
    ("gpus", "text"),
    [
        (None, "gpu_budget needs gpus_per_replica of at least 0 for decode, prefill"),
        ({}, "gpu_budget needs gpus_per_replica of at least 0 for decode, prefill"),
        ({"decode": 1}, "gpu_budget needs gpus_per_replica of at least 0 for prefill"),
        ({"decode": 1, "prefill": -1}, "gpu_budget needs gpus_per_replica of at least 0 for prefill"),
        ({"decode": 0, "prefill": 0}, "gpu_budget bounds nothing"),
        ({"decode": 5, "prefill": 4}, "gpu_budget 8 is below the 9 GPUs that the minimums need"),
        ({"decoder": 1, "prefill": 1}, "decoder"),
    ],
)
def test_a_replica_of_unknown_cost_does_not_count_as_free_and_the_planner_does_not_start(gpus: Any, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        engine_from_options(ROLES, gpu_budget=8, gpus_per_replica=gpus)


loads = st.one_of(st.none(), st.integers(0, 60))


@given(
    st.lists(st.tuples(loads, loads, st.integers(0, 3)), min_size=1, max_size=30),
    st.integers(3, 40),
    st.integers(0, 2),
)
def test_all_roles_together_stay_within_the_budget(
    ticks: list[tuple[int | None, int | None, int]], budget: int, gpus: int
) -> None:
    """Whatever is there, unknown or silent; each role keeps its minimum."""
    cost = {"decode": 1, "prefill": gpus}
    engine = engine_from_options(ROLES, gpu_budget=budget, gpus_per_replica=cost)
    known: set[Role] = set()
    for tick, (decode, prefill, ready) in enumerate(ticks):
        engines = [{} if load is None else {"1/0": message(tick, load)} for load in (decode, prefill)]
        proposals = engine.propose(context(ready, engines[0], ready if ready != 1 else None, engines[1]))
        known |= {proposal.role for proposal in proposals if proposal.replicas is not None}
        used = sum((proposal.replicas or 0) * cost[proposal.role.value] for proposal in proposals)
        assert used <= budget
        for proposal in proposals:
            if proposal.role in known:
                assert proposal.replicas is not None
                assert proposal.floor is not None
                assert KNOBS["max_replicas"] >= proposal.replicas >= max(1, proposal.floor)


def test_a_cut_is_told_with_its_budget() -> None:
    engine = engine_from_options(ROLES, gpu_budget=8, gpus_per_replica={"decode": 1, "prefill": 2})
    engines = {"1/0": message(1, 32)}
    decode, prefill = engine.propose(context(1, engines, 1, engines))
    assert (decode.replicas, prefill.replicas) == (4, 2)
    assert "4 of 8 within the budget of 8 GPUs" in decode.reason
    assert "2 of 8 within the budget of 8 GPUs" in prefill.reason


def test_a_role_that_costs_nothing_gets_its_wish_and_takes_nothing_from_others() -> None:
    engine = engine_from_options(ROLES, gpu_budget=3, gpus_per_replica={"decode": 1, "prefill": 0})
    engines = {"1/0": message(1, 32)}
    decode, prefill = engine.propose(context(1, engines, 1, engines))
    assert (decode.replicas, prefill.replicas) == (3, 8)
    assert "within the budget" not in prefill.reason


def test_a_role_that_tells_nothing_is_counted_with_its_most() -> None:
    engine = engine_from_options(ROLES, gpu_budget=11, gpus_per_replica={"decode": 1, "prefill": 1})
    decode, prefill = engine.propose(context(1, {"1/0": message(1, 32)}, None, {}))
    assert prefill.replicas is None
    assert decode.replicas == 11 - KNOBS["max_replicas"]


def test_nothing_is_taken_from_a_role_whose_load_is_not_known() -> None:
    policy = JointPolicy.of(ROLES, gpu_budget=8, gpus_per_replica={"decode": 1, "prefill": 1})
    seconds = itertools.count()
    engine = ScalingEngine(policy, NoFleetStatus(), DecisionLog(None), clock=lambda: float(next(seconds)))
    for tick in range(160):
        decode = {f"{worker}/0": message(min(tick, 40), 4) for worker in range(6)}  # from then on nothing is heard
        prefill = {f"p{worker}/0": message(tick, 4 if tick < 60 else 30) for worker in range(2)}
        proposals = {proposal.role: proposal for proposal in engine.propose(context(6, decode, 2, prefill))}
        assert proposals[Role.DECODE].replicas == 6, f"at {tick}: {proposals[Role.DECODE].reason}"
    assert proposals[Role.PREFILL].replicas == 2
    assert proposals[Role.PREFILL].desired == 8


def test_a_role_that_tells_nothing_bounds_growth_and_drains_nobody() -> None:
    engine = engine_from_options(ROLES, gpu_budget=8, gpus_per_replica={"decode": 1, "prefill": 1})
    for tick in range(3):
        engines = {f"{worker}/0": message(tick + 1, 20) for worker in range(6)}
        decode, _ = engine.propose(context(6, engines, None, {}))
        assert (decode.replicas, decode.desired) == (6, 8)


def test_a_role_that_tells_nothing_takes_no_more_than_its_minimum_of_what_is_there() -> None:
    engine = engine_from_options(ROLES, gpu_budget=8, gpus_per_replica={"decode": 1, "prefill": 1})
    engines = {f"{worker}/0": message(1, 20) for worker in range(8)}
    decode, prefill = engine.propose(context(8, engines, None, {}))
    assert (decode.replicas, decode.desired, prefill.replicas) == (7, 8, None)


def test_where_not_all_can_keep_what_they_have_each_loses_only_what_is_too_much() -> None:
    policy = JointPolicy.of(ROLES, gpu_budget=8, gpus_per_replica={"decode": 1, "prefill": 1})
    engine = ScalingEngine(policy, NoFleetStatus(), DecisionLog(None))
    engines = {f"{worker}/0": message(1, 4) for worker in range(7)}
    proposals = engine.propose(context(8, engines, 5, {"p/0": message(1, 20)}))
    assert [proposal.replicas for proposal in proposals] == [5, 3], "of both not all is known"


@dataclass(frozen=True)
class Wishing(LoadPolicy):
    """Wants what stands in a list, one tick after the other, and predicts misses that more replicas avert."""

    wishes: tuple[tuple[int, float], ...] = ()
    """Replicas, and requests a second that miss without any."""

    def decide(self, observation: Observation, memory: Memory, now: float) -> tuple[Proposal, Memory]:
        replicas, misses = self.wishes[int(now)]
        choices = tuple(Choice(size, misses / (1 + size), 0.0) for size in range(1, replicas + 1))
        forecast = Forecast(replicas, replicas, 0, 2.0, 0.0, 0.0, 1.0, 0, choices=choices)
        return Proposal(self.role, Action.HOLD, "so it stands", replicas, 0, replicas, forecast=forecast), memory


def shares(wishes: Sequence[Sequence[tuple[int, float]]], budget: int, gpus: int = 1) -> list[tuple[int, int]]:
    """What each tick's wishes of the two roles are cut to."""
    decode, prefill = (tuple(role) for role in zip(*wishes, strict=True))
    policies = {Role.DECODE: Wishing(wishes=decode), Role.PREFILL: Wishing(role=Role.PREFILL, wishes=prefill)}
    joint = JointPolicy(policies, budget, {Role.DECODE: 1, Role.PREFILL: gpus}, insists=False)
    memories, found = joint.fresh(), []
    nothing = {role: Observation(ready=None) for role in policies}
    for tick in range(len(wishes)):
        proposals, memories = joint.decide(nothing, memories, float(tick))
        found.append((proposals[Role.DECODE].replicas or 0, proposals[Role.PREFILL].replicas or 0))
    return found


wishes = st.tuples(st.integers(1, 8), st.floats(0, 50))


@given(st.lists(st.tuples(wishes, wishes), min_size=2, max_size=100), st.integers(4, 12), st.integers(1, 2))
def test_replicas_move_between_roles_once_in_a_while_and_never_beyond_the_budget(
    ticks: list[tuple[tuple[int, float], tuple[int, float]]], budget: int, gpus: int
) -> None:
    moves = []
    found = shares(ticks, budget, gpus)
    for tick, (before, after) in enumerate(pairwise(found), 1):
        assert after[0] + gpus * after[1] <= budget
        wanted = [replicas for replicas, _ in ticks[tick]]
        if any(now < min(had, wants) for had, now, wants in zip(before, after, wanted, strict=True)):
            moves.append(tick)
    assert all(later - earlier >= SHARE_KEPT_S for earlier, later in pairwise(moves))


def test_what_a_role_does_not_want_any_more_is_the_other_s_at_once() -> None:
    even, odd = ((8, 9.0), (8, 10.0)), ((8, 10.0), (8, 9.0))
    assert shares([even, odd, even, ((1, 0.0), (8, 10.0))], 6) == [(3, 3), (3, 3), (3, 3), (1, 5)]


def test_a_replica_costs_its_gpus_unless_it_is_said_what_their_type_costs() -> None:
    roles = {"decode": {**KNOBS, "replica_cost": 0.8}, "prefill": KNOBS}
    policy = JointPolicy.of(roles, 11, {"decode": 2, "prefill": 4})
    assert {role.value: knobs.replica_cost for role, knobs in policy.policies.items()} == {"decode": 0.8, "prefill": 4}
    assert JointPolicy.of(ROLES).policies[Role.DECODE].replica_cost == 1
    assert JointPolicy.of(ROLES, 8, {"decode": 1, "prefill": 0}).policies[Role.PREFILL].replica_cost == 1


def test_the_same_options_make_the_same_policy_whoever_reads_them() -> None:
    policy = JointPolicy.of(ROLES, 11, {"decode": 1, "prefill": 2})
    assert JointPolicy.of(**policy.plain()) == policy


# How it is configured

FLEET = """\
model: {name: tiny, path: model}
agent: {runtime_dir: FOLDER}
pools:
  decode: {min_replicas: 1, max_replicas: 8, worker: {command: [python], gpus: 1}}
  prefill: {role: prefill, min_replicas: 1, max_replicas: 8, worker: {command: [python], gpus: 2}}
planner: {gpu_budget: 9}
"""


def options(folder: Path, *changes: tuple[str, str]) -> dict[str, Any]:
    """The plugin's options of :data:`FLEET`, changed."""
    text = FLEET.replace("FOLDER", str(folder))
    for before, after in changes:
        assert before in text
        text = text.replace(before, after)
    path = folder / "fleet.yaml"
    path.write_text(text)
    return plugin_options(planner_configuration(load_fleet(path)))


def test_pools_of_a_fleets_file_stay_within_its_budget(tmp_path: Path) -> None:
    engine = engine_from_options(**options(tmp_path))
    sizes = []
    for tick, requests in enumerate((4, 12, 32, 60)):
        engines = {"1/0": message(tick, requests)}
        decode, prefill = engine.propose(context(1, engines, 1, engines))
        sizes.append((decode.replicas, prefill.replicas))
    assert sizes == [(1, 1), (3, 3), (3, 3), (3, 3)]
    assert "3 of 8 within the budget of 9 GPUs" in decode.reason
    assert "3 of 8 within the budget of 9 GPUs" in prefill.reason


def test_a_pool_says_what_a_gpu_of_its_type_costs(tmp_path: Path) -> None:
    made = options(tmp_path, ("prefill, min_replicas: 1", "prefill, gpu_cost: 0.4, min_replicas: 1"))
    assert [made["roles"][role]["replica_cost"] for role in ("decode", "prefill")] == [1, 0.8]


def test_without_a_budget_in_the_fleets_file_each_pool_has_its_own_bound_alone(tmp_path: Path) -> None:
    without = ("planner: {gpu_budget: 9}", "planner: {}")
    made = options(tmp_path, without, ("gpus: 1", "gpus: 0"), (", gpus: 2", ""))
    assert not {"gpu_budget", "gpus_per_replica"} & made.keys()
    engines = {"1/0": message(1, 32)}
    assert [each.replicas for each in engine_from_options(**made).propose(context(1, engines, 1, engines))] == [8, 8]


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        (
            [(", gpus: 2", "")],
            "gpu_budget counts each worker's gpus, and some are not told: "
            "set pools.prefill.worker.gpus, to 0 where none is used",
        ),
        ([(", gpus: 2", ""), (", gpus: 1", "")], "set pools.decode.worker.gpus, pools.prefill.worker.gpus, to 0"),
        ([("gpus: 2", "gpus: 0"), ("gpus: 1", "gpus: 0")], "worker.gpus of every pool is 0: remove it"),
        (
            [("gpu_budget: 9", "gpu_budget: 2")],
            "gpu_budget (2) is below the 3 GPUs that the pools' min_replicas take: raise it, or lower a min_replicas",
        ),
        (
            [("gpu_budget: 9", "gpu_budget: 2"), ("prefill, min_replicas: 1", "prefill, min_replicas: 0")],
            "gpu_budget (2) is below the 3 GPUs that the pools' min_replicas and a first replica of prefill take: "
            "raise it, or prefill never has one",
        ),
        (
            [("gpu_budget: 9", "gpu_budget: 9, policy: dynamo-throughput")],
            "policy: dynamo-throughput keeps no gpu_budget: remove it, or take policy: snapshot",
        ),
    ],
)
def test_a_budget_that_makes_no_sense_is_refused_with_its_field_and_a_remedy(
    tmp_path: Path, changes: list[tuple[str, str]], text: str
) -> None:
    with pytest.raises(SnapshotError) as caught:
        options(tmp_path, *changes)
    (line,) = caught.value.message.splitlines()
    assert line.startswith(f"{tmp_path}/fleet.yaml:6: planner: ")
    assert text in line


@pytest.mark.parametrize(
    "changes",
    [
        [("gpu_budget: 9", "gpu_budget: 3")],
        [("gpu_budget: 9", "gpu_budget: 1"), ("gpus: 2", "gpus: 0")],
        [("gpu_budget: 9", "gpu_budget: 3"), ("prefill, min_replicas: 1", "prefill, min_replicas: 0")],
    ],
)
def test_what_the_fleets_file_accepts_the_plugin_accepts(tmp_path: Path, changes: list[tuple[str, str]]) -> None:
    engine_from_options(**options(tmp_path, *changes))
    fleet = load_fleet(tmp_path / "fleet.yaml")
    assert Fleet.model_validate(fleet.model_dump(mode="json")) == fleet, "as `up` hands it to its processes"


def test_a_role_whose_cost_is_not_told_is_refused_by_the_plugin() -> None:
    roles = {"decode": RoleBounds(gpus=1), "prefill": RoleBounds()}
    made = plugin_options(planner_config(namespace="n", model_name="m", roles=roles, gpu_budget=8))
    with pytest.raises(ValueError, match="at least 0 for prefill"):
        engine_from_options(**made)
