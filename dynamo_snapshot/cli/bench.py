"""`dynamo-snapshot bench`: what this project itself adds, measured on this machine."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dynamo_snapshot.cli.direct import EnvironmentOption
from dynamo_snapshot.cli.results import finite

if TYPE_CHECKING:
    from collections.abc import Callable

    from dynamo_snapshot.config import Agent
    from dynamo_snapshot.local.bench_gpu import Repeats

app = typer.Typer(no_args_is_help=True)


class Engine(StrEnum):
    TORCH = "torch"
    VLLM = "vllm"


@app.callback()
def bench() -> None:
    """Measure what this project itself adds to a restore."""


@app.command("control-path")
def control_path(
    repeats: Annotated[int, typer.Option(min=1, help="How many decisions, and how many restores.")] = 300,
    json_file: Annotated[Path | None, typer.Option("--json", metavar="FILE", help="Write the figures as JSON.")] = None,
) -> None:
    """Time a decision's way to its order, and a restore's way into discovery, without CRIU and engine.

    Real etcd, controller, agent and CRIU, one at a time; a machine that does other work shows higher
    figures, so its idle share stands beside them. The exit status is 1 if anything failed.
    """
    import asyncio
    import json

    from rich.console import Console
    from rich.table import Column, Table

    from dynamo_snapshot.cli.results import require_writable, write
    from dynamo_snapshot.local import bench as measure

    require_writable(json_file)
    console = Console()

    def say(text: str) -> None:
        console.print(text, style="dim", highlight=False)

    result = asyncio.run(measure.control_path(repeats, say))
    columns = ("p50", "p95", "p99", "p99 when idle, at most", "count")
    table = Table(Column("ms", no_wrap=True), *columns, box=None, pad_edge=False)
    for name, bound in measure.BOUNDS_MS.items():
        row = result[name]
        table.add_row(name, *(str(row[share]) for share in ("p50", "p95", "p99")), f"{bound:g}", str(row["count"]))
    console.print(table)
    if json_file is not None:
        write(json_file, json.dumps(result, indent=2) + "\n")
    failures = result["failures"]
    if failures["decisions"] or failures["restores"]:
        for text in failures["texts"]:
            console.print(f"failed: {text}", style="bold red", highlight=False)
        raise typer.Exit(1)


@app.command("planner")
def planner(
    json_file: Annotated[Path | None, typer.Option("--json", metavar="FILE", help="Write all figures as JSON.")] = None,
    trace: Annotated[Path | None, typer.Option(help="Another trace; else the demo's.")] = None,
    speed: Annotated[
        float, typer.Option(min=0.01, callback=finite, help="How many times as fast as it was recorded.")
    ] = 2.0,
    ttft: Annotated[
        float, typer.Option(min=0.001, callback=finite, help="Objective: seconds to the first token.")
    ] = 1.0,
    itl: Annotated[float, typer.Option(min=0.001, callback=finite, help="Objective: seconds between tokens.")] = 0.1,
) -> None:
    """Replay one load through one fleet, sized by this project's policy and by Dynamo's own load scaling.

    Each planner has a fleet of its own, one after the other, for as long as the load takes and half a minute more.
    The exit status is 1 if any request failed.
    """
    import asyncio
    import json

    from rich.console import Console
    from rich.table import Column, Table

    from dynamo_snapshot.cli.results import require_writable, write
    from dynamo_snapshot.local import bench_planner as measure
    from dynamo_snapshot.local.demo_fleet import DemoOptions

    require_writable(json_file)
    console = Console()

    def say(text: str) -> None:
        console.print(text, style="dim", highlight=False)

    objectives = measure.Objectives(ttft, itl)
    result = asyncio.run(measure.compare(DemoOptions(trace, speed), objectives, measure.CONTENDERS, say))
    columns = ("TTFT in time", "ITL in time", "both", "TTFT p95, s", "GPU-seconds", "most replicas", "failed")
    table = Table(Column("planner", no_wrap=True), *columns, box=None, pad_edge=False)
    for row in result["rows"]:
        shares = (f"{row[name]:.1%}" for name in ("ttft_attainment", "itl_attainment", "attainment"))
        numbers = (f"{row['ttft_s']['p95']:.2f}", f"{row['gpu_seconds']:.0f}", str(row["most_serving"]))
        table.add_row(row["planner"], *shares, *numbers, str(row["failed"]))
    console.print(table)
    if json_file is not None:
        write(json_file, json.dumps(result, indent=1) + "\n")
    if any(row["failed"] for row in result["rows"]):
        raise typer.Exit(1)


@app.command("restore")
def restore(
    context: typer.Context,
    engine: Annotated[
        Engine, typer.Option(help="torch: the reference engine of examples/, of any size. vllm: a model of your own.")
    ] = Engine.TORCH,
    gib: Annotated[str, typer.Option(metavar="N,N", help="torch: GiB of weights.")] = "16",
    model: Annotated[
        Path | None, typer.Option(metavar="FOLDER", help="vllm: configuration and weights in safetensors.")
    ] = None,
    case: Annotated[
        str | None, typer.Option(metavar="NAME", help="vllm: the model's name in the results; else the folder's.")
    ] = None,
    engine_argument: Annotated[
        list[str] | None,
        typer.Option(
            metavar="ARGUMENT", help="vllm: for examples/vllm_engine.py, as --engine-argument=--max-model-len=512."
        ),
    ] = None,
    env: EnvironmentOption = None,
    ways: Annotated[
        str | None,
        typer.Option(
            metavar="WAY,WAY",
            help="stock, hugepages, detached, prefetched, prefetched-small-pages, pinned; of a wake: parked, "
            "parked-pinned. Unless given the first four; with vllm, which keeps its weights out of its image in any "
            "case, detached and prefetched.",
        ),
    ] = None,
    repeats: Annotated[int, typer.Option(min=1, help="Restores of each size and way.")] = 30,
    stock_repeats: Annotated[int, typer.Option(min=1, help="The same, where the weights are in the image.")] = 10,
    cold_starts: Annotated[
        int, typer.Option(min=0, help="Cold starts to time before the one that is captured, in each series.")
    ] = 0,
    lanes: Annotated[int, typer.Option(min=1, help="Threads of the weight loader, at most.")] = 14,
    standby_houses: Annotated[int, typer.Option(min=0, help="As agent.standby_houses: houses made ahead.")] = 0,
    criu: Annotated[Path | None, typer.Option(help="The criu to use; else as agent.criu's default.")] = None,
    json_file: Annotated[Path | None, typer.Option("--json", metavar="FILE", help="Write all figures as JSON.")] = None,
    html: Annotated[Path | None, typer.Option(metavar="FILE", help="Write a page with the stages of each way.")] = None,
    read: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Measure nothing: sum up what an earlier --json wrote.")
    ] = None,
) -> None:
    """Restore a GPU worker again and again, from the order to its passed self-test, by the agent's own pipelines.

    Run as root on a machine with a GPU that does nothing else. With huge pages in a way, the host's setting is
    `always` meanwhile. Files are written after each series, with all of them so far. The exit status is 1 if any
    restore failed.
    """
    import json

    from dynamo_snapshot.cli.direct import assignments
    from dynamo_snapshot.cli.results import require_writable, write
    from dynamo_snapshot.config import Agent, Gpu
    from dynamo_snapshot.local.bench_gpu import Repeats
    from dynamo_snapshot.local.report.restore_page import render

    sizes, chosen = _sizes(gib), _ways(ways)
    if read is not None:
        _refuse_beside_read(context)
    require_writable(json_file, html, sources=[read] if read else [])

    def keep(result: dict[str, Any]) -> None:
        if json_file is not None:
            write(json_file, json.dumps(result, indent=1) + "\n")
        if html is not None:
            write(html, render(result))

    if read is not None:
        result = _read(read)
        keep(result)
    else:
        result = _measured(
            engine,
            sizes,
            (model, case, engine_argument or []),
            assignments(env),
            chosen,
            Repeats(repeats, stock_repeats, cold_starts),
            Agent(criu=criu, standby_houses=standby_houses, minimum_free_bytes=0, gpu=Gpu(loader_lanes=lanes)),
            keep,
        )
    if any(row["failures"] for row in result["rows"]):
        raise typer.Exit(1)


def _sizes(text: str) -> list[float]:
    """Reads --gib."""
    import math

    found = []
    for part in text.split(","):
        try:
            size = float(part)
        except ValueError:
            size = math.nan
        if not 0 < size < math.inf:
            raise typer.BadParameter(f"{part!r} is not a number of GiB above 0", param_hint="--gib")
        found.append(size)
    return found


def _ways(text: str | None) -> list[str] | None:
    """Reads --ways; None: none are given."""
    from dynamo_snapshot.local.bench_gpu import WAYS

    if text is None:
        return None
    found = [part.strip() for part in text.split(",")]
    if unknown := [repr(way) for way in found if way not in WAYS]:
        said = f"unknown: {', '.join(unknown)}; there are {', '.join(WAYS)}"
        raise typer.BadParameter(said, param_hint="--ways")
    return found


def _refuse_beside_read(context: typer.Context) -> None:
    """What says how to measure says nothing where nothing is measured."""
    given = [
        parameter.opts[0]
        for parameter in context.command.params
        if parameter.name not in ("read", "json_file", "html")
        and getattr(context.get_parameter_source(parameter.name or ""), "name", "") == "COMMANDLINE"
    ]
    if given:
        said = f"it measures nothing, so {', '.join(given)} would be of no effect: leave out one or the other"
        raise typer.BadParameter(said, param_hint="--read")


def _read(file: Path) -> dict[str, Any]:
    """Returns the result in ``file``, and prints what measuring it said at the end of each series."""
    from dynamo_snapshot.cli.results import result_in
    from dynamo_snapshot.errors import SnapshotError
    from dynamo_snapshot.local.bench_gpu import summary
    from dynamo_snapshot.local.report.restore_result import require_restores
    from dynamo_snapshot.model import Reason

    result = result_in(file, "rows", "environment")
    try:
        require_restores(result)
    except ValueError as error:
        raise SnapshotError(
            Reason.CONFIGURATION_INVALID,
            f"{file} is no result of `bench restore`: {error}",
            "Name a file that `dynamo-snapshot bench restore --json FILE` wrote.",
        ) from error
    for row in result["rows"]:
        typer.echo(summary(row))
    return result


def _measured(
    engine: Engine,
    sizes: list[float],
    model: tuple[Path | None, str | None, list[str]],
    environment: dict[str, str],
    ways: list[str] | None,
    repeats: Repeats,
    settings: Agent,
    keep: Callable[[dict[str, Any]], None],
) -> dict[str, Any]:
    import asyncio

    from dynamo_snapshot.local import bench_gpu as measure
    from dynamo_snapshot.local.bench_subjects import torch_subject, vllm_subject
    from dynamo_snapshot.local.preflight import require_root

    if engine is Engine.VLLM:
        wanted = ways or ["detached", "prefetched"]
        subjects = [vllm_subject(*model, environment)]
    else:
        wanted = ways or ["stock", "hugepages", "detached", "prefetched"]
        subjects = [torch_subject(size, environment) for size in sizes]
    require_root()

    def say(text: str) -> None:
        typer.echo(text, err=True)

    return asyncio.run(measure.restores(subjects, wanted, repeats, settings, say, keep))
