"""FleetStatus goes into its file whatever becomes of NATS."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

from dynamo_snapshot.fleet.publisher import FILE_NAME, file_and_nats
from dynamo_snapshot.model import DecisionRecord, FleetStatus, decode

BIG = 4 << 20
"""Bytes of one status: a few of them fill every buffer on the way to the server."""


def status(number: int) -> FleetStatus:
    record = DecisionRecord(at=0.0, pool="decode", what="x" * BIG, reason="")
    return FleetStatus(fleet="fleet", at=float(number), fence=1, decisions=(record,))


async def test_a_nats_server_that_hangs_holds_the_file_up_for_a_second_at_most(tmp_path: Path) -> None:
    greeted, done = asyncio.Event(), asyncio.Event()

    async def hang(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b'INFO {"max_payload":67108864}\r\n')
        while not (await reader.readline()).startswith(b"PING"):
            pass
        writer.write(b"PONG\r\n")
        greeted.set()
        await done.wait()  # it reads nothing from now on

    server = await asyncio.start_server(hang, "127.0.0.1", 0)
    host, port = server.sockets[0].getsockname()[:2]
    async with file_and_nats(tmp_path, f"nats://{host}:{port}", "space") as publisher:
        async with asyncio.timeout(10):
            await greeted.wait()
        await asyncio.sleep(0.1)
        for number in range(6):
            began = time.monotonic()
            async with asyncio.timeout(5):
                await publisher.publish(status(number))
            assert time.monotonic() - began < 2
            assert decode((tmp_path / FILE_NAME).read_bytes(), FleetStatus).at == number
        began = time.monotonic()
    assert time.monotonic() - began < 6, "nor does it hold the end up"
    done.set()
    server.close()
