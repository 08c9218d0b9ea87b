"""`dynamo-snapshot restore`: a replica from a snapshot, without a fleet."""

from __future__ import annotations

from typing import Annotated

import typer

from dynamo_snapshot.cli.direct import CriuOption, EnvironmentOption, FleetOption, RuntimeOption, StoreOption


def restore(
    snapshot_id: Annotated[str, typer.Argument(metavar="ID", help="As `dynamo-snapshot snapshots ls` shows it.")],
    store: StoreOption = None,
    env: EnvironmentOption = None,
    criu: CriuOption = None,
    runtime_dir: RuntimeOption = None,
    fleet: FleetOption = None,
    park: Annotated[bool, typer.Option("--park", help="Stop short of serving, until SIGUSR1 wakes it.")] = False,
) -> None:
    """Restore a worker from a snapshot and show what it does until Ctrl-C, which drains it.

    It gets a new identity: a port, a discovery lease and random numbers of its own. Of the shell's variables it gets
    DYN_*, ETCD_* and NATS_*, and those of --env; ETCD_ENDPOINTS says where it registers.

    The exit status is the worker's own; 1 when it was not restored, 130 when Ctrl-C came before it was.
    """
    import os

    from dynamo_snapshot.agent import direct
    from dynamo_snapshot.cli.direct import assignments, run, say, settings, woken

    environment = direct.servers_of(os.environ) | assignments(env)
    node = settings(store, criu, runtime_dir, fleet)
    exit_ = run(
        lambda stop: direct.restore(node, snapshot_id, environment, stop, say, woken() if park else None), store, fleet
    )
    say(
        f"the worker ended with status {exit_.code}" if exit_.code >= 0 else f"the worker ended by signal {-exit_.code}"
    )
    raise typer.Exit(exit_.code if exit_.code >= 0 else 128 - exit_.code)
