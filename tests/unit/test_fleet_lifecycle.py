"""Every state of a replica with everything that can happen to it."""

from __future__ import annotations

from itertools import product

import pytest

from dynamo_snapshot.fleet.core.lifecycle import (
    ALIVE,
    PENDING,
    TABLE,
    Happening,
    IllegalHappeningError,
    advance,
    legal,
    mermaid,
)
from dynamo_snapshot.model import ReplicaState


@pytest.mark.parametrize(("state", "happening"), list(product(ReplicaState, Happening)))
def test_every_pair_follows_the_table_or_raises(state: ReplicaState, happening: Happening) -> None:
    if happening in TABLE[state]:
        assert legal(state, happening)
        assert advance(state, happening) is TABLE[state][happening]
    else:
        assert not legal(state, happening)
        with pytest.raises(IllegalHappeningError, match=f"{state} cannot be {happening}"):
            advance(state, happening)


def test_every_state_has_a_row() -> None:
    assert set(TABLE) == set(ReplicaState)


def test_every_pending_replica_can_be_withdrawn_fail_or_be_late() -> None:
    for state in PENDING:
        assert TABLE[state][Happening.WITHDRAWN] is ReplicaState.DRAINING
        assert TABLE[state][Happening.BROKE] is ReplicaState.FAILED
        assert TABLE[state][Happening.OVERDUE] is ReplicaState.FAILED


def test_only_discovery_makes_a_replica_serve() -> None:
    ways = {(s, h) for s, row in TABLE.items() for h, following in row.items() if following is ReplicaState.SERVING}
    assert {h for s, h in ways if s is not ReplicaState.SERVING} == {Happening.DISCOVERED}


def test_what_does_not_count_never_counts_again() -> None:
    for state in set(ReplicaState) - ALIVE - {ReplicaState.PARKED}:
        assert not set(TABLE[state].values()) & ALIVE


def test_a_parked_replica_is_never_late_and_counts_only_once_it_is_woken_or_seen() -> None:
    row = TABLE[ReplicaState.PARKED]
    assert Happening.OVERDUE not in row
    assert {happening for happening, following in row.items() if following in ALIVE} == {
        Happening.WOKEN, Happening.RELEASED, Happening.DISCOVERED,
    }  # fmt: skip


def test_only_what_is_gone_stops() -> None:
    assert all(h is Happening.GONE for row in TABLE.values() for h, s in row.items() if s is ReplicaState.STOPPED)


def test_the_diagram_has_every_transition_between_two_states() -> None:
    lines = mermaid().splitlines()
    for state, row in TABLE.items():
        for happening, following in row.items():
            if following is not state:
                arrow = next(line for line in lines if line.startswith(f"    {state} --> {following}: "))
                assert happening in arrow.split(": ")[1].split(", ")
