"""The ledger of start times."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from dynamo_snapshot.fleet import start_times
from dynamo_snapshot.model import StartTimes, Way


def test_samples_are_kept_apart_by_pool_way_snapshot_and_node() -> None:
    times = start_times.record((), "decode", Way.RESTORE, "s1", "one", 1.0)
    times = start_times.record(times, "decode", Way.RESTORE, "s2", "one", 2.0)
    times = start_times.record(times, "decode", Way.COLD_START, None, "one", 9.0)
    times = start_times.record(times, "prefill", Way.RESTORE, "s1", "one", 7.0)
    times = start_times.record(times, "decode", Way.RESTORE, "s1", "one", 3.0)
    assert len(times) == 4
    assert sorted(start_times.samples(times, "decode", Way.RESTORE)) == [1.0, 2.0, 3.0]
    assert start_times.samples(times, "prefill", Way.COLD_START) == ()
    assert times[-1].seconds == (1.0, 3.0)


def test_the_ledger_forgets_the_series_that_was_written_longest_ago() -> None:
    times: tuple[StartTimes, ...] = ()
    for number in range(start_times.SERIES_KEPT + 5):
        times = start_times.record(times, "decode", Way.COLD_START, None, "one", 9.0)
        times = start_times.record(times, "decode", Way.RESTORE, f"s{number}", "one", 1.0)
    assert len(times) == start_times.SERIES_KEPT
    assert times[-1].snapshot_id == f"s{number}"
    assert start_times.samples(times, "decode", Way.COLD_START), "a series that is still written stays"


def test_only_the_newest_are_kept() -> None:
    times: tuple[StartTimes, ...] = ()
    for second in range(100):
        times = start_times.record(times, "decode", Way.RESTORE, "s", "one", float(second))
    assert times[0].seconds == tuple(float(second) for second in range(68, 100))


def test_nothing_measured_is_not_zero() -> None:
    assert start_times.median(()) is None
    assert start_times.p95(()) is None


@given(st.lists(st.floats(0, 1e6), min_size=1))
def test_median_and_p95_are_samples_with_the_right_share_below(seconds: list[float]) -> None:
    median, p95 = start_times.median(seconds), start_times.p95(seconds)
    assert median is not None
    assert median in seconds
    assert p95 is not None
    assert p95 in seconds
    assert sum(s <= median for s in seconds) >= len(seconds) / 2
    assert sum(s >= median for s in seconds) >= len(seconds) / 2
    assert sum(s <= p95 for s in seconds) >= 0.95 * len(seconds)
    assert sum(s < p95 for s in seconds) <= 0.95 * len(seconds)
