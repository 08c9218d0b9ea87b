"""One streamed request to an OpenAI-compatible frontend, judged strictly.

A stream counts as answered only when it ended with a finish reason and with all tokens that were asked
for: Dynamo's frontend ends a broken stream with HTTP 200 and ``[DONE]`` too, and a cancelled one with the
finish reason ``stop``. As requests ignore end-of-sequence tokens, nothing else ends an answer early.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass
from typing import Any

import aiohttp
import msgspec

WORKER_HEADER = "x-dynamo-worker-instance-id"
"""Pins a request to one instance (decimal id). A pinned request is never migrated; an unknown id is refused."""
REQUEST_ID_HEADER = "x-request-id"
"""Dynamo's frontend repeats it in its log, as ``x_request_id``."""

_CONNECT_TIMEOUT_S = 10.0
_ERROR_TEXT = 200


@dataclass(frozen=True)
class Endpoint:
    """Where requests go. ``url`` is the frontend's root, such as ``http://127.0.0.1:8000``."""

    url: str
    model: str
    timeout_s: float = 120.0
    """From connecting to the last byte."""


@dataclass
class Answer:
    """What came back; times are the clock's, None: never."""

    status: int | None = None
    first_token_at: float | None = None
    last_token_at: float | None = None
    tokens: int = 0
    worker: int | None = None
    error: str | None = None


class _Delta(msgspec.Struct):
    content: str | None = None


class _Choice(msgspec.Struct):
    delta: _Delta = msgspec.field(default_factory=_Delta)
    finish_reason: str | None = None


class _Usage(msgspec.Struct):
    completion_tokens: int = 0


class _WorkerIds(msgspec.Struct):
    decode_worker_id: int | None = None
    prefill_worker_id: int | None = None


class _Extension(msgspec.Struct):
    worker_id: _WorkerIds | None = None


class _Chunk(msgspec.Struct):
    choices: list[_Choice] = []
    usage: _Usage | None = None
    nvext: _Extension | None = None
    error: Any = None


_chunks = msgspec.json.Decoder(_Chunk)


def client_session() -> aiohttp.ClientSession:
    """A session without a limit of its own on connections: what bounds the load is the generator's business."""
    return aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0, limit_per_host=0))


async def ask(
    session: aiohttp.ClientSession,
    endpoint: Endpoint,
    prompt: str,
    tokens: int,
    *,
    clock: Callable[[], float],
    headers: Mapping[str, str] | None = None,
) -> Answer:
    """Sends one chat completion for ``tokens`` tokens and reads it to its end.

    Whatever goes wrong stands in the answer's ``error``; only cancellation is raised.
    """
    body = {
        "model": endpoint.model,
        "messages": [{"role": "user", "content": prompt}],
        "max_tokens": tokens,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
        "nvext": {"extra_fields": ["worker_id"]},
    }
    answer = Answer()
    timeout = aiohttp.ClientTimeout(total=endpoint.timeout_s, sock_connect=_CONNECT_TIMEOUT_S)
    try:
        async with session.post(
            f"{endpoint.url}/v1/chat/completions",
            data=msgspec.json.encode(body),
            headers={"content-type": "application/json", **(headers or {})},
            timeout=timeout,
        ) as response:
            answer.status = response.status
            if response.status != 200:
                text = (await response.text())[:_ERROR_TEXT]
                answer.error = f"HTTP {response.status}: {text}"
            else:
                await _read(response.content.iter_any(), answer, tokens, clock)
    except TimeoutError:
        answer.error = f"no complete answer within {endpoint.timeout_s:g} s"
    except (aiohttp.ClientError, OSError, msgspec.DecodeError) as error:
        answer.error = f"{type(error).__name__}: {error}"[:_ERROR_TEXT]
    return answer


async def _read(content: AsyncIterator[bytes], answer: Answer, wanted: int, clock: Callable[[], float]) -> None:
    finish: str | None = None
    usage: int | None = None
    pending = b""
    async for data in content:
        now = clock()
        *events, pending = (pending + data).split(b"\n\n")
        for event in events:
            if b"event: error" in event:
                text = event.replace(b"event: error", b"").strip(b"\n: ").decode(errors="replace")
                answer.error = f"error event: {text}"[:_ERROR_TEXT]
                continue
            if not event.startswith(b"data:") or event.endswith(b"[DONE]"):
                continue
            chunk = _chunks.decode(event[5:])
            if chunk.error is not None:
                answer.error = f"error chunk: {chunk.error}"[:_ERROR_TEXT]
            if chunk.usage is not None:
                usage = chunk.usage.completion_tokens
            if answer.worker is None and chunk.nvext is not None and chunk.nvext.worker_id is not None:
                ids = chunk.nvext.worker_id
                answer.worker = ids.decode_worker_id if ids.decode_worker_id is not None else ids.prefill_worker_id
            for choice in chunk.choices:
                finish = choice.finish_reason or finish
                if choice.delta.content:
                    answer.tokens += 1
                    answer.last_token_at = now
                    if answer.first_token_at is None:
                        answer.first_token_at = now
    if usage is not None:
        answer.tokens = usage
    if answer.error is None and finish is None:
        answer.error = "the stream ended without a finish reason"
    elif answer.error is None and answer.tokens < wanted:
        answer.error = "the answer has fewer tokens than asked for"
