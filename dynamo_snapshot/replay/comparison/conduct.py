"""Carries out runs, on several processes, and tells how far it is."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache

import msgspec

from dynamo_snapshot.replay.comparison.fingerprint import code_of
from dynamo_snapshot.replay.comparison.lanes import Lane
from dynamo_snapshot.replay.comparison.parallel import work
from dynamo_snapshot.replay.comparison.rows import CEILING, family
from dynamo_snapshot.replay.comparison.runs import Run, perform_all
from dynamo_snapshot.replay.comparison.sources import part
from dynamo_snapshot.replay.policies import catalog


@dataclass(frozen=True)
class Progress:
    """How far a comparison is."""

    done: int
    total: int
    elapsed_s: float
    left_s: float | None
    """Estimated; None: nothing is known yet."""


def conduct(
    runs: Sequence[Run], processes: int, tell: Callable[[Progress], None] = lambda progress: None
) -> Iterator[Lane]:
    """Yields what each run came to, as they get done; closing it ends what runs.

    Args:
        tell: called before the first run and after each.
    """
    # A run takes about as long as it has requests.
    weights = {run: len(part(run.source, run.half).played) for run in runs}
    total, done, done_weight = sum(weights.values()), 0, 0
    began = time.monotonic()
    tell(Progress(0, len(runs), 0.0, None))
    for together, lanes in work(performed, _in_turn(_pieces(runs)), processes):
        for run, lane in zip(together, lanes, strict=True):
            done += 1
            done_weight += weights[run]
            elapsed = time.monotonic() - began
            yield lane
            tell(Progress(done, len(runs), elapsed, elapsed * (total - done_weight) / done_weight))


def performed(together: tuple[Run, ...]) -> tuple[Lane, ...]:
    """Carries out one piece in the process that calls it, and names the code that this process has loaded."""
    codes = _codes()
    return tuple(
        Lane(msgspec.structs.replace(lane.row, code=codes[lane.row.policy]), lane.sizes)
        for lane in perform_all(together)
    )


@cache
def _codes() -> Mapping[str, str]:
    """By policy, read at a process's first piece: files may be edited while it works, for hours."""
    return {policy: code_of(policy) for policy in catalog.names()}


def _pieces(runs: Sequence[Run]) -> list[tuple[Run, ...]]:
    """What one process carries out: one run, or for the ceiling all seeds, as they share what it foresees."""
    pieces: dict[Run, list[Run]] = {}
    for run in runs:
        shares = family(run.policy)[0] == CEILING
        pieces.setdefault(msgspec.structs.replace(run, seed=0) if shares else run, []).append(run)
    return [tuple(piece) for piece in pieces.values()]


def _in_turn(pieces: Sequence[tuple[Run, ...]]) -> list[tuple[Run, ...]]:
    """Traces and policies in turn, so that an estimate from what is done holds for what is left."""
    groups: dict[tuple[str, str, str], list[tuple[Run, ...]]] = {}
    for piece in pieces:
        run = piece[0]
        groups.setdefault((run.source.name, run.half, family(run.policy)[0]), []).append(piece)
    # Each group's pieces are spread evenly over the whole.
    places = [((index + 0.5) / len(group), piece) for group in groups.values() for index, piece in enumerate(group)]
    return [piece for _, piece in sorted(places, key=lambda place: place[0])]
