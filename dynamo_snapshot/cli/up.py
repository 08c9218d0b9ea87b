"""`dynamo-snapshot up`: a fleet on this host, from a file, until it is told to stop."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def up(
    fleet_file: Annotated[Path, typer.Argument(metavar="FLEET.yaml", help="The fleet to run.")],
    plain: Annotated[bool, typer.Option("--plain", help="Lines instead of a live view, also in a terminal.")] = False,
) -> None:
    """Run a fleet on this host: servers, frontend, planner, controller, agent and workers.

    Everything is checked before anything starts. Ctrl-C (or SIGTERM, or the end of a program that its output
    is piped to) drains the workers, ends every process and leaves nothing behind but the logs and the published
    snapshots.

    The exit status is 0 then, 1 if anything was left behind or the fleet could not start, 2 if its file is wrong.
    """
    import asyncio

    from dynamo_snapshot.config import load_fleet
    from dynamo_snapshot.local.session import run

    left = asyncio.run(run(load_fleet(fleet_file), plain=plain))
    if left:
        raise typer.Exit(1)
