"""`dynamo-snapshot status`: the fleet that runs on this host, from what its parts publish."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from dynamo_snapshot.local.observe import FleetView


def status(
    fleet_file: Annotated[
        Path | None, typer.Argument(metavar="[FLEET.yaml]", help="Whose fleet; without it the default runtime folder.")
    ] = None,
    runtime_dir: Annotated[Path | None, typer.Option(help="The fleet's runtime folder, instead of its file.")] = None,
    watch: Annotated[bool, typer.Option("--watch", "-w", help="Keep showing it until Ctrl-C.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="As JSON, for programs.")] = False,
) -> None:
    """Show pools, replicas with their states and loads, and the last decisions with their reasons.

    The exit status is 1 when no fleet runs here, also where one was killed and its last status is still there;
    2 when its file is wrong.
    """
    import time

    from rich.console import Console
    from rich.live import Live

    from dynamo_snapshot.config import Agent, load_fleet
    from dynamo_snapshot.errors import SnapshotError
    from dynamo_snapshot.local import leftovers
    from dynamo_snapshot.local.observe import read_view
    from dynamo_snapshot.local.ownership import deserter
    from dynamo_snapshot.local.view import render
    from dynamo_snapshot.model import Reason

    folder = runtime_dir or (load_fleet(fleet_file).agent if fleet_file else Agent()).runtime_dir

    def look() -> FleetView:
        view = read_view(folder)
        if view.status is None and not view.reports:
            raise SnapshotError(
                Reason.SERVER_UNREACHABLE,
                f"no fleet runs here: {folder} has no status of one",
                "Start one with `dynamo-snapshot up FLEET.yaml`, or name its file or --runtime-dir.",
            )
        pid = deserter(folder)
        if pid is not None:
            left = len(leftovers.processes(folder))
            raise SnapshotError(
                Reason.PROCESS_DIED,
                f"the fleet in {folder} is gone: process {pid}, which ran it, ended without taking it down, and "
                + (f"{left} processes of its replicas are left" if left else "only files of it are left"),
                "`dynamo-snapshot up FLEET.yaml` removes what is left and starts it anew.",
            )
        return view

    view = look()
    if as_json:
        _print_json(view)
        return
    console = Console()
    if not watch:
        console.print(render(view))
        return
    try:
        with Live(render(view), console=console, auto_refresh=False) as live:
            while True:
                time.sleep(0.5)
                live.update(render(look()), refresh=True)
    except KeyboardInterrupt:
        return


def _print_json(view: FleetView) -> None:
    import sys

    from dynamo_snapshot.model import encode

    body = {"at": view.at, "status_age_s": view.status_age_s, "fleet": view.status, "nodes": view.reports}
    sys.stdout.write(encode(body).decode() + "\n")
