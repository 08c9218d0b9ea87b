"""Simulations on a terminal: how far they are, how many processes they take, and a clean end when asked for one."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, NoReturn

import typer

if TYPE_CHECKING:
    from rich.console import Console

    from dynamo_snapshot.replay.comparison.conduct import Progress
    from dynamo_snapshot.replay.comparison.lanes import Lane
    from dynamo_snapshot.replay.comparison.runs import Run
    from dynamo_snapshot.replay.simulation.setting import Setting

LINE_EVERY_S = 10.0
EDGELESS = 1000
"""Columns of a file or a pipe: no line of a table or a sentence is as long."""
INTERRUPTED = 130
TERMINATED = 143


def output() -> Console:
    """The console of these commands: what goes to a file or a pipe is neither cut nor broken."""
    from rich.console import Console

    console = Console(highlight=False)
    return console if console.is_terminal else Console(highlight=False, width=EDGELESS)


def usable_processors() -> int:
    return len(os.sched_getaffinity(0))


def simulated(console: Console, runs: Sequence[Run], jobs: int | None) -> list[Lane]:
    """Carries out ``runs``; see :func:`ending` for Ctrl-C and SIGTERM."""
    from dynamo_snapshot.replay.comparison.conduct import conduct

    with ending(console, "nothing was written"), shown(console) as tell:
        return list(conduct(runs, jobs or usable_processors(), tell))


class _Terminated(KeyboardInterrupt):
    """SIGTERM came; whoever cleans up after Ctrl-C does so here."""


@contextmanager
def ending(console: Console, left: str) -> Iterator[None]:
    """Ctrl-C and SIGTERM unwind what is inside, say what is ``left`` and end the command as shells expect it."""
    before = signal.signal(signal.SIGTERM, _terminate)
    try:
        yield
    except KeyboardInterrupt as interrupt:
        console.print(f"interrupted; {left}", style="dim", soft_wrap=True)
        raise typer.Exit(TERMINATED if isinstance(interrupt, _Terminated) else INTERRUPTED) from None
    finally:
        signal.signal(signal.SIGTERM, before)


def _terminate(number: int, frame: object) -> NoReturn:
    # A second one must not end the saving that the first one began.
    signal.signal(number, signal.SIG_IGN)
    raise _Terminated


def note_engines(console: Console, settings: Mapping[str, Setting]) -> None:
    """Says for which traces the engine is only assumed."""
    from dynamo_snapshot.replay.simulation.timing import EngineTiming

    assumed = [trace for trace, setting in settings.items() if setting.engine == EngineTiming()]
    if assumed:
        text = (
            "replicas as fast as the mocker's default engine are assumed; say otherwise with --setting engine.speed=N"
        )
        console.print(f"{', '.join(assumed)}: {text}", style="dim")


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
        self._console.print(text, style="dim")


def left(seconds: float | None) -> str:
    """An estimate of seconds, as people say it."""
    if seconds is None:
        return ""
    if seconds < 90:
        return f"about {seconds:.0f} s left"
    if seconds < 5400:
        return f"about {seconds / 60:.0f} min left"
    return f"about {seconds / 3600:.1f} h left"
