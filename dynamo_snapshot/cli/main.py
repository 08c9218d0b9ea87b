"""The command line: one table of commands, each imported only when it runs.

Errors meet the user here and nowhere else: one sentence with its remedy, never a traceback.
"""

from __future__ import annotations

import errno
import inspect
import os
import sys
from collections.abc import Callable, Sequence
from importlib import import_module
from typing import NamedTuple

import typer

from dynamo_snapshot.errors import SnapshotError
from dynamo_snapshot.model import Reason

EXIT_FAILURE = 1
EXIT_CONFIGURATION = 2


class Entry(NamedTuple):
    """Where a command lives: ``dynamo_snapshot.cli.<module>``, and the function or Typer app in it."""

    module: str
    attribute: str
    panel: str
    summary: str


COMMANDS = {
    "up": Entry("up", "up", "Fleet", "Run a fleet on this host until Ctrl-C; then drain it and leave nothing behind."),
    "demo": Entry("demo", "demo", "Fleet", "Run a bundled fleet through a real load spike and check what it does."),
    "status": Entry("status", "status", "Fleet", "Show the fleet that runs on this host."),
    "capture": Entry("capture", "capture", "Snapshots", "Make a snapshot of a worker."),
    "restore": Entry("restore", "restore", "Snapshots", "Start a replica from a snapshot."),
    "snapshots": Entry("snapshots", "app", "Snapshots", "List, show, verify and remove snapshots."),
    "replay": Entry("replay", "replay", "Policies", "Simulate scaling policies on request traces and compare them."),
    "policy": Entry(
        "policy", "app", "Policies", "Explain and verify decisions, tune the planner's policy, compare it."
    ),
    "doctor": Entry("doctor", "doctor", "Host", "Check whether this host can capture and restore, with remedies."),
    "install-criu": Entry("install_criu", "install_criu", "Host", "Install a CRIU that works on this kernel."),
    "bench": Entry("bench", "app", "Host", "Measure what this project itself adds to a restore."),
    "controller": Entry("controller", "controller", "Parts", "Run the fleet controller (`up` starts one)."),
    "agent": Entry("agent", "agent", "Parts", "Run this host's node agent (`up` starts one)."),
}


def build(arguments: Sequence[str]) -> typer.Typer:
    """Returns the application for ``arguments``: only the command they name is imported, for a fast ``--help``."""
    app = typer.Typer(
        add_completion=False,
        no_args_is_help=True,
        rich_markup_mode="rich",
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"]},
        help="Snapshot scaling for NVIDIA Dynamo: replicas restored from CRIU snapshots instead of cold-started.",
        epilog="Start with [bold]dynamo-snapshot doctor[/], then [bold]dynamo-snapshot demo[/].",
    )

    @app.callback()
    def root() -> None:
        """Makes Typer keep the command's name where only one is registered."""

    for name, entry in COMMANDS.items():
        if arguments[:1] == [name]:
            target = getattr(import_module(f"dynamo_snapshot.cli.{entry.module}"), entry.attribute)
            if isinstance(target, typer.Typer):
                for command in target.registered_commands:
                    command.help = paragraphs(command.callback)
                app.add_typer(target, name=name, help=entry.summary)
            else:
                app.command(name, help=paragraphs(target), rich_help_panel=entry.panel)(target)
        else:
            app.command(name, help=entry.summary, rich_help_panel=entry.panel)(_not_imported)
    return app


def paragraphs(command: Callable[..., object] | None) -> str:
    """Returns a command's help with one line a paragraph: the terminal breaks lines, not the source."""
    return "\n\n".join(" ".join(part.split("\n")) for part in (inspect.getdoc(command) or "").split("\n\n"))


def _not_imported() -> None:
    """Stands for a command in the list of commands; never called."""


def explain(error: SnapshotError) -> int:
    """Says on stderr what went wrong and what to do; returns the exit status."""
    from rich.console import Console
    from rich.text import Text

    console = Console(stderr=True, soft_wrap=True)
    console.print(Text.assemble(("error ", "bold red"), error.message, (f" [{error.reason}]", "dim")))
    if error.remedy:
        console.print(Text.assemble(("remedy ", "bold green"), error.remedy))
    return EXIT_CONFIGURATION if error.reason is Reason.CONFIGURATION_INVALID else EXIT_FAILURE


def main() -> None:
    """The console script."""
    arguments = sys.argv[1:]
    try:
        build(arguments)(arguments)
    except SnapshotError as error:
        raise SystemExit(explain(error)) from None
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT) or error.filename is not None:
            raise
        # The buffer is not empty, and would be flushed again when this process ends.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        cause = f"what this command says or writes has no place: {error.strerror}"
        raise SystemExit(explain(SnapshotError(Reason.DISK_FULL, cause, "Make room where its output goes."))) from None


if __name__ == "__main__":
    main()
