"""All replicas of the simulated pool: starting them, routing to them, stopping them."""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Callable

from dynamo_snapshot.model import Way
from dynamo_snapshot.replay.simulation.engine import Engine
from dynamo_snapshot.replay.simulation.job import Job, Listener
from dynamo_snapshot.replay.simulation.replica import Phase, Replica, dice
from dynamo_snapshot.replay.simulation.setting import Router, Setting
from dynamo_snapshot.replay.simulation.startup import Attempt, StartupModel

START_TIMES_KEPT = 32
"""As a FleetStatus keeps them."""


class Pool:
    """Replicas at a time that only goes forward: :meth:`advance` to it before anything else.

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
        self.on_change: Callable[[float], None] = _unheard
        """Called with the time when target or counts have changed."""
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
        self._in_turn = setting.router is Router.ROUND_ROBIN
        self._next = 0
        self._events: list[tuple[float, int, Replica]] = []
        """Time, number and whose; a replica's newest alone counts."""
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
            at, number, replica = events[0]
            if number == replica.scheduled:
                return at
            heapq.heappop(events)
        return math.inf

    def advance(self, until: float, *, inclusive: bool = True, stop: Callable[[float], bool] | None = None) -> None:
        """Lets everything happen that is due until then.

        Args:
            inclusive: what is due at that very moment, too.
            stop: asked before each event with its time; nothing happens any more once it says so.
        """
        events = self._events
        while events:
            at, number, replica = events[0]
            if number != replica.scheduled:
                heapq.heappop(events)
                continue
            if at > until or (at == until and not inclusive) or (stop is not None and stop(at)):
                return
            if replica.phase is Phase.STARTING:
                heapq.heappop(events)
                self._end_attempt(replica)
                continue
            engine = replica.engine
            engine.proceed()
            if engine.ends_at < math.inf:
                self._scheduled = replica.scheduled = number = self._scheduled + 1
                heapq.heapreplace(events, (engine.ends_at, number, replica))
                continue
            heapq.heappop(events)
            replica.scheduled = 0
            if replica.phase is Phase.DRAINING:
                self._stop(replica, at)
                self.on_change(at)

    def route(self, job: Job, now: float) -> None:
        """Gives a request that has come to a replica."""
        if self._queue is not None:
            self._queue.append(job)
            self._offer(now)
            return
        if not self.ready:
            self._held.append(job)
            return
        if self._in_turn:
            replica = self.ready[self._next % len(self.ready)]
            self._next += 1
        else:
            replica = min(self.ready, key=_in_flight)
        ends_at = replica.engine.ends_at
        replica.engine.submit(job, now)
        if replica.engine.ends_at != ends_at:
            self._schedule(replica, replica.engine.ends_at)

    def resize(self, target: int, now: float) -> None:
        """Orders what is missing and withdraws what is too much."""
        self.target = target
        missing = target - len(self.ready) - len(self.starting)
        for _ in range(missing):
            attempts = self._startup.draw(dice(self._seed, self.orders))
            replica = self._new(now, attempts)
            self.starting.append(replica)
            self._schedule(replica, replica.attempt_ends_at)
        if missing < 0:
            for replica in sorted((*self.starting, *self.ready), key=Replica.loss)[:-missing]:
                self._withdraw(replica, now)
        self.on_change(now)

    def gpu_seconds(self, now: float) -> float:
        """From each replica's order until it stopped, or until now."""
        return self.gpu_s + sum(now - replica.ordered_at for replica in (*self.ready, *self.starting, *self.draining))

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
            self._schedule(replica, replica.attempt_ends_at)
            return
        times = self.start_times.setdefault(attempt.way.value, deque(maxlen=START_TIMES_KEPT))
        times.append(attempt.seconds)
        self.starting.remove(replica)
        self._serve(replica, now)
        self.on_change(now)

    def _serve(self, replica: Replica, now: float) -> None:
        replica.phase = Phase.READY
        replica.ready_at = now
        self.ready.append(replica)
        replica.engine.start(now)
        replica.scheduled = 0
        if not replica.engine.idle:
            self._schedule(replica, replica.engine.ends_at)
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
        replica.phase = Phase.STOPPED
        replica.stopped_at = now
        replica.scheduled = 0
        self.gpu_s += now - replica.ordered_at

    def _offer(self, now: float) -> None:
        """Wakes the engine that can soonest look at the shared queue."""
        able = [replica for replica in self.ready if replica.engine.interruptible]
        if able:
            replica = min(able, key=_running)
            ends_at = replica.engine.ends_at
            replica.engine.wake(now)
            if replica.engine.ends_at != ends_at:
                self._schedule(replica, replica.engine.ends_at)

    def _schedule(self, replica: Replica, at: float) -> None:
        self._scheduled = replica.scheduled = number = self._scheduled + 1
        heapq.heappush(self._events, (at, number, replica))


def _unheard(now: float) -> None:
    pass


def _in_flight(replica: Replica) -> int:
    return replica.engine.running + len(replica.engine.queue)


def _running(replica: Replica) -> int:
    return replica.engine.running
