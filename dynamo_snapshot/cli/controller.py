"""``dynamo-snapshot controller``: the fleet controller, by itself."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def controller(
    fleet_file: Annotated[Path, typer.Argument(metavar="FLEET.yaml", help="The fleet to control.")],
) -> None:
    """Run the fleet controller until SIGTERM or Ctrl-C.

    It takes the planner's decisions, compares them with discovery and with what nodes report, and writes
    what it wants of each node into agent.runtime_dir. Replicas live on without it: started again, it goes
    on where it was. ETCD_ENDPOINTS and NATS_SERVER say where embedded servers run.
    """
    import asyncio

    from dynamo_snapshot.config import load_fleet
    from dynamo_snapshot.fleet.entry import serve
    from dynamo_snapshot.fleet.logs import configure

    configure("controller")
    asyncio.run(serve(load_fleet(fleet_file)))
