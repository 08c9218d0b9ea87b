"""``python -m dynamo_snapshot.replay`` as a process: its lines, its exit status, a signal."""

from __future__ import annotations

import asyncio
import json
import signal
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

TRACE = "TIMESTAMP,ContextTokens,GeneratedTokens\n" + "".join(
    f"2023-11-16 18:17:{second:02d}.0000000,40,1\n" for second in range(0, 50, 10)
)


@pytest.fixture
async def server() -> AsyncIterator[str]:
    """Answers each request with one token."""

    async def answer(request: web.Request) -> web.Response:
        chunk = {"choices": [{"delta": {"content": "ba"}, "finish_reason": "length"}]}
        text = f"data: {json.dumps(chunk)}\n\ndata: [DONE]\n\n"
        return web.Response(text=text, content_type="text/event-stream")

    application = web.Application()
    application.router.add_post("/v1/chat/completions", answer)
    runner = web.AppRunner(application)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    host, port = runner.addresses[0][:2]
    yield f"http://{host}:{port}"
    await runner.cleanup()


@pytest.fixture
def trace(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A trace file; its text may be given."""
    path = tmp_path / "trace.csv"
    path.write_text(getattr(request, "param", TRACE))
    return path


async def start(url: str, *arguments: str) -> asyncio.subprocess.Process:
    command = [sys.executable, "-m", "dynamo_snapshot.replay", "--url", url, "--model", "m", *arguments]
    return await asyncio.create_subprocess_exec(
        *command, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
    )


def events(output: bytes) -> list[dict[str, Any]]:
    return [json.loads(line) for line in output.splitlines()]


async def test_a_run_prints_its_plan_and_its_summary(server: str, trace: Path, tmp_path: Path) -> None:
    records = tmp_path / "records.jsonl"
    arguments = ("--trace", str(trace), "--end", "30", "--speed", "100", "--input-scale", "0.5")
    process = await start(server, *arguments, "--records", str(records))
    output, _ = await process.communicate()
    assert process.returncode == 0
    first, *_, last = events(output)
    assert (first["event"], first["requests"], first["speed"], first["input_tokens"]) == ("plan", 3, 100, 60)
    assert (last["event"], last["sent"], last["failed"]) == ("summary", 3, 0)
    assert [json.loads(line)["requested_tokens"] for line in records.open()] == [1, 1, 1]


async def test_a_signal_ends_the_sending_and_not_the_summary(server: str, trace: Path) -> None:
    process = await start(server, "--trace", str(trace))
    assert process.stdout is not None
    while json.loads(await process.stdout.readline()).get("finished") != 1:
        pass
    process.send_signal(signal.SIGTERM)
    output, _ = await process.communicate()
    assert process.returncode == 0
    assert events(output)[-1]["sent"] == 1


async def test_failures_show_in_the_exit_status(trace: Path, free_port: Callable[[], int]) -> None:
    process = await start(f"http://127.0.0.1:{free_port()}", "--trace", str(trace), "--speed", "1000")
    await process.communicate()
    assert process.returncode == 1


@pytest.mark.parametrize("trace", ["not a trace\n"], indirect=True)
async def test_a_wrong_trace_is_named(trace: Path) -> None:
    process = await start("http://127.0.0.1:1", "--trace", str(trace))
    _, error = await process.communicate()
    assert process.returncode == 2
    assert b"trace.csv:1: expected the columns" in error
