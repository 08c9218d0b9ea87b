"""A GPU budget over several roles: it binds at every tick, and what a replica costs is never guessed."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from planned_fleet import KNOBS, context, message

from planner.engine import engine_from_options
from planner.joint import JointPolicy
from planner.observation import Role

ROLES = {"decode": KNOBS, "prefill": KNOBS}


@pytest.mark.parametrize(
    ("gpus", "text"),
    [
        (None, "gpu_budget needs gpus_per_replica of at least 1 for decode, prefill"),
        ({}, "gpu_budget needs gpus_per_replica of at least 1 for decode, prefill"),
        ({"decode": 1}, "gpu_budget needs gpus_per_replica of at least 1 for prefill"),
        ({"decode": 1, "prefill": 0}, "gpu_budget needs gpus_per_replica of at least 1 for prefill"),
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
    st.integers(1, 2),
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


def test_a_role_that_tells_nothing_is_counted_with_its_most() -> None:
    engine = engine_from_options(ROLES, gpu_budget=11, gpus_per_replica={"decode": 1, "prefill": 1})
    decode, prefill = engine.propose(context(1, {"1/0": message(1, 32)}, None, {}))
    assert prefill.replicas is None
    assert decode.replicas == 11 - KNOBS["max_replicas"]


def test_the_same_options_make_the_same_policy_whoever_reads_them() -> None:
    policy = JointPolicy.of(ROLES, 11, {"decode": 1, "prefill": 2})
    assert JointPolicy.of(**policy.plain()) == policy
