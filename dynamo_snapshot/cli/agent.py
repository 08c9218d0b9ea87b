"""``dynamo-snapshot agent``: this host's node agent, by itself."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def agent(
    fleet_file: Annotated[Path, typer.Argument(metavar="FLEET.yaml", help="The fleet this host belongs to.")],
    node: Annotated[str, typer.Option(help="This host's name in the fleet.")] = "local",
) -> None:
    """Run this host's node agent until SIGTERM or Ctrl-C.

    It carries out what the fleet controller wants of this host and reports what is so, over files in
    agent.runtime_dir. Workers that serve outlive it: started again, it adopts them.
    """
    import asyncio

    from dynamo_snapshot.agent.entry import serve
    from dynamo_snapshot.config import load_fleet

    asyncio.run(serve(load_fleet(fleet_file), node))
