"""One engine: continuous batching with chunked prefill, first come first served, as vLLM and Dynamo's mocker do it.

Each forward pass decodes one token for every request that has its prompt computed, and fills the rest of the
token budget with chunks of prompts. Without prompts to compute, passes differ only by a growing context, so
the engine goes in one step to the next pass that changes the batch: a *stretch*. An arrival cuts a stretch at
the end of the pass that is running.
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Iterable
from typing import NamedTuple

from dynamo_snapshot.replay.simulation.job import Job, Listener
from dynamo_snapshot.replay.simulation.timing import EngineTiming, PassTimes

HEARTBEAT_S = 1.0
"""An idle engine publishes forward-pass metrics so often."""


class Pass(NamedTuple):
    """A finished forward pass, as its metrics tell it; counts are requests or tokens."""

    seconds: float = 0.0
    prefill_requests: int = 0
    prefill_tokens: int = 0
    prefill_context: int = 0
    """Tokens of these prompts that earlier passes computed."""
    decode_requests: int = 0
    decode_context: int = 0


class _Decoding(NamedTuple):
    last_step: int
    """The decode step that gives the last token."""
    admitted: int
    """A running number: the newest is preempted first."""
    context_base: int
    """Context at decode step ``s`` is this plus ``s``."""
    job: Job


class Engine:
    """One engine at a time ``now`` that only goes forward.

    Args:
        waiting: requests that no engine has begun; shared between engines for a queue in the router.
    """

    def __init__(self, timing: EngineTiming, listener: Listener, waiting: deque[Job] | None = None) -> None:
        self.ends_at = math.inf
        """When the running stretch is over and :meth:`proceed` is due."""
        self.version = 0
        """Changes with ``ends_at``."""
        self.shares_queue = waiting is not None
        self.waiting: deque[Job] = deque() if waiting is None else waiting
        self._limits = timing
        self._times = PassTimes(timing)
        self._listener = listener
        self._prefilling: list[Job] = []
        self._decoding: list[_Decoding] = []
        self._context = 0
        """Of all decoding requests."""
        self._reserved = 0
        """KV tokens of requests whose prompt is being computed."""
        self._steps = 0
        self._admitted = 0
        self._began_at = 0.0
        self._chunks: list[tuple[Job, int]] = []
        self._begun: list[Job] = []
        """Requests that were waiting until the running pass."""
        self._stretch = 0
        """Decode passes in the running stretch; 0 with chunks: one pass with prompts in it."""
        self._over_at = ((-1.0, 0), 0)
        self._passes = 0
        self._busy_s = 0.0
        self._token_seconds = 0.0
        self._decoded = 0
        self._newest: Pass | None = None

    def __repr__(self) -> str:
        state = "idle" if self.idle else f"until {self.ends_at:.3f}"
        return f"<Engine {state}: {self.running} running, {len(self.waiting)} waiting>"

    @property
    def idle(self) -> bool:
        return self.ends_at == math.inf

    @property
    def running(self) -> int:
        return len(self._prefilling) + len(self._decoding)

    @property
    def interruptible(self) -> bool:
        """What comes now is looked at before the running stretch is over."""
        return self.idle or self._stretch > 1

    def leave_queue(self) -> None:
        """Takes no more from a shared queue."""
        if self.shares_queue:
            self.shares_queue, self.waiting = False, deque()

    def start(self, now: float) -> None:
        """Begins to serve; the first heartbeat is now."""
        self._began_at = now
        self._passes = 1
        self.wake(now)

    def submit(self, job: Job, now: float) -> None:
        """Takes a request: it waits for the end of the running pass at least."""
        self.waiting.append(job)
        self.wake(now)

    def wake(self, now: float) -> None:
        """Looks at the queue as soon as the running pass is over: something has come."""
        if not self.waiting:
            return
        if self.idle:
            self._passes = self.passes(now)
            self._newest = self.newest(now)
            self._began_at = now
            self._until(now)  # not planned yet: others may come at the same instant
        elif self._stretch > 1 and self._fits(self.waiting[0]):
            elapsed = now - self._began_at
            batch = len(self._decoding)
            over = self._times.decodes_within(self._context, batch, elapsed, self._stretch)
            cut = over if self._times.decodes(self._context, batch, over) >= elapsed and over else over + 1
            if cut < self._stretch:
                self._stretch = cut
                self._until(self._began_at + self._times.decodes(self._context, batch, cut))

    def proceed(self) -> None:
        """Finishes the stretch that is over at ``ends_at`` and plans the next."""
        now = self.ends_at
        if not self.running:
            self._plan(now)
            return
        seconds = now - self._began_at
        self._busy_s += seconds
        batch = len(self._decoding)
        self._token_seconds += batch * seconds
        if self._stretch:
            self._newest = self._decode_pass(self._stretch)
            self._passes += self._stretch
            self._decoded += batch * self._stretch
            self._context += batch * self._stretch
            self._steps += self._stretch
        else:
            self._newest = self._prefill_pass(seconds)
            self._passes += 1
            self._decoded += batch
            self._context += batch
            self._steps += 1
        self._finish_decoded(now)
        self._finish_prefilled(now)
        self._plan(now)

    def passes(self, now: float) -> int:
        """Forward passes that are over at ``now``, and heartbeats: the sequence number of the newest metrics."""
        if self.idle:
            return self._passes + int((now - self._began_at) / HEARTBEAT_S)
        return self._passes + self._over(now)

    def newest(self, now: float) -> Pass:
        """The newest metrics published at ``now``; those of an idle engine are empty."""
        if self._newest is None or (self.idle and now - self._began_at >= HEARTBEAT_S):
            return Pass()
        over = self._over(now)
        return self._decode_pass(over) if over else self._newest

    def queued(self, now: float) -> tuple[int, int]:
        """Requests that waited for their prompt to be begun when the newest metrics were published, and their tokens.

        Taken at the end of a pass, before the next one is planned, as Dynamo's vLLM scheduler does it.
        """
        if self.shares_queue:
            return 0, 0
        waiting: Iterable[Job] = self.waiting
        if not self._over(now):
            before = [*self._begun, *self.waiting]
            waiting = [job for job in before if job.arrived_s < self._began_at]
        tokens = [job.to_prefill for job in waiting]
        return len(tokens), sum(tokens)

    def busy_s(self, now: float) -> float:
        """Seconds in forward passes so far."""
        return self._busy_s if self.idle else self._busy_s + now - self._began_at

    def decoded(self, now: float) -> tuple[float, int]:
        """Tokens decoded so far, with the seconds that their requests waited for them, as of the last whole pass."""
        batch = len(self._decoding)
        over = self._over(now)
        seconds = self._times.decodes(self._context, batch, over) if over else 0.0
        return self._token_seconds + batch * seconds, self._decoded + batch * over

    def kv_share(self, now: float) -> float:
        """How much of the KV cache is in use, 0 to 1."""
        return (self._context + self._reserved + len(self._decoding) * self._over(now)) / self._limits.kv_tokens

    def _over(self, now: float) -> int:
        """How many passes of the running stretch are over; asked several times at each tick."""
        if not self._stretch:
            return 0
        at = (now, self.version)
        if self._over_at[0] != at:
            within = self._times.decodes_within
            elapsed = now - self._began_at
            self._over_at = (at, within(self._context, len(self._decoding), elapsed, self._stretch))
        return self._over_at[1]

    def _plan(self, now: float) -> None:
        """Decides at a pass boundary what runs until the batch changes."""
        self._began_at = now
        self._stretch = 0
        self._chunks = self._next_chunks()
        if self._chunks:
            seconds = self._times.prefill(sum(chunk for _, chunk in self._chunks))
            if self._decoding:
                seconds += self._times.decode(self._context)
            self._until(now + seconds)
        elif self._decoding:
            self._make_room()
            batch = len(self._decoding)
            room = (self._limits.kv_tokens - self._context - self._reserved) // batch
            self._stretch = max(1, min(self._decoding[0].last_step - self._steps, room))
            self._until(now + self._times.decodes(self._context, batch, self._stretch))
        else:
            self._until(math.inf)

    def _next_chunks(self) -> list[tuple[Job, int]]:
        budget = self._limits.max_batched_tokens - len(self._decoding)
        chunks = []
        self._begun = []
        for job in self._prefilling:
            chunk = min(budget, job.to_prefill - job.prefilled)
            chunks.append((job, chunk))
            budget -= chunk
        while budget > 0 and self.waiting and self._fits(self.waiting[0]):
            job = self.waiting.popleft()
            self._prefilling.append(job)
            self._begun.append(job)
            self._reserved += job.to_prefill
            chunk = min(budget, job.to_prefill)
            chunks.append((job, chunk))
            budget -= chunk
        return chunks

    def _fits(self, job: Job) -> bool:
        if not self.running:
            return True  # nothing will ever make more room
        used = self._context + self._reserved + len(self._decoding)
        return self.running < self._limits.max_requests and used + job.to_prefill < self._limits.kv_tokens

    def _make_room(self) -> None:
        """Preempts the newest requests while one more step of all would not fit."""
        while len(self._decoding) > 1 and self._context + len(self._decoding) > self._limits.kv_tokens:
            newest = max(self._decoding, key=lambda decoding: decoding.admitted)
            self._decoding.remove(newest)
            heapq.heapify(self._decoding)
            self._context -= newest.context_base + self._steps
            job = newest.job
            job.given = job.tokens - (newest.last_step - self._steps)
            job.prefilled = 0
            self.waiting.appendleft(job)

    def _finish_decoded(self, now: float) -> None:
        decoding = self._decoding
        while decoding and decoding[0].last_step <= self._steps:
            done = heapq.heappop(decoding)
            self._context -= done.context_base + self._steps
            self._finish(done.job, now)

    def _finish_prefilled(self, now: float) -> None:
        for job, chunk in self._chunks:
            job.prefilled += chunk
            if job.prefilled < job.to_prefill:
                continue
            self._prefilling.remove(job)
            self._reserved -= job.to_prefill
            context = job.to_prefill + 1
            job.given += 1
            if job.first_token_s is None:
                job.first_token_s = now
                self._listener.first_token(job)
            if job.given >= job.tokens:
                self._finish(job, now)
                continue
            self._admitted += 1
            self._context += context
            last_step = self._steps + job.tokens - job.given
            heapq.heappush(self._decoding, _Decoding(last_step, self._admitted, context - self._steps, job))
        self._chunks = []

    def _finish(self, job: Job, now: float) -> None:
        job.given = job.tokens
        job.finished_s = now
        self._listener.finished(job)

    def _decode_pass(self, number: int) -> Pass:
        """The ``number``-th pass of the running stretch, from 1."""
        batch = len(self._decoding)
        context = self._context + batch * (number - 1)
        return Pass(self._times.decode(context), decode_requests=batch, decode_context=context)

    def _prefill_pass(self, seconds: float) -> Pass:
        return Pass(
            seconds,
            prefill_requests=len(self._chunks),
            prefill_tokens=sum(chunk for _, chunk in self._chunks),
            prefill_context=sum(job.prefilled for job, _ in self._chunks),
            decode_requests=len(self._decoding),
            decode_context=self._context,
        )

    def _until(self, end: float) -> None:
        self.ends_at = end
        self.version += 1
