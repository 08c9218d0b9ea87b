"""Carries the matrix out, keeps what is done, and puts the table of ``docs/benchmarks`` together."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from dynamo_snapshot.replay.comparison.conduct import Progress, conduct
from dynamo_snapshot.replay.comparison.fingerprint import code_of
from dynamo_snapshot.replay.comparison.lanes import Lane
from dynamo_snapshot.replay.comparison.matrix import START_SETTINGS, Matrix, in_each_setting, missing
from dynamo_snapshot.replay.comparison.rows import Row
from dynamo_snapshot.replay.comparison.runs import Run
from dynamo_snapshot.replay.comparison.store import as_kept, read_table, rounded, write
from dynamo_snapshot.replay.comparison.verdict import Comparison, Verdict, verdicts

SAVE_EVERY_S = 20.0
WHAT = (
    "One row a simulated run. Shares are 0 to 1. restore_s and cold_s are the start setting, start says which of "
    "the two the policy's replicas took. Rivals far behind ours were run with one seed."
)

CarryOut = Callable[[Sequence[Run], int, Callable[[Progress], None]], Iterator[Lane]]


class Bench:
    """One table; what it holds already is not run again, unless its trace's setting has changed since.

    Args:
        again: run everything that is wanted anew.
        environment: the machine, kept beside the rows.
        carry_out: simulates; another one for tests.
    """

    def __init__(
        self,
        matrix: Matrix,
        file: Path,
        *,
        again: bool,
        environment: Mapping[str, Any],
        carry_out: CarryOut = conduct,
    ) -> None:
        self._carry_out = carry_out
        self._matrix = matrix
        self._file = file
        self._environment = environment
        held = read_table(file)
        ours = rounded(msgspec.to_builtins(dict(matrix.settings)))
        wanted = {(run.source.name, run.half, run.policy) for run in matrix.first_round()} if again else set()
        kept = [row for row in held.rows if (row.trace, row.half, row.spec) not in wanted]
        self.rows = [
            row for row in kept if held.settings.get(row.trace) == ours.get(row.trace, held.settings[row.trace])
        ]
        self.dropped = len(kept) - len(self.rows)
        """Rows of a setting that is no more."""
        self._settings = {**held.settings, **ours}

    @property
    def stale(self) -> int:
        """How many rows other code has made."""
        return sum(row.code != code_of(row.policy) for row in self.rows)

    def run(self, processes: int, tell: Callable[[Progress], None]) -> None:
        """Runs what is missing, both rounds; whatever interrupts it, what is done is kept."""
        self._round(self._matrix.first_round(), processes, tell)
        self._round(self._matrix.second_round(self._own_rows()), processes, tell)

    def _own_rows(self) -> list[Row]:
        traces = {source.name for source in self._matrix.sources}
        return [row for row in self.rows if row.trace in traces and row.half == self._matrix.half]

    def _round(self, wanted: Sequence[Run], processes: int, tell: Callable[[Progress], None]) -> None:
        left = missing(wanted, self.rows)
        saved_at = time.monotonic()
        try:
            for lane in self._carry_out(left, processes, tell):
                self.rows += in_each_setting(as_kept(lane.row))
                if time.monotonic() - saved_at > SAVE_EVERY_S:
                    self.save()
                    saved_at = time.monotonic()
        finally:
            self.save()

    def save(self) -> None:
        rows = sorted(self.rows, key=_order)
        about = {
            "what": WHAT,
            "command": "make bench-policy TRACES=<folder>",
            "start_settings": [{"restore_s": restore_s, "cold_s": cold_s} for restore_s, cold_s in START_SETTINGS],
            "seeds": self._matrix.seeds,
            "environment": dict(self._environment),
            "settings": self._settings,
            "verdicts": [verdict_row(verdict) for verdict in verdicts(rows)],
        }
        write(self._file, about, rows)


def verdict_row(verdict: Verdict) -> dict[str, Any]:
    """A verdict as JSON-ready values; intervals are half-widths of the seeds' 95 % interval."""
    ours = verdict.ours
    return {
        **msgspec.to_builtins(verdict.scene),
        "knob": ours.knob,
        "ttft_attainment": [ours.attainment.mean, ours.attainment.half_width],
        "gpu_hours": [ours.gpu_hours.mean, ours.gpu_hours.half_width],
        "stands": verdict.stands,
        "clear": verdict.clear,
        "beaten_by": _rivals(verdict.beaten_by),
        "contested_by": [f"{comparison.rival.name}, {comparison.rival.startup}" for comparison in verdict.contested_by],
    }


def _rivals(found: Sequence[Comparison]) -> list[str]:
    return [f"{comparison.rival.name}, {comparison.rival.startup}" for comparison in found]


def _order(row: Row) -> tuple[Any, ...]:
    return (row.half, row.trace, row.restore_s, row.policy, row.knob, row.start, row.seed)
