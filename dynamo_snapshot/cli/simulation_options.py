"""Options that the commands which simulate have in common."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from dynamo_snapshot.replay.comparison.halves import Half

Traces = Annotated[
    list[Path] | None,
    typer.Argument(metavar="[TRACE]…", help="Request traces; without any, the bundled five minutes of Azure's."),
]
WhichHalf = Annotated[Half, typer.Option(help="Which part of each trace is measured; what comes before it is played.")]
Seeds = Annotated[int, typer.Option(min=1, max=100_000, help="Runs of each, with other start-up times.")]
Changes = Annotated[
    list[str] | None,
    typer.Option(
        "--setting",
        metavar="FIELD=VALUE",
        help="Engine, bounds and objectives, as max_replicas=8 or engine.speed=2; may be repeated.",
    ),
]
Jobs = Annotated[int | None, typer.Option(min=1, help="Processes; without it, one a processor.")]
