"""What the agent asks of a weight loader, and what it answers."""

from __future__ import annotations

import msgspec


class SegmentBytes(msgspec.Struct, frozen=True, kw_only=True):
    """One weight segment as a loader needs it: its bytes and their name, not where they belong."""

    path: str
    size: int
    digest: str


class Load(msgspec.Struct, frozen=True, kw_only=True, tag="load"):
    """Make memory for ``segments``, listen at ``socket``, begin to fill; then answered with :class:`Begun`."""

    name: str
    """Of the load, chosen by the agent: its replica's id."""
    socket: str
    segments: tuple[SegmentBytes, ...]
    lanes: int | None = None
    """How many threads read and copy at most; None: all."""


class Finished(msgspec.Struct, frozen=True, kw_only=True, tag="finished"):
    """Answered with :class:`Loaded` once all bytes of the load ``name`` are on the GPU."""

    name: str


class Cancel(msgspec.Struct, frozen=True, kw_only=True, tag="cancel"):
    """Give the load ``name`` and its memory up; no error if there is none (any more). Answered when it is gone."""

    name: str


class Prefetch(msgspec.Struct, frozen=True, kw_only=True, tag="prefetch"):
    """Read ``segments`` into the page cache, or pinned memory as far as that goes; answered with :class:`Loaded`."""

    segments: tuple[SegmentBytes, ...]
    pin: bool = False


class Status(msgspec.Struct, frozen=True, kw_only=True, tag="status"):
    """Answered with :class:`LoaderStatus`."""


Ask = Load | Finished | Cancel | Prefetch | Status


class Begun(msgspec.Struct, frozen=True, kw_only=True):
    """A load that fills its memory."""

    pid: int
    """Of the loader; the load ends with it."""


class Loaded(msgspec.Struct, frozen=True, kw_only=True):
    """What a load or prefetch did."""

    bytes: int
    seconds: float
    cached_bytes: int
    """How much of it was in the page cache before."""
    pinned_bytes: int = 0
    """How much of it was in pinned memory before."""
    direct: bool = False
    """Whether the rest was read past the page cache."""


class LoaderStatus(msgspec.Struct, frozen=True, kw_only=True):
    loads: tuple[str, ...]
    """Loads that hold memory: filling, or waiting to be taken."""
    free_bytes: int
    pinned_bytes: int
    """Host memory held: buffers, and segments kept in pinned memory."""
