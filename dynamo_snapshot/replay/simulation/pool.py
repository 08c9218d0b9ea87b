"""All replicas of the simulated pool: starting them, routing to them, stopping them."""

from __future__ import annotations

import heapq
import math
from collections import deque

from dynamo_snapshot.model import Way
from dynamo_snapshot.replay.simulation.engine import Engine
from dynamo_snapshot.replay.simulation.job import Job, Listener
from dynamo_snapshot.replay.simulation.replica import Phase, Replica, dice
from dynamo_snapshot.replay.simulation.setting import Router, Setting
from dynamo_snapshot.replay.simulation.startup import Attempt, StartupModel

START_TIMES_KEPT = 32
"""As a FleetStatus keeps them."""


class Pool:
    """Replicas at a time that only goes forward: call :meth:`proceed` up to it before anything else.

    Args:
        ready: replicas that serve from second 0.
        seed: of the start-up times; the n-th start of two runs with one seed is the same.
    """

    def __init__(self, setting: Setting, startup: StartupModel, seed: int, listener: Listener, ready: int) -> None:
        self.target = ready
        self.ready: list[Replica] = []
        self.starting: list[Replica] = []
        self.draining: list[Replica] = []
        self.start_times: dict[str, deque[float]] = {}
        """By way: seconds from order to serving, newest last."""
        self.changes = 0
        """Grows with every change of the counts."""
        self.failed_starts = 0
        self.orders = 0
        self.gpu_s = 0.0
        """Of the replicas that have stopped."""
        self._setting = setting
        self._startup = startup
        self._seed = seed
        self._listener = listener
        self._queue: deque[Job] | None = deque() if setting.router is Router.SHARED_QUEUE else None
        self._held: deque[Job] = deque() if self._queue is None else self._queue
        """While no replica is ready."""
        self._next = 0
        self._decoded_before = (0.0, 0)
        self._events: list[tuple[float, int, int, Replica]] = []
        self._scheduled = 0
        for _ in range(ready):
            replica = self._new(0.0, (Attempt(Way.COLD_START, 0.0, True),))
            self._serve(replica, 0.0)

    def __repr__(self) -> str:
        return f"<Pool {len(self.ready)} of {self.target}: {self.starting} starting, {self.draining} draining>"

    @property
    def next_event_at(self) -> float:
        """When something happens next by itself; infinity: nothing will."""
        events = self._events
        while events:
            at, _, version, replica = events[0]
            if replica.phase is not Phase.STOPPED and version == self._version(replica):
                return at
            heapq.heappop(events)
        return math.inf

    def proceed(self) -> None:
        """Lets the next event happen."""
        at, _, _, replica = heapq.heappop(self._events)
        if replica.phase is Phase.STARTING:
            self._end_attempt(replica)
            return
        replica.engine.proceed()
        if replica.phase is Phase.DRAINING and replica.engine.idle:
            self._stop(replica, at)
        else:
            self._schedule(replica)

    def route(self, job: Job, now: float) -> None:
        """Gives a request that has come to a replica."""
        if self._queue is not None:
            self._queue.append(job)
            self._offer(now)
            return
        if not self.ready:
            self._held.append(job)
            return
        if self._setting.router is Router.ROUND_ROBIN:
            replica = self.ready[self._next % len(self.ready)]
            self._next += 1
        else:
            replica = min(self.ready, key=_in_flight)
        version = replica.engine.version
        replica.engine.submit(job, now)
        if replica.engine.version != version:
            self._schedule(replica)

    def resize(self, target: int, now: float) -> None:
        """Orders what is missing and withdraws what is too much."""
        self.target = target
        self.changes += 1
        missing = target - len(self.ready) - len(self.starting)
        for _ in range(missing):
            attempts = self._startup.draw(dice(self._seed, self.orders))
            replica = self._new(now, attempts)
            self.starting.append(replica)
            self._schedule(replica)
        if missing < 0:
            for replica in sorted((*self.starting, *self.ready), key=Replica.loss)[:-missing]:
                self._withdraw(replica, now)

    def gpu_seconds(self, now: float) -> float:
        """From each replica's order until it stopped, or until now."""
        return self.gpu_s + sum(now - replica.ordered_at for replica in (*self.ready, *self.starting, *self.draining))

    def decoded(self, now: float) -> tuple[float, int]:
        """Of all engines, those that have stopped too: see :meth:`Engine.decoded`."""
        seconds, tokens = self._decoded_before
        for replica in (*self.ready, *self.draining):
            of_one = replica.engine.decoded(now)
            seconds, tokens = seconds + of_one[0], tokens + of_one[1]
        return seconds, tokens

    def _new(self, now: float, attempts: tuple[Attempt, ...]) -> Replica:
        engine = Engine(self._setting.engine, self._listener, self._queue)
        replica = Replica(str(self.orders + 1), now, attempts, engine)
        self.orders += 1
        return replica

    def _end_attempt(self, replica: Replica) -> None:
        now = replica.attempt_ends_at
        attempt = replica.attempts[0]
        if not attempt.succeeds:
            self.failed_starts += 1
            replica.attempts.popleft()
            replica.attempt_at = now
            self._schedule(replica)
            return
        times = self.start_times.setdefault(attempt.way.value, deque(maxlen=START_TIMES_KEPT))
        times.append(attempt.seconds)
        self.starting.remove(replica)
        self._serve(replica, now)

    def _serve(self, replica: Replica, now: float) -> None:
        replica.phase = Phase.READY
        replica.ready_at = now
        self.ready.append(replica)
        self.changes += 1
        replica.engine.start(now)
        self._schedule(replica)
        if self._queue is None:
            while self._held:
                self.route(self._held.popleft(), now)

    def _withdraw(self, replica: Replica, now: float) -> None:
        if replica.phase is Phase.STARTING:
            self.starting.remove(replica)
            self._stop(replica, now)
            return
        self.ready.remove(replica)
        replica.phase = Phase.DRAINING
        replica.engine.leave_queue()
        self.draining.append(replica)
        if replica.engine.idle:
            self._stop(replica, now)

    def _stop(self, replica: Replica, now: float) -> None:
        if replica.phase is Phase.DRAINING:
            self.draining.remove(replica)
            seconds, tokens = replica.engine.decoded(now)
            self._decoded_before = (self._decoded_before[0] + seconds, self._decoded_before[1] + tokens)
        replica.phase = Phase.STOPPED
        replica.stopped_at = now
        self.changes += 1
        self.gpu_s += now - replica.ordered_at

    def _offer(self, now: float) -> None:
        """Wakes the engine that can soonest look at the shared queue."""
        able = [replica for replica in self.ready if replica.engine.interruptible]
        if able:
            replica = min(able, key=_running)
            replica.engine.wake(now)
            self._schedule(replica)

    def _schedule(self, replica: Replica) -> None:
        starting = replica.phase is Phase.STARTING
        at = replica.attempt_ends_at if starting else replica.engine.ends_at
        if at < math.inf:
            self._scheduled += 1
            heapq.heappush(self._events, (at, self._scheduled, self._version(replica), replica))

    @staticmethod
    def _version(replica: Replica) -> int:
        return -len(replica.attempts) if replica.phase is Phase.STARTING else replica.engine.version


def _in_flight(replica: Replica) -> int:
    return replica.engine.running + len(replica.engine.waiting)


def _running(replica: Replica) -> int:
    return replica.engine.running
