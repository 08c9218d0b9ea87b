"""The load generator's schedule in virtual time, its prompts, and what is read from the frontend."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dynamo_snapshot.replay.load import arrivals
from dynamo_snapshot.replay.migrations import Migration, migration_total, migrations
from dynamo_snapshot.replay.prompts import prompt
from dynamo_snapshot.replay.records import percentiles
from dynamo_snapshot.replay.trace import TraceRequest


class VirtualClock:
    def __init__(self) -> None:
        self.time = 500.0

    def now(self) -> float:
        return self.time

    async def sleep(self, seconds: float) -> None:
        self.time += seconds


@given(
    st.lists(st.floats(0, 100), max_size=30).map(sorted),
    st.lists(st.floats(0, 5), min_size=30, max_size=30),
)
async def test_arrivals_are_never_early_and_late_only_through_the_consumer(
    offsets: list[float], busy: list[float]
) -> None:
    clock = VirtualClock()
    requests = [TraceRequest(offset, 1, 1) for offset in offsets]
    free_at = clock.now()
    async for index, request in arrivals(requests, clock, start=500.0):
        due = 500.0 + request.offset_s
        assert request is requests[index]
        assert clock.now() == pytest.approx(max(due, free_at))
        clock.time += busy[index]
        free_at = clock.now()


def test_prompts_have_their_length_and_differ() -> None:
    assert len(prompt(3, 40).split()) == 40
    assert prompt(3, 40) == prompt(3, 40)
    assert len({prompt(index, 8) for index in range(2000)}) == 2000


def test_percentiles_are_nearest_rank() -> None:
    found = percentiles(float(value) for value in range(1, 101))
    assert (found.p50, found.p95, found.p99, found.max) == (50, 95, 99, 100)
    assert percentiles([]).p50 is None


def test_migrations_are_read_from_the_frontends_log(tmp_path: Path) -> None:
    log = tmp_path / "frontend.log"
    log.write_text(
        "2026-11-30T12:23:51Z \x1b[32m INFO\x1b[0m http-request: request_span: migration retry scheduled"
        ' request.attempt=1 \x1b[3mmigration.reason\x1b[0m\x1b[2m=\x1b[0m"disconnected"'
        ' migration.from_worker_id=126842051139561733 x_request_id="run-17" model="tiny"\n'
        "2026-11-30T12:23:52Z  INFO something else migration.from_worker_id=1\n"
    )
    assert migrations(log) == (Migration(request_id="run-17", from_worker=126842051139561733, reason="disconnected"),)


def test_the_migration_counter_is_summed_over_models_and_kinds() -> None:
    text = (
        "# TYPE dynamo_frontend_model_migration_total counter\n"
        'dynamo_frontend_model_migration_total{migration_type="ongoing_request",model="a"} 5\n'
        'dynamo_frontend_model_migration_total{migration_type="new_request",model="a"} 2\n'
    )
    assert migration_total(text) == 7
    assert migration_total("") == 0
