"""The simulated pool: who starts, who is routed to, who goes first, and what is charged."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import pytest

from dynamo_snapshot.replay.simulation.job import Job
from dynamo_snapshot.replay.simulation.meter import observation
from dynamo_snapshot.replay.simulation.pool import Pool
from dynamo_snapshot.replay.simulation.setting import Router, Setting
from dynamo_snapshot.replay.simulation.startup import StartupModel, startup_model
from planner.observation import PoolView, Starting

EXACT = startup_model("restore(2,cold=40,spread=0)")


@dataclass
class Heard:
    ends: list[Job] = field(default_factory=list)

    def first_token(self, job: Job) -> None:
        pass

    def finished(self, job: Job) -> None:
        self.ends.append(job)


def made(startup: StartupModel = EXACT, ready: int = 1, **setting: Any) -> Pool:
    return Pool(Setting(**setting), startup, 0, Heard(), ready)


def run_until(pool: Pool, now: float) -> None:
    pool.advance(now)
    assert pool.next_event_at > now


def view(pool: Pool, now: float) -> PoolView:
    seen = observation(pool, now).pool
    assert seen is not None
    return seen


def counts(pool: Pool) -> tuple[int, int, int]:
    return len(pool.ready), len(pool.starting), len(pool.draining)


def test_a_start_takes_its_time_and_is_measured() -> None:
    pool = made()
    pool.resize(3, 10.0)
    run_until(pool, 11.9)
    assert counts(pool) == (1, 2, 0)
    assert view(pool, 11.5).starting == (Starting("restore", 1.5),) * 2
    run_until(pool, 12.0)
    assert counts(pool) == (3, 0, 0)
    seen = observation(pool, 12.0)
    assert seen.ready == 3
    assert seen.pool is not None
    assert dict(seen.pool.start_times) == {"restore": (2.0, 2.0)}
    assert seen.pool.limit is None


def test_advancing_ends_before_an_arrival_and_when_it_is_told_to() -> None:
    changed: list[float] = []
    pool = made()
    pool.on_change = changed.append
    for at in (1.0, 1.5):
        pool.resize(len(pool.ready) + len(pool.starting) + 1, at)
    pool.advance(3.0, inclusive=False)
    assert counts(pool) == (1, 2, 0)
    pool.advance(10.0, stop=lambda at: at > 3.0)
    assert counts(pool) == (2, 1, 0)
    assert pool.next_event_at == 3.5
    pool.advance(3.5)
    assert counts(pool) == (3, 0, 0)
    assert changed == [1.0, 1.5, 3.0, 3.5]


def test_a_restore_that_fails_is_seen_as_a_cold_start() -> None:
    pool = made(startup_model("restore(2,cold=40,failures=1,spread=0)"))
    pool.resize(2, 0.0)
    run_until(pool, 5.0)
    assert pool.failed_starts == 1
    assert view(pool, 5.0).starting == (Starting("cold_start", 3.0),)
    run_until(pool, 42.0)
    assert counts(pool) == (2, 0, 0)
    assert {way: tuple(times) for way, times in pool.start_times.items()} == {"cold_start": (40.0,)}


def test_starting_replicas_go_before_ready_ones() -> None:
    pool = made(ready=2)
    pool.resize(5, 0.0)
    pool.resize(3, 1.0)
    assert counts(pool) == (2, 1, 0)
    pool.resize(1, 1.5)
    assert counts(pool) == (1, 0, 0)
    assert pool.gpu_seconds(10.0) == pytest.approx(2 * 1.0 + 1.5 + 1.5 + 10.0)
    run_until(pool, 60.0)
    assert counts(pool) == (1, 0, 0)


def test_a_cold_start_goes_before_a_restore() -> None:
    pool = made(startup_model("restore(2,cold=40,failures=0.5,spread=0)"))
    pool.resize(9, 0.0)
    run_until(pool, 1.0)
    pool.resize(10, 1.0)
    run_until(pool, 2.5)
    cold = [replica for replica in pool.starting if replica.way == "cold_start"]
    restoring = len(pool.starting) - len(cold)
    assert cold
    assert restoring
    pool.resize(10 - len(cold), 2.5)
    assert {replica.way.value for replica in pool.starting} == {"restore"}


def test_the_least_loaded_ready_replica_drains_and_loses_nothing() -> None:
    pool = made(ready=2, router=Router.ROUND_ROBIN)
    jobs = [Job(0.0, 100, 50), Job(0.0, 100, 50), Job(0.0, 100, 400)]
    for job in jobs:
        pool.route(job, 0.0)
    run_until(pool, 0.1)
    pool.resize(1, 0.1)
    assert counts(pool) == (1, 0, 1)
    late = Job(0.2, 100, 1)
    pool.route(late, 0.2)
    assert [replica.in_flight for replica in pool.ready] == [3]
    assert view(pool, 0.2).not_serving == {"2"}
    run_until(pool, 100.0)
    assert counts(pool) == (1, 0, 0)
    assert all(job.finished_s for job in (*jobs, late))
    assert jobs[1].finished_s is not None
    assert pool.gpu_seconds(100.0) == pytest.approx(100.0 + jobs[1].finished_s)


@pytest.mark.parametrize("router", list(Router))
def test_requests_wait_for_the_first_replica(router: Router) -> None:
    pool = made(router=router)
    pool.resize(0, 0.0)
    pool.resize(1, 0.0)
    job = Job(0.5, 100, 2)
    pool.route(job, 0.5)
    assert pool.next_event_at == 2.0
    run_until(pool, 3.0)
    assert job.first_token_s is not None
    assert job.first_token_s > 2.0


def test_least_loaded_goes_to_the_emptiest_and_round_robin_in_turn() -> None:
    loads = {}
    for router in (Router.LEAST_LOADED, Router.ROUND_ROBIN):
        pool = made(ready=2, router=router)
        for tokens in (1000, 1, 1000, 1, 1000):
            pool.route(Job(0.0, 10, tokens), 0.0)
        run_until(pool, 0.05)
        for _ in range(2):
            pool.route(Job(0.05, 10, 1000), 0.05)
        loads[router] = [replica.in_flight for replica in pool.ready]
    assert loads[Router.ROUND_ROBIN] == [4, 1]
    assert loads[Router.LEAST_LOADED] == [3, 2]


def test_a_shared_queue_lets_a_new_replica_take_what_waits() -> None:
    waits = {}
    for router in (Router.LEAST_LOADED, Router.SHARED_QUEUE):
        pool = made(router=router)
        jobs = [Job(0.0, 8192, 5) for _ in range(60)]
        for job in jobs:
            pool.route(job, 0.0)
        pool.resize(4, 0.0)
        run_until(pool, 1000.0)
        waits[router] = max(job.first_token_s or math.inf for job in jobs)
    assert waits[Router.LEAST_LOADED] > 10
    assert 3.5 < waits[Router.SHARED_QUEUE] < 5


def test_an_engine_that_leaves_takes_no_more_from_a_shared_queue() -> None:
    pool = made(ready=2, router=Router.SHARED_QUEUE)
    jobs = [Job(0.0, 8000, 3) for _ in range(10)]
    for job in jobs:
        pool.route(job, 0.0)
    run_until(pool, 0.3)
    pool.resize(1, 0.3)
    run_until(pool, 100.0)
    assert counts(pool) == (1, 0, 0)
    assert all(job.finished_s for job in jobs)
    assert pool.gpu_seconds(0.0) < 1.0
