"""``python -m dynamo_snapshot.replay``: replays a trace against a frontend, in a process of its own.

Standard output is JSON lines: one ``plan``, a ``progress`` each second, at the end the ``summary``.
SIGINT or SIGTERM stops sending and waits for what is in flight; a second one cancels that. The exit
status is 0 when no request failed, 1 when one did, 2 for wrong input.
"""

from __future__ import annotations

import argparse
import asyncio
import math
import signal
import sys
from pathlib import Path
from typing import Any

import msgspec

from dynamo_snapshot.errors import SnapshotError
from dynamo_snapshot.replay.chat import Endpoint
from dynamo_snapshot.replay.load import LoadGenerator
from dynamo_snapshot.replay.records import LoadSummary
from dynamo_snapshot.replay.trace import TraceRequest, bundled_trace, faster, read_trace, scaled, window

PROGRESS_INTERVAL_S = 1.0


def main(arguments: list[str] | None = None) -> int:
    options = _parser().parse_args(arguments)
    try:
        requests = _requests(options)
    except (SnapshotError, ValueError) as error:
        print(error, file=sys.stderr)
        return 2
    _say(
        "plan",
        requests=len(requests),
        duration_s=requests[-1].offset_s if requests else 0.0,
        speed=options.speed,
        input_scale=options.input_scale,
        output_scale=options.output_scale,
        input_tokens=sum(request.input_tokens for request in requests),
        output_tokens=sum(request.output_tokens for request in requests),
    )
    generator = LoadGenerator(
        requests, Endpoint(options.url, options.model, options.timeout), max_in_flight=options.max_in_flight
    )
    summary = asyncio.run(_run(generator))
    if options.records:
        lines = (msgspec.json.encode(record) + b"\n" for record in generator.records)
        options.records.write_bytes(b"".join(lines))
    _say("summary", **msgspec.to_builtins(summary))
    return 1 if summary.failed or summary.cancelled else 0


async def _run(generator: LoadGenerator) -> LoadSummary:
    run = asyncio.create_task(generator.run(), name="load")
    asked = 0

    def interrupted() -> None:
        nonlocal asked
        asked += 1
        if asked == 1:
            generator.stop()
        else:
            run.cancel()

    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, interrupted)
    while not run.done():
        await asyncio.wait([run], timeout=PROGRESS_INTERVAL_S)
        progress = generator.progress
        _say(
            "progress",
            sent=progress.sent,
            finished=progress.finished,
            failed=progress.failed,
            in_flight=progress.in_flight,
        )
    return generator.summary() if run.cancelled() else run.result()


def _requests(options: argparse.Namespace) -> tuple[TraceRequest, ...]:
    requests = read_trace(options.trace) if options.trace else bundled_trace()
    requests = window(requests, options.start, options.end)
    return scaled(faster(requests, options.speed), options.input_scale, options.output_scale)


def _say(event: str, **values: Any) -> None:
    sys.stdout.write(msgspec.json.encode({"event": event, **values}).decode() + "\n")
    sys.stdout.flush()


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m dynamo_snapshot.replay", description="Replay a request trace.")
    parser.add_argument("--url", required=True, help="the frontend's root, such as http://127.0.0.1:8000")
    parser.add_argument("--model", required=True, help="the model's name, as the frontend lists it")
    parser.add_argument("--trace", type=Path, help="any that `dynamo-snapshot replay` reads; default: bundled")
    parser.add_argument("--start", type=float, default=0.0, help="first second of the trace to replay")
    parser.add_argument("--end", type=float, default=math.inf, help="second of the trace to stop before")
    parser.add_argument("--speed", type=float, default=1.0, help="how many times as fast as the trace")
    parser.add_argument("--input-scale", type=float, default=1.0, help="factor on input tokens")
    parser.add_argument("--output-scale", type=float, default=1.0, help="factor on output tokens")
    parser.add_argument("--timeout", type=float, default=120.0, help="seconds for one request")
    parser.add_argument("--max-in-flight", type=int, default=2048, help="safety net on requests in flight")
    parser.add_argument("--records", type=Path, help="write one JSON line a request here")
    return parser


if __name__ == "__main__":
    sys.exit(main())
