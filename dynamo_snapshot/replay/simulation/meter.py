"""What a simulated run is measured by: the averages between two ticks, and what they make of the pool."""

from __future__ import annotations

from types import MappingProxyType

from dynamo_snapshot.replay.simulation.job import Job
from dynamo_snapshot.replay.simulation.pool import Pool
from dynamo_snapshot.replay.simulation.replica import Replica
from dynamo_snapshot.replay.simulation.signals import Signals
from planner.observation import EngineSample, Observation, PoolView, Starting


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
        self._first_tokens = 0
        self._ttft_s = 0.0
        self._token_seconds_before = 0.0
        self._tokens_before = 0

    def arrived(self, job: Job) -> None:
        self._move(job.arrived_s)
        self.present += 1
        self.waiting += 1
        self._arrivals += 1
        self._input_tokens += job.prompt

    def first_token(self, job: Job) -> None:
        assert job.first_token_s is not None
        self.waiting -= 1
        self._first_tokens += 1
        self._ttft_s += job.first_token_s - job.arrived_s

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
        itl_s = self._itl_s(pool, now)
        signals = Signals(
            now=now,
            ready=len(pool.ready),
            starting=len(pool.starting),
            draining=len(pool.draining),
            target=pool.target,
            observation=observation(pool, now),
            in_flight=self._area / past if past > 0 else float(self.present),
            waiting=self.waiting,
            arrivals=self._arrivals,
            input_tokens=self._input_tokens,
            finished=self._finished,
            output_tokens=self._output_tokens,
            busy=self._busy(pool, now),
            kv_usage=_mean([replica.engine.kv_share(now) for replica in pool.ready]),
            ttft_s=self._ttft_s / self._first_tokens if self._first_tokens else None,
            itl_s=itl_s,
        )
        self._since, self._area = now, 0.0
        self._arrivals = self._input_tokens = self._finished = self._output_tokens = 0
        self._first_tokens, self._ttft_s = 0, 0.0
        return signals

    def _busy(self, pool: Pool, now: float) -> float:
        shares = []
        for replica in pool.ready:
            assert replica.ready_at is not None
            ready_s = now - max(self._since, replica.ready_at)
            busy_s = replica.engine.busy_s(now)
            shares.append(min(1.0, (busy_s - replica.busy_before) / ready_s) if ready_s > 0 else 0.0)
            replica.busy_before = busy_s
        return _mean(shares)

    def _itl_s(self, pool: Pool, now: float) -> float | None:
        seconds, tokens = pool.decoded(now)
        seconds_since, tokens_since = seconds - self._token_seconds_before, tokens - self._tokens_before
        self._token_seconds_before, self._tokens_before = seconds, tokens
        return seconds_since / tokens_since if tokens_since > 0 else None

    def _move(self, now: float) -> None:
        self._area += self.present * (now - self._area_until)
        self._area_until = now


def observation(pool: Pool, now: float) -> Observation:
    """What the planner plugin sees: every ready worker's newest metrics, and the fleet's status."""
    starting = tuple(Starting(replica.way.value, now - replica.attempt_at) for replica in pool.starting)
    times = {way: tuple(seconds) for way, seconds in pool.start_times.items()}
    return Observation(
        ready=len(pool.ready),
        samples=tuple(engine_sample(replica, now) for replica in pool.ready),
        pool=PoolView(
            target=pool.target,
            achievable=pool.target,
            not_serving=frozenset(replica.name for replica in pool.draining),
            starting=starting,
            start_times=MappingProxyType(times),
        ),
    )


def engine_sample(replica: Replica, now: float) -> EngineSample:
    """The newest forward-pass metrics of one replica; a pass that is running has not been told yet."""
    engine = replica.engine
    newest = engine.newest(now)
    queued, queued_tokens = engine.queued(now)
    return EngineSample(
        worker_id=replica.name,
        dp_rank=0,
        sequence=engine.passes(now),
        running=float(newest.prefill_requests + newest.decode_requests),
        queued=float(queued),
        pass_s=newest.seconds,
        prefill_tokens=float(newest.prefill_tokens),
        prefill_kv_tokens=float(newest.prefill_context),
        decode_requests=float(newest.decode_requests),
        decode_kv_tokens=float(newest.decode_context),
        queued_tokens=float(queued_tokens),
    )


def _mean(values: list[float]) -> float:
    return sum(values) / len(values) if values else 0.0
