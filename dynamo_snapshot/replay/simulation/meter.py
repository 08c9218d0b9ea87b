"""What a simulated run is measured by: the averages between two ticks, and what they make of the pool."""

from __future__ import annotations

from functools import partial
from types import MappingProxyType

from dynamo_snapshot.replay.simulation.job import Job
from dynamo_snapshot.replay.simulation.pool import Pool
from dynamo_snapshot.replay.simulation.signals import Signals
from dynamo_snapshot.replay.simulation.telemetry import busy_s, sample
from planner.observation import Observation, PoolView, Starting


class Meter:
    """Counts since the last tick; hears of every request's arrival, first token and end."""

    def __init__(self) -> None:
        self.present = 0
        """Requests in the system."""
        self.waiting = 0
        """Those without a first token."""
        self.last_finished_s = 0.0
        self._since = 0.0
        self._area = 0.0
        self._area_until = 0.0
        self._arrivals = self._input_tokens = self._finished = self._output_tokens = 0

    def arrived(self, job: Job) -> None:
        self._move(job.arrived_s)
        self.present += 1
        self.waiting += 1
        self._arrivals += 1
        self._input_tokens += job.prompt

    def first_token(self, job: Job) -> None:
        self.waiting -= 1

    def finished(self, job: Job) -> None:
        assert job.finished_s is not None
        self._move(job.finished_s)
        self.present -= 1
        self._finished += 1
        self._output_tokens += job.tokens
        self.last_finished_s = job.finished_s

    def read(self, pool: Pool, now: float) -> Signals:
        """Returns the signals of this tick and begins to count anew."""
        self._move(now)
        past = now - self._since
        signals = Signals(
            now=now,
            ready=len(pool.ready),
            starting=len(pool.starting),
            draining=len(pool.draining),
            target=pool.target,
            observe=partial(observation, pool, now),
            in_flight=self._area / past if past > 0 else float(self.present),
            waiting=self.waiting,
            arrivals=self._arrivals,
            input_tokens=self._input_tokens,
            finished=self._finished,
            output_tokens=self._output_tokens,
            busy=self._busy(pool, now),
        )
        self._since, self._area = now, 0.0
        self._arrivals = self._input_tokens = self._finished = self._output_tokens = 0
        return signals

    def _busy(self, pool: Pool, now: float) -> float:
        shares = []
        for replica in pool.ready:
            assert replica.ready_at is not None
            ready_s = now - max(self._since, replica.ready_at)
            busy = busy_s(replica.engine, now)
            shares.append(min(1.0, (busy - replica.busy_before) / ready_s) if ready_s > 0 else 0.0)
            replica.busy_before = busy
        return sum(shares) / len(shares) if shares else 0.0

    def _move(self, now: float) -> None:
        self._area += self.present * (now - self._area_until)
        self._area_until = now


def observation(pool: Pool, now: float) -> Observation:
    """What the planner plugin sees: every ready worker's newest metrics, and the fleet's status."""
    starting = tuple(Starting(replica.way.value, now - replica.attempt_at) for replica in pool.starting)
    times = {way: tuple(seconds) for way, seconds in pool.start_times.items()}
    return Observation(
        ready=len(pool.ready),
        samples=tuple([sample(replica.engine, replica.name, now) for replica in pool.ready]),
        pool=PoolView(
            target=pool.target,
            achievable=pool.target,
            not_serving=frozenset(replica.name for replica in pool.draining),
            starting=starting,
            start_times=MappingProxyType(times),
        ),
    )
