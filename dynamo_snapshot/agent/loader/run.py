"""One load of a weight loader: memory made, filled, handed over to a worker or given up."""

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

from dynamo_snapshot.agent.loader.pinned import PinnedSegments
from dynamo_snapshot.agent.loader.wire import Load, Loaded, SegmentBytes
from dynamo_snapshot.agent.page_cache import cached_bytes
from dynamo_snapshot.errors import SnapshotError
from dynamo_snapshot.model import Reason
from worker_hooks.reasons import HookError, HookReason
from worker_hooks.weights import handover
from worker_hooks.weights.memory import DeviceMemory, Handle
from worker_hooks.weights.pump import Pump, SegmentFile, Source, Transfer

_SEND_TIMEOUT_S = 10.0


class Reading(StrEnum):
    """How segments are read."""

    AUTO = "auto"
    """From the page cache if that holds them, else past it."""
    PAGE_CACHE = "page_cache"
    DIRECT = "direct"


class LoadRun:
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
        opened = dict(zip((file.digest for file in files), open_files(self._sources, files, direct), strict=True))
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
            raise as_agent_error(self._result)
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
                        # Past the page cache the disk binds, which more threads keep busier; memory has room.
                        lanes = None if self._plan.direct else self._ask.lanes
                        self._pump.load(self._transfers, self._cancelled, lanes)
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


def open_files(stack: ExitStack, segments: Sequence[SegmentBytes], direct: bool) -> list[SegmentFile]:
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


def as_agent_error(failure: BaseException) -> BaseException:
    """The agent's error for a hook's: the reasons have the same names."""
    return SnapshotError(Reason(failure.reason), failure.message) if isinstance(failure, HookError) else failure
