"""`dynamo-snapshot demo`: a bundled fleet through a real load spike, and whether it did what it must."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dynamo_snapshot.cli.results import finite

if TYPE_CHECKING:
    from rich.console import Console


class Gate(StrEnum):
    ON = "on"
    OFF = "off"


def demo(
    json_file: Annotated[Path | None, typer.Option("--json", metavar="FILE", help="Write all figures as JSON.")] = None,
    html_file: Annotated[
        Path | None, typer.Option("--html", metavar="FILE", help="Write a page with a timeline.")
    ] = None,
    trace: Annotated[Path | None, typer.Option(help="Another trace: Azure's CSV or Mooncake's JSONL.")] = None,
    speed: Annotated[
        float, typer.Option(min=0.01, callback=finite, help="How many times as fast as it was recorded.")
    ] = 2.0,
    boot_seconds: Annotated[float, typer.Option(min=0, callback=finite, help="Simulated boot of a cold start.")] = 8.0,
    resident_mib: Annotated[int, typer.Option(min=0, help="Real memory of each worker, in MiB.")] = 300,
    gate: Annotated[Gate, typer.Option(help="off: a control run; workers register before they can serve.")] = Gate.ON,
    plain: Annotated[bool, typer.Option("--plain", help="Lines instead of a live view, also in a terminal.")] = False,
) -> None:
    """Run Dynamo with a bundled fleet through a load spike from a real trace.

    One cold start, one capture, scale-out by restores, one worker killed under load, scale-in; then
    everything is taken down. The engine is Dynamo's mocker: its boot is simulated, its memory is real.
    The exit status is 0 only if every check passes.
    """
    import asyncio
    import json

    from dynamo_snapshot.cli.results import require_writable, write
    from dynamo_snapshot.local.demo_fleet import DemoOptions
    from dynamo_snapshot.local.session import run_demo
    from dynamo_snapshot.local.view import Terminal

    require_writable(json_file, html_file)
    options = DemoOptions(trace, speed, boot_seconds, resident_mib, gated=gate is Gate.ON)
    console = Terminal()
    result = asyncio.run(run_demo(options, console, plain=plain))
    if result is None:
        raise typer.Exit(130)
    _print(console, result)
    if json_file is not None:
        write(json_file, json.dumps(result, indent=2) + "\n")
    if html_file is not None:
        from dynamo_snapshot.local.report import render

        write(html_file, render(result))
    if not result["passed"]:
        raise typer.Exit(1)


def _print(console: Console, result: dict[str, Any]) -> None:
    from rich.table import Table

    console.print(f"\n{result['what']}\n", highlight=False)
    table = Table("", "check", "value", "bound", box=None, pad_edge=False)
    for check in result["checks"]:
        good = check["passed"]
        table.add_row(
            "✓" if good else "✗",
            check["name"],
            str(check["value"]),
            check["bound"],
            style="green" if good else "bold red",
        )
    console.print(table)
    if result["gate"] == "off" and result["passed"]:
        console.print("Without the gate, workers were in discovery before they could serve, as this run is to show.")
