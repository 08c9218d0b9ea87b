"""How the load generator judges answers, from servers that answer, break, stall and complain."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import pytest
from aiohttp import web

from dynamo_snapshot.replay.chat import Endpoint
from dynamo_snapshot.replay.load import LoadGenerator
from dynamo_snapshot.replay.pin import pinned_requests
from dynamo_snapshot.replay.trace import TraceRequest

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


def event(**content: object) -> bytes:
    return b"data: " + json.dumps(content).encode() + b"\n\n"


def token(worker: int = 7, finish: str | None = None) -> bytes:
    return event(
        choices=[{"index": 0, "delta": {"content": " ba"}, "finish_reason": finish}],
        nvext={"worker_id": {"decode_worker_id": worker, "prefill_worker_id": worker}},
    )


DONE = b"data: [DONE]\n\n"


async def stream(request: web.Request, *parts: bytes) -> web.StreamResponse:
    response = web.StreamResponse(headers={"content-type": "text/event-stream"})
    await response.prepare(request)
    for part in parts:
        await response.write(part)
    return response


async def good(request: web.Request) -> web.StreamResponse:
    wanted = (await request.json())["max_tokens"]
    parts = [token() for _ in range(wanted - 1)] + [token(finish="length")]
    return await stream(request, *parts, event(choices=[], usage={"completion_tokens": wanted}), DONE)


async def split(request: web.Request) -> web.StreamResponse:
    """Events cut in the middle."""
    data = token() + token(finish="length") + DONE
    return await stream(request, data[:30], data[30:200], data[200:])


async def broken(request: web.Request) -> web.StreamResponse:
    response = await stream(request, token())
    assert request.transport is not None
    request.transport.abort()
    return response


async def unfinished(request: web.Request) -> web.StreamResponse:
    return await stream(request, token(), DONE)


async def short(request: web.Request) -> web.StreamResponse:
    return await stream(request, token(finish="length"), event(choices=[], usage={"completion_tokens": 1}), DONE)


async def stopped(request: web.Request) -> web.StreamResponse:
    """As a worker that cancels what it has in flight ends a stream."""
    return await stream(request, token(finish="stop"), event(choices=[], usage={"completion_tokens": 1}), DONE)


async def complaining(request: web.Request) -> web.StreamResponse:
    return await stream(request, token(), b"event: error\n: worker gone\n\n", DONE)


async def refusing(request: web.Request) -> web.StreamResponse:
    return web.Response(status=503, text="Service temporarily unavailable")


async def garbled(request: web.Request) -> web.StreamResponse:
    return await stream(request, b"data: {not json\n\n")


async def stuck(request: web.Request) -> web.StreamResponse:
    response = await stream(request, token())
    await asyncio.sleep(3600)
    return response


@asynccontextmanager
async def serving(handler: Handler) -> AsyncIterator[str]:
    application = web.Application()
    application.router.add_post("/v1/chat/completions", handler)
    runner = web.AppRunner(application, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    try:
        host, port = runner.addresses[0][:2]
        yield f"http://{host}:{port}"
    finally:
        await runner.cleanup()


def trace(count: int, output_tokens: int = 2) -> list[TraceRequest]:
    return [TraceRequest(index * 0.01, 5, output_tokens) for index in range(count)]


@pytest.mark.parametrize("handler", [good, split])
async def test_answers_in_full_are_no_failures(handler: Handler) -> None:
    async with serving(handler) as url:
        generator = LoadGenerator(trace(5), Endpoint(url, "m"))
        summary = await generator.run()
    assert (summary.sent, summary.failed, summary.tokens, summary.by_worker) == (5, 0, 10, {"7": 5})
    for record in generator.records:
        assert record.status == 200
        assert record.first_token is not None
        assert record.last_token is not None
        assert record.scheduled <= record.sent <= record.first_token <= record.last_token
    assert summary.ttft_s.p50 is not None
    assert summary.concurrency_limit_hits == 0


@pytest.mark.parametrize(
    ("handler", "error"),
    [
        (broken, "ClientPayloadError"),
        (unfinished, "the stream ended without a finish reason"),
        (short, "the answer has fewer tokens than asked for"),
        (stopped, "the answer has fewer tokens than asked for"),
        (complaining, "error event: worker gone"),
        (refusing, "HTTP 503: Service temporarily unavailable"),
        (garbled, "DecodeError"),
        (stuck, "no complete answer within 0.3 s"),
    ],
)
async def test_whatever_is_not_a_full_answer_is_a_failure(handler: Handler, error: str) -> None:
    async with serving(handler) as url:
        summary = await LoadGenerator(trace(3), Endpoint(url, "m", timeout_s=0.3)).run()
    assert (summary.sent, summary.failed) == (3, 3)
    (text,) = summary.errors
    assert error in text


async def test_nobody_listening_is_a_failure(free_port: Callable[[], int]) -> None:
    summary = await LoadGenerator(trace(2), Endpoint(f"http://127.0.0.1:{free_port()}", "m")).run()
    assert (summary.sent, summary.failed) == (2, 2)


async def test_slow_answers_do_not_hold_back_later_requests() -> None:
    async with serving(stuck) as url:
        summary = await LoadGenerator(trace(20), Endpoint(url, "m", timeout_s=0.5)).run()
    assert summary.peak_in_flight == 20


async def test_the_safety_net_is_reported() -> None:
    async with serving(stuck) as url:
        summary = await LoadGenerator(trace(4), Endpoint(url, "m", timeout_s=0.2), max_in_flight=2).run()
    assert (summary.sent, summary.peak_in_flight) == (4, 2)
    assert summary.concurrency_limit_hits > 0


async def test_a_cancelled_run_leaves_no_request_behind() -> None:
    arrived = asyncio.Semaphore(0)

    async def handler(request: web.Request) -> web.StreamResponse:
        arrived.release()
        return await stuck(request)

    async with serving(handler) as url:
        generator = LoadGenerator([*trace(3), TraceRequest(60.0, 1, 1)], Endpoint(url, "m"))
        run = asyncio.create_task(generator.run())
        for _ in range(3):
            await arrived.acquire()
        run.cancel()
        with pytest.raises(asyncio.CancelledError):
            await run
    summary = generator.summary()
    assert (summary.sent, summary.failed, summary.cancelled) == (3, 0, 3)
    assert generator.progress.in_flight == 0


async def test_a_stopped_run_finishes_what_is_in_flight() -> None:
    arrived = asyncio.Semaphore(0)

    async def handler(request: web.Request) -> web.StreamResponse:
        arrived.release()
        return await good(request)

    async with serving(handler) as url:
        generator = LoadGenerator([*trace(3), TraceRequest(60.0, 1, 1)], Endpoint(url, "m"))
        run = asyncio.create_task(generator.run())
        for _ in range(3):
            await arrived.acquire()
        generator.stop()
        summary = await run
    assert (summary.sent, summary.failed) == (3, 0)


async def test_pinned_requests_must_be_answered_by_their_instance() -> None:
    seen: list[str] = []

    async def handler(request: web.Request) -> web.StreamResponse:
        seen.append(request.headers["x-dynamo-worker-instance-id"])
        return await good(request)

    async with serving(handler) as url:
        right = await pinned_requests(Endpoint(url, "m"), 7, 5)
        wrong = await pinned_requests(Endpoint(url, "m"), 8, 2)
    assert (right.sent, right.succeeded, right.errors) == (5, 5, ())
    assert (wrong.sent, wrong.succeeded, wrong.errors) == (2, 0, ("answered by instance 7",) * 2)
    assert seen == ["7"] * 5 + ["8"] * 2
