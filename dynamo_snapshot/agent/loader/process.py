"""One GPU's weight loader: ``python -m dynamo_snapshot.agent.loader.process FD SETTINGS``.

Resident, so that context and pinned buffers are there before they are needed. It fills memory with
weight segments while CRIU and the driver restore the worker, and hands it over through the socket in
the replica's house (:mod:`worker_hooks.weights.handover`).
"""

from __future__ import annotations

import os
import socket
import sys
import threading
import time
from contextlib import ExitStack
from enum import StrEnum
from pathlib import Path

import msgspec

from dynamo_snapshot.agent.loader.pinned import PinnedSegments
from dynamo_snapshot.agent.loader.run import LoadRun, Reading, as_agent_error, open_files
from dynamo_snapshot.agent.loader.wire import (
    Ask,
    Begun,
    Cancel,
    Finished,
    Load,
    Loaded,
    LoaderStatus,
    Prefetch,
    Status,
)
from dynamo_snapshot.agent.page_cache import cached_bytes
from dynamo_snapshot.agent.resident_wire import serve
from dynamo_snapshot.errors import SnapshotError
from dynamo_snapshot.model import Reason
from worker_hooks.reasons import HookError
from worker_hooks.weights.memory import DeviceMemory
from worker_hooks.weights.pump import CHUNK, Pump

REQUESTS_AT_ONCE = 32
_RESULTS_KEPT = 64
"""Of loads that hold nothing any more, for who asks late whether they are finished."""


class MemoryKind(StrEnum):
    CUDA = "cuda"
    HOST = "host"


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """Of one loader."""

    memory: MemoryKind = MemoryKind.CUDA
    lanes: int = 14
    """Threads that read and copy."""
    buffers: int = 3
    """Pinned buffers of each, of 16 MiB."""
    reading: Reading = Reading.AUTO
    pinned_segment_bytes: int = 0
    """How much host memory may be pinned to keep segments at hand."""
    host_bytes: int = 1 << 40
    """What host memory stands in for, in all."""


class Loader:
    """The loads of one device. Its methods may be called from any thread.

    Args:
        memory: the device.
        settings: lanes, buffers, reading.
    """

    def __init__(self, memory: DeviceMemory, settings: Settings) -> None:
        self._memory, self._settings = memory, settings
        self._pump = Pump(memory, settings.lanes, settings.buffers)
        self._pinned = PinnedSegments(memory, self._pump, settings.pinned_segment_bytes)
        self._loads: dict[str, LoadRun] = {}
        self._lock = threading.Lock()

    def handle(self, ask: Ask) -> object:
        match ask:
            case Load():
                self._begin(ask)
                return Begun(pid=os.getpid())
            case Finished(name=name):
                return self._find(name).finished()
            case Cancel(name=name):
                self._cancel(name)
            case Prefetch():
                return self._prefetch(ask)
            case Status():
                return self._status()
        return None

    def close(self) -> None:
        """Gives every load up, and the pinned buffers back."""
        for name in list(self._loads):
            self._cancel(name)
        self._pinned.close()
        self._pump.close()

    def _begin(self, ask: Load) -> None:
        with self._lock:
            known = self._loads.get(ask.name)
            if known is not None and not known.gone:
                raise SnapshotError(
                    Reason.WEIGHTS_LOAD_FAILED, f"a load named {ask.name} is under way", "Cancel it first."
                )
            load = LoadRun(ask, self._memory, self._pump, self._pinned, self._settings.reading)
            load.start()
            self._loads[ask.name] = load
            for name in [name for name, load in self._loads.items() if load.gone][:-_RESULTS_KEPT]:
                del self._loads[name]

    def _find(self, name: str) -> LoadRun:
        try:
            return self._loads[name]
        except KeyError:
            raise SnapshotError(Reason.WEIGHTS_LOAD_FAILED, f"there is no load named {name}") from None

    def _cancel(self, name: str) -> None:
        with self._lock:
            load = self._loads.pop(name, None)
        if load is not None:
            load.cancel()

    def _prefetch(self, ask: Prefetch) -> Loaded:
        began, cached = time.monotonic(), sum(cached_bytes(Path(segment.path)) for segment in ask.segments)
        with self._pinned.borrowed([segment.digest for segment in ask.segments]) as found:
            pinned = sum(held.size for held in found.values())
        if ask.pin:
            self._pinned.fill(ask.segments)
        with self._pinned.borrowed([segment.digest for segment in ask.segments]) as found, ExitStack() as stack:
            self._pump.warm(
                open_files(stack, [segment for segment in ask.segments if segment.digest not in found], direct=False)
            )
        return Loaded(
            bytes=sum(segment.size for segment in ask.segments),
            seconds=time.monotonic() - began,
            cached_bytes=cached,
            pinned_bytes=pinned,
        )

    def _status(self) -> LoaderStatus:
        self._memory.enter()
        return LoaderStatus(
            loads=tuple(name for name, load in self._loads.items() if not load.gone),
            free_bytes=self._memory.free_bytes(),
            pinned_bytes=self._settings.lanes * self._settings.buffers * CHUNK + self._pinned.bytes,
        )


def main(descriptor: int, encoded: str) -> None:
    settings = msgspec.json.decode(encoded, type=Settings)
    loader: Loader | SnapshotError
    try:
        loader = Loader(_memory(settings), settings)
    except HookError as error:
        loader = SnapshotError(Reason(error.reason), error.message)  # the answer to every request
    decoder = msgspec.json.Decoder(Ask)

    def handle(body: bytes) -> object:
        if isinstance(loader, SnapshotError):
            raise loader
        try:
            return loader.handle(decoder.decode(body))
        except HookError as error:
            raise as_agent_error(error) from error

    with socket.socket(fileno=descriptor) as connection:
        try:
            serve(connection, handle, REQUESTS_AT_ONCE)
        finally:
            if isinstance(loader, Loader):
                loader.close()


def _memory(settings: Settings) -> DeviceMemory:
    if settings.memory is MemoryKind.HOST:
        from worker_hooks.weights.host_memory import HostMemory

        return HostMemory(settings.host_bytes)
    from worker_hooks.weights.cuda_memory import CudaMemory

    return CudaMemory(0)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2])
