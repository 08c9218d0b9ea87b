"""What one engine works on: which requests run, and which prompts the next pass computes, as vLLM's scheduler decides.

First come first served. Every request that has its prompt computed decodes one token in each pass; the rest of the
token budget is filled with chunks of prompts. A request is let in while all contexts fit into the KV cache; when
those that run outgrow it, the newest is preempted and computes everything again.
"""

from __future__ import annotations

import heapq
from collections import deque

from dynamo_snapshot.replay.simulation.job import Job, Listener
from dynamo_snapshot.replay.simulation.timing import EngineTiming

Decoding = tuple[int, int, int, Job]
"""The decode step that gives the last token; a running number, the newest is preempted first; what the context is
beyond the number of the step; the request."""


class Batch:
    """Requests that wait and run; it knows passes, not how long they take.

    Args:
        waiting: requests that no engine has begun, oldest first.
    """

    __slots__ = (
        "_admitted",
        "_limits",
        "_listener",
        "_steps",
        "begun",
        "chunks",
        "context",
        "decoding",
        "prefilling",
        "reserved",
        "waiting",
    )

    def __init__(self, limits: EngineTiming, listener: Listener, waiting: deque[Job]) -> None:
        self.waiting = waiting
        self.prefilling: list[Job] = []
        self.decoding: list[Decoding] = []
        """A heap."""
        self.context = 0
        """Tokens of all decoding requests."""
        self.reserved = 0
        """KV tokens of requests whose prompt is being computed."""
        self.chunks: list[tuple[Job, int]] = []
        """Prompts in the running pass, and how many tokens of each."""
        self.begun: list[Job] = []
        """Requests that were waiting until the running pass."""
        self._limits = limits
        self._listener = listener
        self._steps = 0
        self._admitted = 0

    @property
    def running(self) -> int:
        return len(self.prefilling) + len(self.decoding)

    def fits(self, job: Job) -> bool:
        """Whether ``job`` can be let in."""
        decoding = len(self.decoding)
        running = len(self.prefilling) + decoding
        if not running:
            return True  # nothing will ever make more room
        limits = self._limits
        used = self.context + self.reserved + decoding
        return running < limits.max_requests and used + job.prompt + job.given < limits.kv_tokens

    def plan(self) -> int:
        """Fills the next pass with prompts; returns how many tokens of them, 0 if it only decodes."""
        waiting, prefilling = self.waiting, self.prefilling
        self.begun = begun = []
        if not (waiting or prefilling):
            return 0
        chunks = self.chunks
        most = budget = self._limits.max_batched_tokens - len(self.decoding)
        for job in prefilling:
            chunk = min(budget, job.prompt + job.given - job.prefilled)
            chunks.append((job, chunk))
            budget -= chunk
        while budget > 0 and waiting and self.fits(waiting[0]):
            job = waiting.popleft()
            prefilling.append(job)
            begun.append(job)
            tokens = job.prompt + job.given
            self.reserved += tokens
            chunk = tokens if tokens < budget else budget
            chunks.append((job, chunk))
            budget -= chunk
        return most - budget

    def decodes(self) -> int:
        """How many passes that only decode can follow each other before the batch changes, at least 1."""
        kv_tokens, decoding = self._limits.kv_tokens, self.decoding
        if self.context + len(decoding) > kv_tokens:
            self._make_room()
        room = (kv_tokens - self.context - self.reserved) // len(decoding)
        return max(1, min(decoding[0][0] - self._steps, room))

    def finish(self, passes: int, now: float) -> None:
        """Takes it that ``passes`` passes, one if there were prompts, are over ``now``."""
        decoding = self.decoding
        self._steps = step = self._steps + passes
        self.context += len(decoding) * passes
        while decoding and decoding[0][0] <= step:
            _, _, base, job = heapq.heappop(decoding)
            self.context -= base + step
            self._end(job, now)
        if self.chunks:
            self._finish_chunks(now)

    def _finish_chunks(self, now: float) -> None:
        for job, chunk in self.chunks:
            job.prefilled += chunk
            tokens = job.prompt + job.given
            if job.prefilled < tokens:
                continue
            self.prefilling.remove(job)
            self.reserved -= tokens
            job.given += 1
            if job.first_token_s is None:
                job.first_token_s = now
                self._listener.first_token(job)
            if job.given >= job.tokens:
                self._end(job, now)
                continue
            context = tokens + 1
            self.context += context
            self._admitted += 1
            last_step = self._steps + job.tokens - job.given
            heapq.heappush(self.decoding, (last_step, self._admitted, context - self._steps, job))
        self.chunks = []

    def _make_room(self) -> None:
        """Preempts the newest requests while one more step of all would not fit."""
        decoding = self.decoding
        while len(decoding) > 1 and self.context + len(decoding) > self._limits.kv_tokens:
            newest = max(decoding, key=_admission)
            decoding.remove(newest)
            heapq.heapify(decoding)
            last_step, _, base, job = newest
            self.context -= base + self._steps
            job.given = job.tokens - (last_step - self._steps)
            job.prefilled = 0
            self.waiting.appendleft(job)

    def _end(self, job: Job, now: float) -> None:
        job.given = job.tokens
        job.finished_s = now
        self._listener.finished(job)


def _admission(decoding: Decoding) -> int:
    return decoding[1]
