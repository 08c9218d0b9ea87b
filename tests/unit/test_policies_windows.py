"""Sliding windows of a metric."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dynamo_snapshot.replay.policies.windows import Averages, Recent


def test_a_mean_weighs_spans_by_their_length_within_the_window() -> None:
    averages = Averages(10)
    averages.add(0, 4, 1.0)
    averages.add(4, 6, 4.0)
    assert averages.mean(6) == pytest.approx((4 * 1 + 2 * 4) / 6)
    assert averages.mean(6, 3) == pytest.approx((1 * 1 + 2 * 4) / 3)
    assert averages.mean(6, 1) == 4.0
    averages.add(6, 16, 0.0)
    assert averages.mean(16) == 0.0


def test_there_is_no_mean_of_nothing() -> None:
    averages = Averages(10)
    assert averages.mean(5) is None
    averages.add(5, 5, 7.0)
    assert averages.mean(5) is None


@given(st.lists(st.floats(0, 100), min_size=1, max_size=40), st.integers(1, 20))
def test_equal_spans_give_the_mean_of_the_last_values(values: list[float], window: int) -> None:
    averages = Averages(20)
    for second, value in enumerate(values):
        averages.add(second, second + 1, value)
    last = values[-window:]
    assert averages.mean(len(values), window) == pytest.approx(sum(last) / len(last))


def test_extremes_forget_what_is_older_than_the_window_but_never_the_newest() -> None:
    recent = Recent(10)
    recent.add(0, 9)
    recent.add(5, 3)
    assert recent.highest() == 9
    recent.add(10, 1)
    assert recent.highest() == 3
    recent.add(100, 2)
    assert recent.highest() == 2
    assert recent.since(99) == [2]
    assert recent.since(100) == []
