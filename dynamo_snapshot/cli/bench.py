"""`dynamo-snapshot bench`: what this project itself adds, measured on this machine."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dynamo_snapshot.cli.direct import EnvironmentOption

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

    from dynamo_snapshot.cli.results import require_writable
    from dynamo_snapshot.local import bench as measure

    require_writable(json_file)
    console = Console()

    def say(text: str) -> None:
        console.print(text, style="dim", highlight=False)

    result = asyncio.run(measure.control_path(repeats, say))
    if json_file is not None:
        json_file.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    columns = ("p50", "p95", "p99", "p99 when idle, at most", "count")
    table = Table(Column("ms", no_wrap=True), *columns, box=None, pad_edge=False)
    for name, bound in measure.BOUNDS_MS.items():
        row = result[name]
        table.add_row(name, *(str(row[share]) for share in ("p50", "p95", "p99")), f"{bound:g}", str(row["count"]))
    console.print(table)
    failures = result["failures"]
    if failures["decisions"] or failures["restores"]:
        for text in failures["texts"]:
            console.print(f"failed: {text}", style="bold red", highlight=False)
        raise typer.Exit(1)


@app.command("planner")
def planner(
    json_file: Annotated[Path | None, typer.Option("--json", metavar="FILE", help="Write all figures as JSON.")] = None,
    trace: Annotated[Path | None, typer.Option(help="Another trace; else the demo's.")] = None,
    speed: Annotated[float, typer.Option(min=0.01, help="How many times as fast as it was recorded.")] = 2.0,
    ttft: Annotated[float, typer.Option(min=0.001, help="Objective: seconds to the first token.")] = 1.0,
    itl: Annotated[float, typer.Option(min=0.001, help="Objective: seconds between tokens.")] = 0.1,
) -> None:
    """Replay one load through one fleet, sized by this project's policy and by Dynamo's own load scaling.

    Each planner has a fleet of its own, one after the other, for as long as the load takes and half a minute more.
    The exit status is 1 if any request failed.
    """
    import asyncio
    import json

    from rich.console import Console
    from rich.table import Column, Table

    from dynamo_snapshot.cli.results import require_writable
    from dynamo_snapshot.local import bench_planner as measure
    from dynamo_snapshot.local.demo_fleet import DemoOptions

    require_writable(json_file)
    console = Console()

    def say(text: str) -> None:
        console.print(text, style="dim", highlight=False)

    objectives = measure.Objectives(ttft, itl)
    result = asyncio.run(measure.compare(DemoOptions(trace, speed), objectives, measure.CONTENDERS, say))
    if json_file is not None:
        json_file.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    columns = ("TTFT in time", "ITL in time", "both", "TTFT p95, s", "GPU-seconds", "most replicas", "failed")
    table = Table(Column("planner", no_wrap=True), *columns, box=None, pad_edge=False)
    for row in result["rows"]:
        shares = (f"{row[name]:.1%}" for name in ("ttft_attainment", "itl_attainment", "attainment"))
        numbers = (f"{row['ttft_s']['p95']:.2f}", f"{row['gpu_seconds']:.0f}", str(row["most_serving"]))
        table.add_row(row["planner"], *shares, *numbers, str(row["failed"]))
    console.print(table)
    if any(row["failed"] for row in result["rows"]):
        raise typer.Exit(1)


@app.command("restore")
def restore(
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
        Path | None, typer.Option(metavar="FILE", help="Measure nothing: take what an earlier --json wrote.")
    ] = None,
) -> None:
    """Restore a GPU worker again and again, from the order to its passed self-test, by the agent's own pipelines.

    Run as root on a machine with a GPU that does nothing else. With huge pages in a way, the host's setting is
    `always` meanwhile. Files are written after each series, with all of them so far. The exit status is 1 if any
    restore failed.
    """
    import json

    from dynamo_snapshot.cli.direct import assignments
    from dynamo_snapshot.cli.results import require_writable, result_in
    from dynamo_snapshot.config import Agent, Gpu
    from dynamo_snapshot.local.bench_gpu import Repeats
    from dynamo_snapshot.local.report.restore_page import render

    require_writable(json_file, html)

    def keep(result: dict[str, Any]) -> None:
        if json_file is not None:
            json_file.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
        if html is not None:
            html.write_text(render(result), encoding="utf-8")

    if read is not None:
        result = result_in(read, "rows", "environment")
        keep(result)
    else:
        result = _measured(
            engine,
            gib,
            (model, case, engine_argument or []),
            assignments(env),
            ways,
            Repeats(repeats, stock_repeats, cold_starts),
            Agent(criu=criu, standby_houses=standby_houses, minimum_free_bytes=0, gpu=Gpu(loader_lanes=lanes)),
            keep,
        )
    if any(row["failures"] for row in result["rows"]):
        raise typer.Exit(1)


def _measured(
    engine: Engine,
    gib: str,
    model: tuple[Path | None, str | None, list[str]],
    environment: dict[str, str],
    ways: str | None,
    repeats: Repeats,
    settings: Agent,
    keep: Callable[[dict[str, Any]], None],
) -> dict[str, Any]:
    import asyncio

    from dynamo_snapshot.local import bench_gpu as measure
    from dynamo_snapshot.local.bench_subjects import torch_subject, vllm_subject

    if engine is Engine.VLLM:
        wanted = (ways or "detached,prefetched").split(",")
        subjects = [vllm_subject(*model, environment)]
    else:
        wanted = (ways or "stock,hugepages,detached,prefetched").split(",")
        subjects = [torch_subject(float(size), environment) for size in gib.split(",")]
    if unknown := set(wanted) - set(measure.WAYS):
        raise typer.BadParameter(f"unknown: {', '.join(sorted(unknown))}; there are {', '.join(measure.WAYS)}")

    def say(text: str) -> None:
        typer.echo(text, err=True)

    return asyncio.run(measure.restores(subjects, wanted, repeats, settings, say, keep))
