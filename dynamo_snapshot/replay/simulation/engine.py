"""One engine in time: passes with prompts one by one, and passes that only decode many at once.

Without prompts to compute, passes differ only by a growing context, so the engine goes in one step to the next
pass that changes the batch: a *stretch*. An arrival cuts a stretch at the end of the pass that is running.
"""

from __future__ import annotations

import math
from collections import deque

from dynamo_snapshot.replay.simulation.batch import Batch
from dynamo_snapshot.replay.simulation.job import Job, Listener
from dynamo_snapshot.replay.simulation.timing import EngineTiming, PassTimes

HEARTBEAT_S = 1.0
"""An idle engine publishes forward-pass metrics so often."""

PassFacts = tuple[float | None, int, int, int, int, int]
"""Of a finished pass: seconds (None: those of a decode step over its context), prompts, their tokens, those that
earlier passes computed, decoding requests, their context."""
NOTHING: PassFacts = (0.0, 0, 0, 0, 0, 0)


class Engine:
    """One engine at a time ``now`` that only goes forward; what its metrics tell of it: :mod:`telemetry`.

    Args:
        waiting: requests that no engine has begun; shared between engines for a queue in the router.
    """

    __slots__ = (
        "batch",
        "began_at",
        "busy_before",
        "ends_at",
        "newest",
        "passes",
        "shares_queue",
        "stretch",
        "times",
        "tokens",
    )

    def __init__(self, timing: EngineTiming, listener: Listener, waiting: deque[Job] | None = None) -> None:
        self.ends_at = math.inf
        """When the running stretch is over and :meth:`proceed` is due."""
        self.began_at = 0.0
        """When it began; of an idle engine, when that was over or it was started."""
        self.stretch = 0
        """Decode passes in it; 0: one pass with prompts."""
        self.tokens = 0
        """Of these prompts."""
        self.shares_queue = waiting is not None
        self.batch = Batch(timing, listener, deque() if waiting is None else waiting)
        self.times = PassTimes(timing)
        self.passes = 0
        """That are over, and heartbeats, up to ``began_at``."""
        self.newest = NOTHING
        """The last of them."""
        self.busy_before = 0.0
        """Seconds in forward passes up to ``began_at``."""

    def __repr__(self) -> str:
        state = "idle" if self.idle else f"until {self.ends_at:.3f}"
        return f"<Engine {state}: {self.batch.running} running, {len(self.batch.waiting)} waiting>"

    @property
    def idle(self) -> bool:
        return self.ends_at == math.inf

    @property
    def running(self) -> int:
        return self.batch.running

    @property
    def queue(self) -> deque[Job]:
        return self.batch.waiting

    @property
    def interruptible(self) -> bool:
        """What comes now is looked at before the running stretch is over."""
        return self.idle or self.stretch > 1

    def leave_queue(self) -> None:
        """Takes no more from a shared queue."""
        if self.shares_queue:
            self.shares_queue, self.batch.waiting = False, deque()

    def start(self, now: float) -> None:
        """Begins to serve; the first heartbeat is now."""
        self.began_at = now
        self.passes = 1
        self.wake(now)

    def submit(self, job: Job, now: float) -> None:
        """Takes a request: it waits for the end of the running pass at least."""
        self.batch.waiting.append(job)
        self.wake(now)

    def wake(self, now: float) -> None:
        """Looks at the queue as soon as the running pass is over: something has come."""
        waiting = self.batch.waiting
        if not waiting:
            return
        if self.ends_at == math.inf:
            heartbeats = int((now - self.began_at) / HEARTBEAT_S)
            if heartbeats:
                self.passes += heartbeats
                self.newest = NOTHING
            self.began_at = self.ends_at = now  # not planned yet: others may come at the same instant
        elif self.stretch > 1 and self.batch.fits(waiting[0]):
            self._cut(now - self.began_at)

    def proceed(self) -> None:
        """Finishes the stretch that is over at ``ends_at`` and plans the next."""
        now = self.ends_at
        batch = self.batch
        decoding = len(batch.decoding)
        if decoding or batch.prefilling:
            seconds = now - self.began_at
            self.busy_before += seconds
            passes = self.stretch
            if passes:
                context = batch.context + decoding * (passes - 1)
                self.newest = (None, 0, 0, 0, decoding, context)
            else:
                passes = 1
                chunks = batch.chunks
                computed = sum([job.prefilled for job, _ in chunks])
                self.newest = (seconds, len(chunks), self.tokens, computed, decoding, batch.context)
            self.passes += passes
            batch.finish(passes, now)
        self._plan(now)

    def over(self, now: float) -> int:
        """How many passes of the running stretch are over."""
        if not self.stretch:
            return 0
        batch = self.batch
        return self.times.decodes_within(batch.context, len(batch.decoding), now - self.began_at, self.stretch)

    def _plan(self, now: float) -> None:
        """Decides at a pass boundary what runs until the batch changes."""
        batch, times = self.batch, self.times
        self.began_at = now
        self.tokens = tokens = batch.plan()
        if tokens:
            self.stretch = 0
            seconds = times.prefill(tokens)
            if batch.decoding:
                seconds += times.decode(batch.context)
            self.ends_at = now + seconds
        elif batch.decoding:
            self.stretch = passes = batch.decodes()
            self.ends_at = now + times.decodes(batch.context, len(batch.decoding), passes)
        else:
            self.stretch = 0
            self.ends_at = math.inf

    def _cut(self, elapsed: float) -> None:
        """Ends the running stretch with the pass that is running ``elapsed`` seconds after its begin."""
        times, context, decoding = self.times, self.batch.context, len(self.batch.decoding)
        cut = times.decodes_within(context, decoding, elapsed, self.stretch)
        if not cut or times.decodes(context, decoding, cut) < elapsed:
            cut += 1
        if cut < self.stretch:
            self.stretch = cut
            self.ends_at = self.began_at + times.decodes(context, decoding, cut)
