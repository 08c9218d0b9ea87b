"""`dynamo-snapshot capture`: a snapshot of a worker, without a fleet."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from dynamo_snapshot.cli.direct import CriuOption, EnvironmentOption, FleetOption, RuntimeOption, StoreOption


def capture(
    command: Annotated[list[str], typer.Argument(metavar="-- COMMAND...", help="What starts the worker.")],
    store: StoreOption = None,
    pool: Annotated[
        str, typer.Option(help="A name for the worker's kind; the snapshot's id begins with it.")
    ] = "worker",
    env: EnvironmentOption = None,
    model_path: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR", exists=True, file_okay=False, help="The model's folder: a snapshot fits only the same files."
        ),
    ] = None,
    boot_timeout: Annotated[float, typer.Option(metavar="SECONDS", help="How long the worker may boot.")] = 600,
    keep: Annotated[bool, typer.Option("--keep", help="Let the worker serve on until Ctrl-C.")] = False,
    criu: CriuOption = None,
    runtime_dir: RuntimeOption = None,
    fleet: FleetOption = None,
) -> None:
    """Start a worker, wait until it is ready for a snapshot, capture it, and print the snapshot's id.

    The worker must speak the control protocol: run it through `dynamo-snapshot-worker run --`, or use the
    worker hooks. It starts in /, so give full paths. Of the shell's variables it gets DYN_*, ETCD_* and NATS_*; set
    others with --env, as they become part of what a host must match to restore the snapshot.

    Progress goes to standard error; standard output has only the id. Ctrl-C gives up, with exit status 130, and
    leaves nothing, unless the snapshot is published already.
    """
    import math
    import os
    import re

    from dynamo_snapshot.agent import direct
    from dynamo_snapshot.cli.direct import assignments, note_relative_paths, run, say, settings
    from dynamo_snapshot.config import NAME_PATTERN
    from dynamo_snapshot.model import WorkerSpec

    if not re.fullmatch(NAME_PATTERN, pool):
        raise typer.BadParameter(f"{pool!r} is not of small letters, digits and hyphens", param_hint="--pool")
    if not 0 < boot_timeout < math.inf:
        raise typer.BadParameter(f"{boot_timeout:g} is not a time", param_hint="--boot-timeout")
    spec = WorkerSpec(
        command=tuple(command),
        environment=assignments(env),
        incarnation_environment=direct.servers_of(os.environ),
        model_path=str(model_path.absolute()) if model_path else None,
        boot_timeout_s=boot_timeout,
    )
    note_relative_paths(command)
    node = settings(store, criu, runtime_dir, fleet)
    typer.echo(run(lambda stop: direct.capture(node, pool, spec, stop, say, keep=keep), store, fleet))
