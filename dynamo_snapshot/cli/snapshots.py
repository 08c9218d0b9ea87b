"""`dynamo-snapshot snapshots`: list, show, verify and remove what is in a store."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from dynamo_snapshot.cli.stores import in_store, told_with

if TYPE_CHECKING:
    from rich.console import Console

    from dynamo_snapshot.model import SnapshotSummary
    from dynamo_snapshot.snapshots.store import SnapshotStore

app = typer.Typer(no_args_is_help=True)

StoreOption = Annotated[Path | None, typer.Option("--store", metavar="DIR", help="The store's folder.")]
FleetOption = Annotated[
    Path | None, typer.Option("--fleet", metavar="FLEET.yaml", help="Use this fleet's store; else the default one.")
]
JsonOption = Annotated[bool, typer.Option("--json", help="As JSON, for programs.")]
IdArgument = Annotated[str, typer.Argument(metavar="ID", help="As `ls` shows it.")]
IdsArgument = Annotated[list[str] | None, typer.Argument(metavar="ID...", help="As `ls` shows them.")]


@app.command("ls")
def list_snapshots(store: StoreOption = None, fleet: FleetOption = None, as_json: JsonOption = False) -> None:
    """List the snapshots of a store, the newest first."""
    import time

    from rich.filesize import decimal
    from rich.table import Table

    from dynamo_snapshot.snapshots.store import pool_of

    found = _open(store, fleet)
    summaries = found.list()
    if as_json:
        _print_json([_describe(found, summary) for summary in summaries])
        return
    table = Table("ID", "POOL", "AGE", "SIZE", "KEY", "STATE", box=None, pad_edge=False)
    table.columns[0].no_wrap = True
    for summary in summaries:
        table.add_row(
            summary.id,
            pool_of(summary.id),
            _age(time.time() - summary.created_at),
            decimal(summary.size_bytes),
            summary.compatibility_key[:11],
            _state(found, summary),
        )
    console = _console()
    console.print(table if summaries else f"no snapshots in {found.root}")


@app.command("show")
def show_snapshot(
    snapshot_id: IdArgument, store: StoreOption = None, fleet: FleetOption = None, as_json: JsonOption = False
) -> None:
    """Show one snapshot's manifest, and what of this host stands against restoring it."""
    import shlex
    from datetime import UTC, datetime

    from rich.filesize import decimal
    from rich.markup import escape
    from rich.table import Table

    from dynamo_snapshot.snapshots.compatibility import explain_difference
    from dynamo_snapshot.snapshots.fingerprint import on_host
    from dynamo_snapshot.snapshots.host_facts import read_host_facts

    found = _open(store, fleet)
    with told_with(store, fleet):
        manifest = found.manifest(snapshot_id)
    summary = next(summary for summary in found.list() if summary.id == snapshot_id)
    parts = manifest.capture.compatibility
    differences = explain_difference(parts, on_host(parts, read_host_facts()))
    if as_json:
        _print_json(_describe(found, summary) | {"differences_to_this_host": differences, "manifest": manifest})
        return
    capture = manifest.capture
    rows = {
        "id": manifest.id,
        "pool": capture.pool,
        "created": datetime.fromtimestamp(manifest.created_at, UTC).isoformat(timespec="seconds"),
        "state": _state(found, summary),
        "this host": escape("\n".join(differences)) or "kernel, processor and GPUs are the same",
        "key": manifest.compatibility_key,
        "engine": f"{parts.engine} {parts.engine_version}".strip(),
        "command": escape(shlex.join(parts.command)),
        "kernel, criu": f"{capture.kernel}, {capture.criu_version}",
        "GPUs": f"{', '.join(parts.gpu_models)}, driver {parts.gpu_driver}" if parts.gpu_models else "none",
        "model files": f"{len(parts.model_files)}, {decimal(sum(file.size for file in parts.model_files))}",
        "source": f"pid {capture.source_pid} in {capture.house}",
        "cold start": f"{capture.cold_start_s:.2f} s" if capture.cold_start_s is not None else "not measured",
        "capture": ", ".join(f"{phase.name} {phase.seconds:.3f} s" for phase in capture.phases) or "not recorded",
        "weights": f"{len(capture.weights)} segments, {decimal(manifest.weights_bytes)}" if capture.weights else "none",
        "files": f"{len(manifest.files)}, {decimal(manifest.size_bytes)}, {manifest.digest_algorithm}",
    }
    console = _console()
    for name, value in rows.items():
        for first, line in enumerate(value.splitlines()):
            console.print(f"[bold]{'' if first else name:<14}[/]{line}", soft_wrap=True)
    files = Table("FILE", "SIZE", "DIGEST", box=None, pad_edge=False)
    for entry in sorted(manifest.files, key=lambda entry: -entry.size):
        files.add_row(entry.path, decimal(entry.size), entry.digest[:16])
    console.print()
    console.print(files)


@app.command("verify")
def verify_snapshots(
    ids: IdsArgument = None,
    every: Annotated[bool, typer.Option("--all", help="Every snapshot of the store.")] = False,
    store: StoreOption = None,
    fleet: FleetOption = None,
    as_json: JsonOption = False,
) -> None:
    """Digest every file again, and admit to this node what is as it was published.

    The exit status is 1 when any is not.
    """
    from functools import partial

    from rich.markup import escape
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

    from dynamo_snapshot.errors import SnapshotError

    found = _open(store, fleet)
    if bool(ids) == every:
        raise typer.BadParameter("name snapshots, or give --all, not both")
    results: list[dict[str, object]] = []
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    with Progress(*columns, console=_console(stderr=True), transient=True) as progress:
        for snapshot_id in ids or [summary.id for summary in found.list()]:
            task = progress.add_task(snapshot_id, total=None)
            try:
                progress.update(task, total=found.manifest(snapshot_id).size_bytes)
                found.admit(snapshot_id, partial(progress.advance, task))
                results.append({"id": snapshot_id, "ok": True})
            except SnapshotError as error:
                result = {"id": snapshot_id, "ok": False, "reason": error.reason, "message": error.message}
                results.append(result | {"remedy": in_store(error.remedy, store, fleet)})
            progress.remove_task(task)
    if as_json:
        _print_json(results)
    else:
        console = _console()
        for result in results:
            if result["ok"]:
                console.print(f"[green]ok[/]       {result['id']}")
            else:
                cause = escape(f"{result['message']} [{result['reason']}]")
                console.print(f"[bold red]refused[/]  {cause}", soft_wrap=True)
                console.print(f"         {escape(str(result['remedy']))}", soft_wrap=True)
    if not all(result["ok"] for result in results):
        raise typer.Exit(1)


@app.command("rm")
def remove_snapshots(
    ids: Annotated[list[str], typer.Argument(metavar="ID...", help="As `ls` shows them.")],
    store: StoreOption = None,
    fleet: FleetOption = None,
    as_json: JsonOption = False,
) -> None:
    """Remove snapshots. One that is in use, in any process of this host, is refused.

    Weight segments that only they named are removed by the node's agent.
    """
    from dynamo_snapshot.snapshots.layout import missing

    found = _open(store, fleet)
    there = {summary.id for summary in found.list()}
    with told_with(store, fleet):
        for snapshot_id in ids:
            if snapshot_id not in there:  # before any is removed
                raise missing(snapshot_id, found.root)
        for snapshot_id in ids:
            found.remove(snapshot_id)
            if not as_json:
                _console().print(f"removed {snapshot_id}")
    if as_json:
        _print_json({"removed": ids})


def _open(store: Path | None, fleet: Path | None) -> SnapshotStore:
    from dynamo_snapshot.config import Agent, load_fleet
    from dynamo_snapshot.errors import SnapshotError
    from dynamo_snapshot.model import Reason
    from dynamo_snapshot.snapshots.store import SnapshotStore

    if store and fleet:
        raise typer.BadParameter("--store and --fleet exclude each other")
    root = store or (load_fleet(fleet).agent if fleet else Agent()).store_dir
    if not root.is_dir():
        raise SnapshotError(
            Reason.SNAPSHOT_MISSING,
            f"there is no store at {root}",
            "Name one with --store DIR or --fleet FLEET.yaml; the first capture makes it.",
        )
    return SnapshotStore(root)


def _describe(store: SnapshotStore, summary: SnapshotSummary) -> dict[str, object]:
    from dynamo_snapshot.snapshots.store import pool_of

    return {
        "id": summary.id,
        "pool": pool_of(summary.id),
        "compatibility_key": summary.compatibility_key,
        "created_at": summary.created_at,
        "size_bytes": summary.size_bytes,
        "admitted": summary.admitted,
        "in_use": store.in_use(summary.id),
        "reason": summary.reason,
    }


def _state(store: SnapshotStore, summary: SnapshotSummary) -> str:
    if summary.reason:
        return f"[red]{summary.reason}[/]"
    if store.in_use(summary.id):
        return "in use"
    return "[green]admitted[/]" if summary.admitted else "[yellow]not admitted[/]"


def _age(seconds: float) -> str:
    for limit, size, unit in ((120, 1, "s"), (7200, 60, "min"), (172800, 3600, "h")):
        if seconds < limit:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds / 86400:.0f} d"


def _console(*, stderr: bool = False) -> Console:
    from rich.console import Console

    console = Console(stderr=stderr, highlight=False, soft_wrap=False)
    # Into a file or pipe nothing is cut to a terminal's width.
    return console if console.is_terminal else Console(stderr=stderr, highlight=False, width=240)


def _print_json(value: object) -> None:
    import msgspec

    typer.echo(msgspec.json.format(msgspec.json.encode(value), indent=2).decode())
