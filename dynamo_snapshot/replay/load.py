"""An open-loop load generator: requests go out when the trace says, whatever became of earlier ones.

A closed loop would slow down with the system under test and hide its queueing. A bound on requests in
flight exists only as a safety net; when it was hit, the summary says so.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import aiohttp

from dynamo_snapshot.replay.chat import REQUEST_ID_HEADER, Answer, Endpoint, ask, client_session
from dynamo_snapshot.replay.prompts import prompt
from dynamo_snapshot.replay.records import CANCELLED, LoadSummary, RequestRecord, summarize
from dynamo_snapshot.replay.trace import TraceRequest


class Clock(Protocol):
    def now(self) -> float:
        """Seconds that never go back."""

    async def sleep(self, seconds: float) -> None: ...


class MonotonicClock:
    def now(self) -> float:
        return time.monotonic()

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)


@dataclass(frozen=True)
class LoadProgress:
    """Requests so far."""

    planned: int
    sent: int
    finished: int
    failed: int
    in_flight: int


async def arrivals(
    requests: Sequence[TraceRequest], clock: Clock, start: float
) -> AsyncIterator[tuple[int, TraceRequest]]:
    """Yields each request with its index at ``start + offset_s`` or, when the consumer is late, at once."""
    for index, request in enumerate(requests):
        wait = start + request.offset_s - clock.now()
        if wait > 0:
            await clock.sleep(wait)
        yield index, request


class LoadGenerator:
    """One run of one trace. ``records`` and ``progress`` may be read while it runs.

    Args:
        requests: by offset; token counts are sent as they are (see :func:`..trace.scaled`).
        max_in_flight: the safety net.
    """

    def __init__(
        self,
        requests: Sequence[TraceRequest],
        endpoint: Endpoint,
        *,
        max_in_flight: int = 2048,
        clock: Clock | None = None,
    ) -> None:
        self._requests = tuple(requests)
        self._endpoint = endpoint
        self._clock = clock or MonotonicClock()
        self._slots = asyncio.Semaphore(max_in_flight)
        self._stopping = asyncio.Event()
        self._run_id = uuid.uuid4().hex[:12]
        self._start: float | None = None
        self._end: float | None = None
        self._cpu_s = 0.0
        self._sent = 0
        self._peak = 0
        self._limit_hits = 0
        self.records: list[RequestRecord] = []

    @property
    def progress(self) -> LoadProgress:
        failed = sum(record.failed for record in self.records)
        finished = len(self.records)
        return LoadProgress(len(self._requests), self._sent, finished, failed, self._sent - finished)

    def stop(self) -> None:
        """Sends nothing more; :meth:`run` returns when what is in flight has ended."""
        self._stopping.set()

    async def run(self) -> LoadSummary:
        """Sends everything and waits for the last answer.

        Cancelling it cancels what is in flight, which is then recorded as cancelled, and closes all
        connections before the cancellation goes on; :meth:`summary` still tells what had happened.
        """
        cpu = time.thread_time()
        self._start = self._clock.now()
        try:
            async with client_session() as session, asyncio.TaskGroup() as group:
                sender = group.create_task(self._send_all(session, group), name="load-sender")
                stopper = group.create_task(self._stop_sender(sender), name="load-stopper")
                await asyncio.wait([sender])
                stopper.cancel()
        finally:
            self._end = self._clock.now()
            self._cpu_s = time.thread_time() - cpu
        return self.summary()

    def summary(self) -> LoadSummary:
        """The run in numbers, as far as it has come."""
        end = self._end if self._end is not None else self._clock.now()
        return summarize(
            self.records,
            duration_s=0.0 if self._start is None else end - self._start,
            generator_cpu_s=self._cpu_s,
            concurrency_limit_hits=self._limit_hits,
            peak_in_flight=self._peak,
        )

    async def _stop_sender(self, sender: asyncio.Task[None]) -> None:
        await self._stopping.wait()
        sender.cancel()

    async def _send_all(self, session: aiohttp.ClientSession, group: asyncio.TaskGroup) -> None:
        assert self._start is not None
        async for index, request in arrivals(self._requests, self._clock, self._start):
            if self._slots.locked():
                self._limit_hits += 1
            await self._slots.acquire()
            self._sent += 1
            self._peak = max(self._peak, self._sent - len(self.records))
            group.create_task(self._send(session, index, request, self._clock.now()), name=f"load-{index}")

    async def _send(self, session: aiohttp.ClientSession, index: int, request: TraceRequest, sent: float) -> None:
        request_id = f"{self._run_id}-{index}"
        answer = Answer(error=CANCELLED)
        try:
            answer = await ask(
                session,
                self._endpoint,
                prompt(index, request.input_tokens),
                request.output_tokens,
                clock=self._clock.now,
                headers={REQUEST_ID_HEADER: request_id},
            )
        finally:
            self._slots.release()
            self.records.append(self._record(request_id, request, sent, answer))

    def _record(self, request_id: str, request: TraceRequest, sent: float, answer: Answer) -> RequestRecord:
        start = self._start or 0.0

        def offset(at: float | None) -> float | None:
            return None if at is None else at - start

        return RequestRecord(
            id=request_id,
            scheduled=request.offset_s,
            sent=sent - start,
            first_token=offset(answer.first_token_at),
            last_token=offset(answer.last_token_at),
            finished=self._clock.now() - start,
            input_tokens=request.input_tokens,
            requested_tokens=request.output_tokens,
            tokens=answer.tokens,
            status=answer.status,
            error=answer.error,
            worker=answer.worker,
        )
