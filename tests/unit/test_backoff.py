"""Waiting before the next try."""

from __future__ import annotations

from dynamo_snapshot.backoff import Backoff


def test_it_is_capped_jittered_and_reset() -> None:
    class Highest:
        def uniform(self, low: float, high: float) -> float:
            assert low == 0.0
            return high

    backoff = Backoff(first_s=0.1, limit_s=1.0, dice=Highest())  # type: ignore[arg-type]  # only uniform() is used
    assert [backoff.next() for _ in range(6)] == [0.1, 0.2, 0.4, 0.8, 1.0, 1.0]
    backoff.reset()
    assert backoff.next() == 0.1
