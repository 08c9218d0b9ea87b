"""The node's one CUDA helper process: ``python -m dynamo_snapshot.agent.cuda.helper FD DRIVER``.

Each process that uses the CUDA driver pays for ``cuInit`` (seconds, on some hosts), and a driver that
crashes takes its process along. So the calls live here: resident, and outside the agent. ``DRIVER``
names a function, as ``dynamo_snapshot.agent.cuda.bindings:open_driver``.
"""

from __future__ import annotations

import importlib
import socket
import sys

import msgspec

from dynamo_snapshot.agent.cuda.driver import CheckpointDriver, Operation
from dynamo_snapshot.agent.resident_wire import serve
from dynamo_snapshot.errors import SnapshotError

CALLS_AT_ONCE = 32
"""One for each process of the largest tree (ranks of one host), and some."""


class Call(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One call of the driver; ``operation`` None asks for the inventory."""

    operation: Operation | None = None
    pid: int = 0
    timeout_ms: int = 0
    devices: dict[str, str] = {}


def carry_out(driver: CheckpointDriver, call: Call) -> object:
    """Makes ``call`` and returns its result: an inventory, a state, or None."""
    match call.operation:
        case None:
            return driver.inventory()
        case Operation.STATE:
            return driver.state(call.pid)
        case Operation.LOCK:
            driver.lock(call.pid, call.timeout_ms)
        case Operation.CHECKPOINT:
            driver.checkpoint(call.pid)
        case Operation.RESTORE:
            driver.restore(call.pid, call.devices)
        case Operation.UNLOCK:
            driver.unlock(call.pid)
    return None


def main(descriptor: int, driver: str) -> None:
    module, _, function = driver.partition(":")
    opened: CheckpointDriver | SnapshotError
    try:
        opened = getattr(importlib.import_module(module), function)()
    except SnapshotError as error:
        opened = error  # the answer to every call
    decoder = msgspec.json.Decoder(Call)

    def handle(body: bytes) -> object:
        if isinstance(opened, SnapshotError):
            raise opened
        return carry_out(opened, decoder.decode(body))

    with socket.socket(fileno=descriptor) as connection:
        serve(connection, handle, CALLS_AT_ONCE)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2])
