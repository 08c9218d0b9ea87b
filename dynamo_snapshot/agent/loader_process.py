"""One GPU's weight loader: ``python -m dynamo_snapshot.agent.loader_process FD SETTINGS``.

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
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from enum import StrEnum
from pathlib import Path

import msgspec

from dynamo_snapshot.agent.loader_pinned import PinnedSegments
from dynamo_snapshot.agent.loader_wire import (
    Ask,
    Cancel,
    Finished,
    Load,
    Loaded,
    LoaderStatus,
    Prefetch,
    SegmentBytes,
    Status,
)
from dynamo_snapshot.agent.page_cache import cached_bytes
from dynamo_snapshot.agent.resident_wire import serve
from dynamo_snapshot.errors import SnapshotError
from dynamo_snapshot.model import Reason
from worker_hooks.reasons import HookError, HookReason
from worker_hooks.weights import handover
from worker_hooks.weights.memory import DeviceMemory, Handle
from worker_hooks.weights.pump import CHUNK, Pump, SegmentFile, Source, Transfer

REQUESTS_AT_ONCE = 32
_SEND_TIMEOUT_S = 10.0
_RESULTS_KEPT = 64
"""Of loads that hold nothing any more, for who asks late whether they are finished."""


class MemoryKind(StrEnum):
    CUDA = "cuda"
    HOST = "host"


class Reading(StrEnum):
    """How segments are read."""

    AUTO = "auto"
    """From the page cache if that holds them, else past it."""
    PAGE_CACHE = "page_cache"
    DIRECT = "direct"


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
        self._loads: dict[str, _Load] = {}
        self._lock = threading.Lock()

    def handle(self, ask: Ask) -> object:
        match ask:
            case Load():
                self._begin(ask)
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
            load = _Load(ask, self._memory, self._pump, self._pinned, self._settings.reading)
            load.start()
            self._loads[ask.name] = load
            for name in [name for name, load in self._loads.items() if load.gone][:-_RESULTS_KEPT]:
                del self._loads[name]

    def _find(self, name: str) -> _Load:
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
                _open(stack, [segment for segment in ask.segments if segment.digest not in found], direct=False)
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


class _Load:
    """One load: memory made, filled, handed over or given up. Then it holds nothing any more."""

    def __init__(self, ask: Load, memory: DeviceMemory, pump: Pump, pinned: PinnedSegments, reading: Reading) -> None:
        self._ask, self._memory, self._pump, self._pinned, self._reading = ask, memory, pump, pinned, reading
        self._cancelled = threading.Event()
        self._filled = threading.Event()
        self._result: Loaded | BaseException | None = None
        self._handles: list[Handle] = []
        self._places: list[tuple[int, int]] = []
        self._thread = threading.Thread(target=self._run, name=f"load-{ask.name}")

    @property
    def gone(self) -> bool:
        return self._filled.is_set() and not self._thread.is_alive()

    def start(self) -> None:
        """Opens the files and makes the memory here, so that what is refused is refused at once."""
        with ExitStack() as undo:
            undo.callback(self._let_go)
            self._sources = ExitStack()
            undo.callback(self._sources.close)
            self._memory.enter()
            self._transfers = [self._place(source) for source in self._open()]
            self._listener = handover.listen(Path(self._ask.socket))
            undo.pop_all()
        self._thread.start()

    def _open(self) -> list[Source]:
        segments = self._ask.segments
        held = self._sources.enter_context(self._pinned.borrowed([segment.digest for segment in segments]))
        files = [segment for segment in segments if segment.digest not in held]
        cached = sum(cached_bytes(Path(segment.path)) for segment in files if Path(segment.path).exists())
        size = sum(segment.size for segment in files)
        direct = self._reading is Reading.DIRECT or (self._reading is Reading.AUTO and cached < size)
        opened = dict(zip((file.digest for file in files), _open(self._sources, files, direct), strict=True))
        self._plan = Loaded(
            bytes=sum(segment.size for segment in segments),
            seconds=0,
            cached_bytes=cached,
            pinned_bytes=sum(source.size for source in held.values()),
            direct=direct and bool(files),
        )
        return [held.get(segment.digest) or opened[segment.digest] for segment in segments]

    def finished(self) -> Loaded:
        self._filled.wait()
        if isinstance(self._result, BaseException):
            raise _translated(self._result)
        assert self._result is not None
        return self._result

    def cancel(self) -> None:
        """Returns when nothing is left of it."""
        self._cancelled.set()
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # wakes the thread that waits for a worker
        self._thread.join()

    def _place(self, source: Source) -> Transfer:
        handle = self._memory.create(source.size)
        self._handles.append(handle)
        address = self._memory.reserve(source.size)
        self._places.append((address, source.size))
        self._memory.map(address, source.size, handle)
        return Transfer(source, address)

    def _run(self) -> None:
        try:
            with self._listener:
                began = time.monotonic()
                try:
                    with self._sources:
                        self._pump.load(self._transfers, self._cancelled)
                    self._result = msgspec.structs.replace(self._plan, seconds=time.monotonic() - began)
                except Exception as failure:
                    self._result = failure
                self._filled.set()
                if not self._cancelled.is_set():
                    self._hand_over()
        finally:
            self._let_go()
            Path(self._ask.socket).unlink(missing_ok=True)

    def _hand_over(self) -> None:
        try:
            connection, _ = self._listener.accept()
        except OSError:
            return  # cancelled
        with connection:
            connection.settimeout(_SEND_TIMEOUT_S)
            try:
                if isinstance(self._result, BaseException):
                    handover.send_failure(connection, _hook_error(self._result))
                    return
                for index, (segment, handle) in enumerate(zip(self._ask.segments, self._handles, strict=True)):
                    descriptor = self._memory.export(handle)
                    try:
                        handover.send(connection, index, segment.digest, segment.size, descriptor)
                    finally:
                        os.close(descriptor)
            except OSError as error:
                print(f"load {self._ask.name} was not taken: {error}", file=sys.stderr, flush=True)

    def _let_go(self) -> None:
        self._memory.enter()
        for address, size in self._places:
            with suppress(HookError, KeyError):  # reserved, but not mapped any more
                self._memory.unmap(address, size)
            self._memory.give_back(address, size)
        for handle in self._handles:
            self._memory.release(handle)
        self._places, self._handles = [], []


def _open(stack: ExitStack, segments: Sequence[SegmentBytes], direct: bool) -> list[SegmentFile]:
    files = []
    for segment in segments:
        file = SegmentFile(Path(segment.path), segment.size, direct)
        stack.callback(file.close)
        files.append(file)
    return files


def _hook_error(failure: BaseException) -> HookError:
    if isinstance(failure, HookError):
        return failure
    return HookError(HookReason.WEIGHTS_LOAD_FAILED, f"{type(failure).__name__}: {failure}")


def _translated(failure: BaseException) -> BaseException:
    """The agent's error for a hook's: the reasons have the same names."""
    return SnapshotError(Reason(failure.reason), failure.message) if isinstance(failure, HookError) else failure


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
            raise _translated(error) from error

    with socket.socket(fileno=descriptor) as connection:
        serve(connection, handle, REQUESTS_AT_ONCE)
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
