"""Carries out runs, on several processes, and tells how far it is."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import msgspec

from dynamo_snapshot.replay.comparison.fingerprint import code_of
from dynamo_snapshot.replay.comparison.lanes import Lane
from dynamo_snapshot.replay.comparison.parallel import work
from dynamo_snapshot.replay.comparison.rows import family
from dynamo_snapshot.replay.comparison.runs import Run, perform
from dynamo_snapshot.replay.comparison.sources import part


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
    weights = {run: len(part(run.source, run.half).requests) for run in runs}
    total, done_weight = sum(weights.values()), 0
    began = time.monotonic()
    tell(Progress(0, len(runs), 0.0, None))
    for done, (run, lane) in enumerate(work(perform, _in_turn(runs), processes), start=1):
        done_weight += weights[run]
        elapsed = time.monotonic() - began
        yield Lane(msgspec.structs.replace(lane.row, code=code_of(lane.row.policy)), lane.sizes)
        tell(Progress(done, len(runs), elapsed, elapsed * (total - done_weight) / done_weight))


def _in_turn(runs: Sequence[Run]) -> list[Run]:
    """Traces and policies in turn, so that an estimate from what is done holds for what is left."""
    groups: dict[tuple[str, str, str], list[Run]] = {}
    for run in runs:
        groups.setdefault((run.source.name, run.half, family(run.policy)[0]), []).append(run)
    # Each group's runs are spread evenly over the whole.
    places = [((index + 0.5) / len(group), run) for group in groups.values() for index, run in enumerate(group)]
    return [run for _, run in sorted(places, key=lambda place: place[0])]
