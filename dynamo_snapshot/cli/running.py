"""Simulations on a terminal: how far they are, how many processes they take, and a clean Ctrl-C."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

import typer

if TYPE_CHECKING:
    from rich.console import Console

    from dynamo_snapshot.replay.comparison.conduct import Progress
    from dynamo_snapshot.replay.comparison.lanes import Lane
    from dynamo_snapshot.replay.comparison.runs import Run
    from dynamo_snapshot.replay.simulation.setting import Setting

LINE_EVERY_S = 10.0
INTERRUPTED = 130


def usable_processors() -> int:
    return len(os.sched_getaffinity(0))


def simulated(console: Console, runs: Sequence[Run], jobs: int | None) -> list[Lane]:
    """Carries out ``runs``; Ctrl-C ends the command with status 130 and nothing left running."""
    from dynamo_snapshot.replay.comparison.conduct import conduct

    try:
        with shown(console) as tell:
            return list(conduct(runs, jobs or usable_processors(), tell))
    except KeyboardInterrupt:
        console.print("interrupted; nothing was written", style="dim")
        raise typer.Exit(INTERRUPTED) from None


def note_engines(console: Console, settings: Mapping[str, Setting]) -> None:
    """Says for which traces the engine is only assumed."""
    from dynamo_snapshot.replay.simulation.timing import EngineTiming

    assumed = [trace for trace, setting in settings.items() if setting.engine == EngineTiming()]
    if assumed:
        text = (
            "replicas as fast as the mocker's default engine are assumed; say otherwise with --setting engine.speed=N"
        )
        console.print(f"{', '.join(assumed)}: {text}", style="dim", highlight=False)


@contextmanager
def shown(console: Console) -> Iterator[Callable[[Progress], None]]:
    """A bar in a terminal; else a line every ten seconds."""
    from rich import progress as bars

    if not console.is_terminal:
        yield _Lines(console)
        return
    columns = (bars.BarColumn(), bars.MofNCompleteColumn(), bars.TextColumn("runs {task.fields[left]}"))
    with bars.Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task("", total=None, left="")

        def tell(progress: Progress) -> None:
            bar.update(task, completed=progress.done, total=progress.total, left=left(progress.left_s))

        yield tell


class _Lines:
    def __init__(self, console: Console) -> None:
        self._console = console
        self._told_at = time.monotonic()

    def __call__(self, progress: Progress, /) -> None:
        if time.monotonic() - self._told_at < LINE_EVERY_S:
            return
        self._told_at = time.monotonic()
        text = f"{progress.done} of {progress.total} runs, {left(progress.left_s)}"
        self._console.print(text, style="dim", highlight=False)


def left(seconds: float | None) -> str:
    """An estimate of seconds, as people say it."""
    if seconds is None:
        return ""
    if seconds < 90:
        return f"about {seconds:.0f} s left"
    if seconds < 5400:
        return f"about {seconds / 60:.0f} min left"
    return f"about {seconds / 3600:.1f} h left"
