"""The agent's end of a GPU's weight loader."""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec

from dynamo_snapshot.agent.loader.process import Settings
from dynamo_snapshot.agent.loader.wire import (
    Begun,
    Cancel,
    Finished,
    Load,
    Loaded,
    LoaderStatus,
    Prefetch,
    SegmentBytes,
    Status,
)
from dynamo_snapshot.agent.resident import Resident
from dynamo_snapshot.errors import SnapshotError
from dynamo_snapshot.model import Reason
from worker_hooks.weights.handover import SOCKET
from worker_hooks.weights.segment import Segment, SegmentStore

DEVICES_ENV = "CUDA_VISIBLE_DEVICES"
IMAGE_BYTES_PER_S = 1.9e9
"""What CRIU restores of an image in a second, beside its fixed part; one H200 host (docs/benchmarks)."""
IMAGE_FIXED_S = 0.2
LANE_BYTES_PER_S = 2.0e9
"""What one thread of a loader reads and copies in a second, on the same host."""


class WeightLoader:
    """One GPU's resident loader process. Errors are those of its requests, or ``loader_died``.

    Args:
        device: the GPU's UUID; the loader sees no other.
        log: where its standard error goes.
        settings: threads, pinned memory, way of reading.
        environment: of the loader; by default the agent's own.
    """

    def __init__(
        self, device: str, log: Path, settings: Settings | None = None, environment: Mapping[str, str] | None = None
    ) -> None:
        self.device = device
        self._resident = Resident(
            f"weight loader of {device}",
            "dynamo_snapshot.agent.loader.process",
            [msgspec.json.encode(settings or Settings()).decode()],
            log=log,
            died=Reason.LOADER_DIED,
            environment={**(os.environ if environment is None else environment), DEVICES_ENV: device},
        )

    def __repr__(self) -> str:
        return repr(self._resident)

    @property
    def pid(self) -> int | None:
        """Of the loader; None while none runs."""
        return self._resident.pid

    async def ready(self) -> LoaderStatus:
        """Starts the loader if need be; returns once context and pinned buffers are there."""
        return msgspec.json.decode(await self._resident.ask(Status()), type=LoaderStatus)

    async def load(
        self, name: str, house: Path, segments: Sequence[Segment], store: SegmentStore, lanes: int | None = None
    ) -> int:
        """Begins to load ``segments`` for the replica ``name``, whose worker will ask for them in ``house``.

        Returns once the memory is made: call it before CRIU, so that a GPU without room refuses first.

        Args:
            lanes: at most so many of the loader's threads take part; None: all.

        Returns:
            The pid of the loader that has it.

        Raises:
            SnapshotError: ``gpu_out_of_memory``, ``weights_corrupt`` or ``loader_died``.
        """
        ask = Load(name=name, socket=str(house / SOCKET), segments=_bytes_of(segments, store), lanes=lanes)
        return msgspec.json.decode(await self._resident.ask(ask), type=Begun).pid

    async def finished(self, name: str, pid: int | None = None) -> Loaded:
        """Returns once all bytes are on the GPU; ``loader_died`` if ``pid``, where given, is the loader's no more."""
        return msgspec.json.decode(await self._resident.ask(Finished(name=name), pid), type=Loaded)

    async def cancel(self, name: str, pid: int | None = None) -> None:
        """Gives a load up that nobody has taken; nothing happens if there is none. ``pid``: see :meth:`finished`."""
        await self._resident.ask(Cancel(name=name), pid)

    async def prefetch(self, segments: Sequence[Segment], store: SegmentStore, *, pin: bool = False) -> Loaded:
        """Reads segments into the page cache, or into pinned memory as far as the loader's settings allow."""
        ask = Prefetch(segments=_bytes_of(segments, store), pin=pin)
        return msgspec.json.decode(await self._resident.ask(ask), type=Loaded)

    async def close(self) -> None:
        """Ends the loader; loads that nobody has taken are given up."""
        await self._resident.close()


class ReplicaLoad:
    """One replica's weights on their way: begun before CRIU, looked at after the restore, given up if that fails.

    A loader that dies or cannot read costs time and not the restore: the worker then loads by itself.
    ``lost`` says why. No room and corrupt weights are raised, since the worker could not do better.
    """

    def __init__(
        self,
        loader: WeightLoader,
        name: str,
        house: Path,
        segments: Sequence[Segment],
        store: SegmentStore,
        lanes: int | None = None,
    ) -> None:
        self.lost = ""
        self._pid: int | None = None
        self._beginning: asyncio.Task[None] | None = None
        self._lanes = lanes
        self._loader, self._name, self._house = loader, name, house
        self._segments, self._store = segments, store

    async def begin(self) -> None:
        """Returns once memory is made; ``house`` must exist. See :meth:`WeightLoader.load`.

        It is made though the caller is cancelled meanwhile; then only :meth:`give_up` is left to be called.
        """
        self._beginning = asyncio.create_task(self._begin(), name=f"load-{self._name}")
        await asyncio.shield(self._beginning)

    async def _begin(self) -> None:
        try:
            self._pid = await self._loader.load(self._name, self._house, self._segments, self._store, self._lanes)
        except SnapshotError as error:
            self._lose(error)

    async def finished(self) -> Loaded | None:
        """Returns what was loaded, once all of it is; None: the worker has to load by itself."""
        if self.lost:
            return None
        try:
            return await self._loader.finished(self._name, self._pid)
        except SnapshotError as error:
            self._lose(error)
            return None

    async def give_up(self) -> None:
        """Leaves nothing of it, once the loader has answered; one that has died, or made no memory, holds nothing."""
        if self._beginning is not None:
            await asyncio.wait({self._beginning})
        if self._pid is not None:
            with contextlib.suppress(SnapshotError):
                await self._loader.cancel(self._name, self._pid)

    def _lose(self, error: SnapshotError) -> None:
        if error.reason not in (Reason.LOADER_DIED, Reason.WEIGHTS_LOAD_FAILED):
            raise error
        self.lost = str(error)


def lanes_beside(image_bytes: int, weight_bytes: int, most: int) -> int:
    """How many of ``most`` threads bring the weights no later than CRIU an image of ``image_bytes``.

    Both copy through the processor: a thread more than that would only take memory bandwidth from CRIU, which has
    one. Without an image nothing else is waited for, so all take part.
    """
    if not image_bytes:
        return most
    image_s = IMAGE_FIXED_S + image_bytes / IMAGE_BYTES_PER_S
    return max(1, min(most, math.ceil(weight_bytes / (image_s * LANE_BYTES_PER_S))))


def _bytes_of(segments: Sequence[Segment], store: SegmentStore) -> tuple[SegmentBytes, ...]:
    return tuple(
        SegmentBytes(path=str(store.path(segment.digest)), size=segment.size, digest=segment.digest)
        for segment in segments
    )
