"""The node's one CUDA helper process: ``python -m dynamo_snapshot.agent.cuda_helper FD DRIVER``.

Each process that uses the CUDA driver pays for ``cuInit`` (seconds, on some hosts), and a driver that
crashes takes its process along. So the calls live here: resident, and outside the agent. ``FD`` is a
connected socket that carries the lines of :mod:`dynamo_snapshot.agent.cuda_wire`; when it is closed
the helper finishes what it is doing and ends. ``DRIVER`` names a function, as
``dynamo_snapshot.agent.cuda_bindings:open_driver``.
"""

from __future__ import annotations

import importlib
import socket
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import msgspec

from dynamo_snapshot.agent.cuda_driver import CheckpointDriver
from dynamo_snapshot.agent.cuda_wire import Answer, Call, Failure, carry_out
from dynamo_snapshot.errors import SnapshotError

CALLS_AT_ONCE = 32
"""One for each process of the largest tree (ranks of one host), and some."""


def serve(connection: socket.socket, driver: CheckpointDriver | SnapshotError) -> None:
    """Answers calls until the other side closes; a ``driver`` that is an error is the answer to all of them."""
    writing = threading.Lock()

    def answer(call: Call) -> None:
        if isinstance(driver, SnapshotError):
            found = Answer(id=call.id, failure=Failure.of(driver))
        else:
            found = carry_out(driver, call)
        with writing:
            connection.sendall(msgspec.json.encode(found) + b"\n")

    decoder = msgspec.json.Decoder(Call)
    with ThreadPoolExecutor(CALLS_AT_ONCE) as calls, connection.makefile("rb") as lines:
        for line in lines:
            calls.submit(answer, decoder.decode(line))


def main(descriptor: int, driver: str) -> None:
    module, _, function = driver.partition(":")
    opened: CheckpointDriver | SnapshotError
    try:
        opened = getattr(importlib.import_module(module), function)()
    except SnapshotError as error:
        opened = error
    with socket.socket(fileno=descriptor) as connection:
        serve(connection, opened)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2])
