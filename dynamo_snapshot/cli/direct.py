"""What `capture` and `restore` share: options, and a run that Ctrl-C ends in order."""

from __future__ import annotations

import re
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
FleetOption = Annotated[
    Path | None,
    typer.Option(
        "--fleet", metavar="FLEET.yaml", help="Take limits, deadlines, ports and GPU settings from its agent."
    ),
]
EnvironmentOption = Annotated[
    list[str] | None, typer.Option("--env", "-e", metavar="NAME=VALUE", help="Set for the worker; may be repeated.")
]


def settings(store: Path | None, criu: Path | None, runtime_dir: Path | None, fleet: Path | None) -> Agent:
    """A node of this command's own; what no option says is as in ``fleet``, or else fleet.yaml's default."""
    import os

    from dynamo_snapshot.agent.direct_folder import DIRECT_DIR
    from dynamo_snapshot.config import Agent, load_fleet

    agent = load_fleet(fleet).agent if fleet else Agent()
    return agent.model_copy(
        update={
            "runtime_dir": (runtime_dir or DIRECT_DIR / str(os.getpid())).absolute(),
            "store_dir": (store or agent.store_dir).absolute(),
            "criu": criu or agent.criu,
        }
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


def in_options(text: str) -> str:
    """``text`` with this command's options, and --fleet, where it names fields of a fleet.yaml."""
    for field, option in _OPTIONS.items():
        text = text.replace(f"{field} in fleet.yaml", option).replace(field, option)
    return _OTHER_FIELD.sub(r"\1 in a file that --fleet names", text)


_OPTIONS = {
    "agent.runtime_dir": "--runtime-dir",
    "agent.store_dir": "--store",
    "agent.criu in fleet.yaml, --criu": "--criu",
    "agent.criu": "--criu",
    "the worker's boot_timeout_s": "--boot-timeout",
}
_OTHER_FIELD = re.compile(r"\b(agent\.[a-z][a-z_.]*[a-z])(?: in fleet\.yaml)?")


def run(work: Callable[[asyncio.Event], Awaitable[T]], store: Path | None, fleet: Path | None) -> T:
    """Runs ``work`` with an event that the first Ctrl-C or SIGTERM sets.

    Args:
        store, fleet: the command's options, for what its errors tell a person to type.

    Raises:
        SnapshotError: ``work``'s own, in the words of a command line; ``not_privileged``.
        typer.Exit: with a signal's status, as shells expect it, where that ended the work before it was done.
    """
    import asyncio
    import logging
    import signal

    import structlog

    from dynamo_snapshot.cli.stores import in_store
    from dynamo_snapshot.errors import SnapshotError
    from dynamo_snapshot.local.preflight import require_root
    from dynamo_snapshot.model import Reason

    # What a person should know is said by the command itself.
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.ERROR))

    require_root()
    came: list[int] = []

    async def main() -> T:
        stop = asyncio.Event()

        def end(number: int) -> None:
            came.append(number)
            stop.set()

        for number in (signal.SIGINT, signal.SIGTERM):
            asyncio.get_running_loop().add_signal_handler(number, end, number)
        return await work(stop)

    try:
        return asyncio.run(main())
    except SnapshotError as error:
        if came and error.reason is Reason.CANCELLED:
            say(f"interrupted: {error.message}")
            raise typer.Exit(128 + came[0]) from None
        remedy = in_store(in_options(error.remedy), store, fleet)
        raise SnapshotError(error.reason, in_options(error.message), remedy) from error


def woken() -> asyncio.Event:
    """An event of the running loop that SIGUSR1 sets."""
    import asyncio
    import signal

    event = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGUSR1, event.set)
    return event
