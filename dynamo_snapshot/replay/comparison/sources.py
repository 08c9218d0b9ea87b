"""The requests of a run: a trace by name, and which half of it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path

import msgspec

from dynamo_snapshot.errors import SnapshotError
from dynamo_snapshot.model import Reason
from dynamo_snapshot.replay.comparison.halves import Half
from dynamo_snapshot.replay.simulation.study import STUDIES, study
from dynamo_snapshot.replay.trace import TraceRequest, bundled_trace, read_trace, window

BUNDLED = "azure-code-excerpt"
BUNDLED_FROM = "azure-code"
BUNDLED_S = 285.0


class Source(msgspec.Struct, frozen=True):
    """A trace; small enough to be sent to each process, which reads it for itself."""

    name: str
    path: str | None
    """None: the bundled excerpt."""
    split_s: float | None = None
    """Where the second half begins; None: in the middle."""


class Part(msgspec.Struct, frozen=True):
    """One half of a trace, or all of it."""

    played: tuple[TraceRequest, ...]
    """Its requests after those that came before it: who scales has seen them, as it has at work."""
    begin_s: float
    duration_s: float

    @property
    def requests(self) -> tuple[TraceRequest, ...]:
        """Its own requests, offsets counted from its begin."""
        return window(self.played, self.begin_s, math.inf)


def named_sources(paths: Sequence[Path]) -> tuple[Source, ...]:
    """The traces of a command line, named after their files or as the study has them; without any the excerpt.

    Raises:
        SnapshotError: ``configuration_invalid`` when two files have one name.
    """
    if not paths:
        return (Source(BUNDLED, None),)
    sources = tuple(_named(path) for path in paths)
    names = [source.name for source in sources]
    for path, name in zip(paths, names, strict=True):
        if names.count(name) > 1:
            raise SnapshotError(
                Reason.CONFIGURATION_INVALID,
                f"{path}: another trace is called {name} too",
                "Results name traces after their files: give them different names.",
            )
    return sources


def study_sources(folder: Path, names: Sequence[str] | None = None) -> tuple[Source, ...]:
    """The study's traces in ``folder``, plain or gzipped; of those only ``names`` if given.

    Raises:
        SnapshotError: ``configuration_invalid`` for a trace that is not there, or a name that is none.
    """
    known = {one.trace: one for one in STUDIES}
    unknown = [name for name in names or () if name not in known]
    if unknown:
        raise SnapshotError(
            Reason.CONFIGURATION_INVALID,
            f"the study has no trace {unknown[0]}",
            f"Its traces are {', '.join(known)}.",
        )
    sources = []
    for one in (known[name] for name in names or known):
        path = next((path for path in (folder / one.file, folder / f"{one.file}.gz") if path.exists()), None)
        if path is None:
            raise SnapshotError(
                Reason.CONFIGURATION_INVALID,
                f"{folder} does not hold {one.file}",
                "docs/policy.md says where the traces are published.",
            )
        sources.append(Source(one.trace, str(path), one.split_s))
    return tuple(sources)


def require(sources: Sequence[Source], half: Half) -> None:
    """Reads every trace, so that one that is none is known before anything else is done; raises as :func:`part`."""
    for source in sources:
        part(source, half)


def _named(path: Path) -> Source:
    known = study(path.name.removesuffix(".gz"))
    if known is not None:
        return Source(known.trace, str(path), known.split_s)
    return Source(path.name.partition(".")[0], str(path))


@lru_cache(maxsize=8)
def part(source: Source, half: Half) -> Part:
    """Reads one half of a trace; the reading is kept, so runs of one trace should follow each other.

    Raises:
        SnapshotError: ``configuration_invalid`` for a file that is none, or a half without requests.
    """
    requests, end_s = _whole(source)
    begin_s = 0.0
    if half is not Half.WHOLE:
        split_s = end_s / 2 if source.split_s is None else source.split_s
        if half is Half.FIRST:
            requests, end_s = window(requests, 0.0, split_s), split_s
        else:
            begin_s = split_s
    found = Part(requests, begin_s, max(begin_s, end_s) - begin_s)
    if not found.requests:
        raise SnapshotError(
            Reason.CONFIGURATION_INVALID, f"{source.name}: its {half} half has no request", "Replay it as a whole."
        )
    return found


@lru_cache(maxsize=8)
def _whole(source: Source) -> tuple[tuple[TraceRequest, ...], float]:
    if source.path is None:
        return bundled_trace(), BUNDLED_S
    requests = read_trace(Path(source.path))
    return requests, requests[-1].offset_s
