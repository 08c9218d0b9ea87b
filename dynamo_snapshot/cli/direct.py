"""What `capture` and `restore` share: options, and a run that Ctrl-C ends in order."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TypeVar

import typer

if TYPE_CHECKING:
    import asyncio

    from dynamo_snapshot.config import Agent

T = TypeVar("T")

StoreOption = Annotated[
    Path | None,
    typer.Option("--store", metavar="DIR", help="Snapshots' folder; default: /var/lib/dynamo-snapshot/snapshots."),
]
CriuOption = Annotated[Path | None, typer.Option("--criu", metavar="PATH", help="The criu to run.")]
RuntimeOption = Annotated[
    Path | None, typer.Option("--runtime-dir", metavar="DIR", help="For the replica while it runs; removed afterwards.")
]
EnvironmentOption = Annotated[
    list[str] | None, typer.Option("--env", "-e", metavar="NAME=VALUE", help="Set for the worker; may be repeated.")
]


def settings(store: Path | None, criu: Path | None, runtime_dir: Path | None) -> Agent:
    """A node of this command's own, with the defaults of fleet.yaml."""
    import os

    from dynamo_snapshot.config import Agent

    defaults = Agent()
    return Agent(
        runtime_dir=runtime_dir or defaults.runtime_dir / f"direct-{os.getpid()}",
        store_dir=(store or defaults.store_dir).absolute(),
        criu=criu,
    )


def assignments(given: list[str] | None) -> dict[str, str]:
    """Reads ``NAME=VALUE`` options."""
    found = {}
    for text in given or []:
        name, sign, value = text.partition("=")
        if not sign or not name:
            raise typer.BadParameter(f"{text!r} is not NAME=VALUE", param_hint="--env")
        found[name] = value
    return found


def note_relative_paths(command: Sequence[str]) -> None:
    """Says which arguments name files here that the worker will not find, as it starts in /."""
    for argument in command:
        path = Path(argument)
        if ("/" in argument or path.suffix) and not path.is_absolute() and path.exists():
            say(f"note: the worker starts in / and may not find {argument}; its full path is {path.absolute()}")


def say(text: str) -> None:
    """Progress, for people: on standard error."""
    import time

    typer.echo(f"{time.strftime('%H:%M:%S')}  {text}", err=True)


def run(work: Callable[[asyncio.Event], Awaitable[T]]) -> T:
    """Runs ``work`` with an event that the first Ctrl-C or SIGTERM sets."""
    import asyncio
    import logging
    import signal

    import structlog

    # What a person should know is said by the command itself.
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.ERROR))

    async def main() -> T:
        stop = asyncio.Event()
        for number in (signal.SIGINT, signal.SIGTERM):
            asyncio.get_running_loop().add_signal_handler(number, stop.set)
        return await work(stop)

    return asyncio.run(main())
