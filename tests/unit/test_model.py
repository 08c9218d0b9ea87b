"""Domain values survive the wire, and the reason codes are explained."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dynamo_snapshot.model import (
    Order,
    OrderKind,
    OrderStatus,
    Outcome,
    Phase,
    Reason,
    Reported,
    Wanted,
    WorkerSpec,
    decode,
    encode,
)
from dynamo_snapshot.reasons import EXPLANATIONS

names = st.text(min_size=1, max_size=12)
times = st.floats(min_value=0, max_value=4e9)
orders = st.builds(
    Order,
    id=names,
    kind=st.sampled_from(OrderKind),
    replica_id=names,
    pool=names,
    fence=st.integers(0, 2**62),
    issued_at=times,
    deadline=times,
    snapshot_id=st.none() | names,
    capture=st.booleans(),
    reason=st.text(max_size=20),
)
specs = st.builds(WorkerSpec, command=st.lists(names, min_size=1, max_size=3).map(tuple))
outcomes = st.builds(
    Outcome,
    order_id=names,
    status=st.sampled_from(OrderStatus),
    started_at=times,
    finished_at=times,
    phases=st.lists(st.builds(Phase, name=names, seconds=times), max_size=3).map(tuple),
)


@given(
    st.builds(
        Wanted,
        node=names,
        fence=st.integers(0, 2**62),
        sequence=st.integers(0, 2**62),
        workers=st.dictionaries(names, specs, max_size=2),
        orders=st.lists(orders, max_size=3).map(tuple),
    )
)
def test_wanted_survives_the_wire(wanted: Wanted) -> None:
    assert decode(encode(wanted), Wanted) == wanted


@given(
    st.builds(
        Reported,
        node=names,
        sequence=st.integers(0, 2**62),
        fence=st.integers(0, 2**62),
        at=times,
        outcomes=st.lists(outcomes, max_size=3).map(tuple),
    )
)
def test_reported_survives_the_wire(reported: Reported) -> None:
    assert decode(encode(reported), Reported) == reported


def test_what_does_not_fit_is_refused_naming_the_field() -> None:
    with pytest.raises(msgspec.ValidationError, match=r"\$\.fence"):
        decode('{"node": "a", "fence": "high", "sequence": 1}', Wanted)


def test_every_reason_is_explained() -> None:
    assert set(EXPLANATIONS) == set(Reason)
    assert all(text.endswith(".") for explanation in EXPLANATIONS.values() for text in explanation)
