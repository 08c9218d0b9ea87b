"""What the process that holds an engine's weights does at quiesce and resume, whichever engine it is of."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from worker_hooks import identity
from worker_hooks.control import control_directory
from worker_hooks.holder import HOUSE
from worker_hooks.reasons import HookError, HookReason
from worker_hooks.weights.arena import Attached
from worker_hooks.weights.handover import SOCKET
from worker_hooks.weights.segment import SEGMENTS_ENV, SEGMENTS_FILE, Segment, SegmentStore, encode_segments


class Weights(Protocol):
    """:class:`worker_hooks.weights.vllm.VllmWeights`, :class:`worker_hooks.weights.memory_saver.SaverWeights`."""

    def quiesce(self, store: SegmentStore) -> list[Segment]: ...

    def resume(self, store: SegmentStore, loader: Path | None = None) -> Attached: ...


@dataclass(frozen=True)
class Places:
    """Where a worker process finds what lies outside it."""

    store: SegmentStore
    loader: Path
    """The socket where a loader may listen."""
    control: Path | None = None
    """Where the segments are listed."""

    @classmethod
    def of(cls, environ: Mapping[str, str]) -> Places:
        """As the environment says; raises ``quiesce_failed`` where it names no store."""
        if not environ.get(SEGMENTS_ENV):
            raise HookError(HookReason.QUIESCE_FAILED, f"{SEGMENTS_ENV} names no folder for weight segments")
        control = control_directory(environ)
        return cls(
            store=SegmentStore(Path(environ[SEGMENTS_ENV])),
            loader=Path(HOUSE) / SOCKET,
            control=None if control is None else control.path,
        )


class WorkerPart:
    """What one worker process gives up and takes back.

    Args:
        weights: all memory of the engine's own allocator that is tagged as weights.
        places: store, loader, control directory.
        empty_caches: gives back what the process keeps for later, on the GPU and on the host.
    """

    def __init__(self, weights: Weights, places: Places, empty_caches: Callable[[], None]) -> None:
        self._weights, self._places, self._empty_caches = weights, places, empty_caches

    def quiesce(self) -> None:
        segments = self._weights.quiesce(self._places.store)
        if self._places.control is not None:
            listed = self._places.control / SEGMENTS_FILE
            staged = listed.with_suffix(".new")
            staged.write_bytes(encode_segments(segments))
            staged.rename(listed)
        self._empty_caches()
        # What lives now is not looked at by the collector again: fewer pages of clones become their own.
        gc.freeze()

    def resume(self) -> dict[str, str]:
        """Returns how it went, for the worker's evidence."""
        began = time.monotonic()
        loader = self._places.loader if self._places.loader.exists() else None
        attached = self._weights.resume(self._places.store, loader)
        identity.reseed()
        return {
            "weights": f"by_loader={attached.by_loader} {attached.why}".strip(),
            "weights_s": f"{time.monotonic() - began:.4f}",
        }
