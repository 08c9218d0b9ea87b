"""`dynamo-snapshot doctor`: whether this host can capture and restore, with a remedy for each finding."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from rich.table import Table

    from dynamo_snapshot.agent.doctor.findings import Finding

_STYLES = {"ok": "green", "warning": "yellow", "error": "bold red"}


def doctor(
    fleet_file: Annotated[
        Path | None,
        typer.Argument(metavar="[FLEET.yaml]", help="Look at what this fleet names, too."),
    ] = None,
    criu: Annotated[Path | None, typer.Option(help="The criu to try, instead of the configured one.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="As JSON, for programs.")] = False,
) -> None:
    """Check kernel, privileges, CRIU, space, GPU driver, servers and Dynamo on this host.

    The exit status is 1 when restoring cannot work, or the fleet cannot run.
    """
    from itertools import chain

    import msgspec
    from rich.console import Console
    from rich.markup import escape

    from dynamo_snapshot.agent.doctor.examine import can_restore, examine
    from dynamo_snapshot.agent.doctor.findings import Host
    from dynamo_snapshot.config import Agent, load_fleet
    from dynamo_snapshot.local.preflight import fleet_checks

    fleet = load_fleet(fleet_file) if fleet_file else None
    agent = fleet.agent if fleet else Agent()
    host = Host(
        store_dir=agent.store_dir,
        runtime_dir=agent.runtime_dir,
        minimum_free_bytes=agent.minimum_free_bytes,
        criu=criu or agent.criu,
    )
    findings, of_fleet = [], fleet_checks(fleet) if fleet else {}
    console = Console(highlight=False)
    with console.status("looking ..."):
        for finding in chain(examine(host), examine(host, of_fleet)):
            findings.append(finding)
            if not as_json:
                console.print(_row(finding))
    host_works = can_restore(finding for finding in findings if finding.check not in of_fleet)
    works = can_restore(findings)
    if as_json:
        body = {"can_restore": host_works, "findings": findings}
        typer.echo(msgspec.json.format(msgspec.json.encode(body), indent=2).decode())
    elif works:
        console.print(f"\nThis host can capture and restore{', and run this fleet' if fleet else ''}.")
    else:
        broken = ", ".join(finding.check for finding in findings if finding.severity == "error")
        cannot = "This fleet cannot run here" if host_works else "Restoring cannot work here"
        console.print(f"\n[bold red]{cannot}:[/] see {escape(broken)} above.")
    if not works:
        raise typer.Exit(1)


def _row(finding: Finding) -> Table:
    """One line a finding, as it comes; columns line up as their widths are fixed."""
    from rich.table import Table
    from rich.text import Text

    row = Table.grid(padding=(0, 2))
    row.add_column(width=7, style=_STYLES[finding.severity])
    row.add_column(width=12)
    row.add_column(overflow="fold")
    row.add_row(finding.severity, finding.check, Text(finding.seen))
    if finding.remedy:
        row.add_row("", "", Text(finding.remedy, style="italic"))
    return row
