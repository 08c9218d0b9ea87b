"""`dynamo-snapshot replay`: what scaling policies would have made of a trace, side by side."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dynamo_snapshot.cli.simulation_options import Changes, Jobs, Seeds, Traces, WhichHalf
from dynamo_snapshot.replay.comparison.halves import Half

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.console import Console

    from dynamo_snapshot.replay.comparison.lanes import Lane
    from dynamo_snapshot.replay.comparison.rows import Row
    from dynamo_snapshot.replay.comparison.runs import Run
    from dynamo_snapshot.replay.comparison.verdict import Point

DEFAULT_STARTS = ("restore-2s", "cold-45s")
LEAST_NAME = 12
FIGURES = 92
"""Columns that a table takes beside the policies' names, so that no figure is broken."""


def replay(
    traces: Traces = None,
    policies: Annotated[
        list[str] | None,
        typer.Option(
            "--policy",
            metavar="NAME(KNOB=VALUE)",
            help="A policy, such as 'knative-kpa(target=8)'; may be repeated. Without any, all with their defaults.",
        ),
    ] = None,
    starts: Annotated[
        list[str] | None,
        typer.Option(
            "--start",
            metavar="MODEL",
            help="How long replicas take to serve: restore-2s, cold-45s, 'restore(2,cold=45,failures=0.02)'; "
            "may be repeated. Without any, restore-2s and cold-45s.",
        ),
    ] = None,
    half: WhichHalf = Half.WHOLE,
    seeds: Seeds = 3,
    changes: Changes = None,
    json_file: Annotated[Path | None, typer.Option("--json", metavar="FILE", help="Write all figures as JSON.")] = None,
    html_file: Annotated[Path | None, typer.Option("--html", metavar="FILE", help="Write a page with plots.")] = None,
    jobs: Jobs = None,
) -> None:
    """Simulate scaling policies on request traces and compare what they keep and what they cost.

    Traces are read as Azure's CSV, Mooncake's and Dynamo's JSONL and BurstGPT's CSV, gzipped or not. The engine
    is Dynamo's mocker's timing model; nothing is started on this machine. Policies: snapshot (ours), static(N),
    dynamo-load, dynamo-throughput, knative-kpa, hpa, hpa-gpu, keda, ray-serve, llm-d, and clairvoyant, which
    knows the future and shows what is possible at most.
    """
    from dynamo_snapshot.cli.results import require_writable
    from dynamo_snapshot.cli.running import note_engines, output, simulated
    from dynamo_snapshot.replay.comparison.fit import require_fit
    from dynamo_snapshot.replay.comparison.runs import runs
    from dynamo_snapshot.replay.comparison.settings import changed, setting_of
    from dynamo_snapshot.replay.comparison.sources import named_sources, require
    from dynamo_snapshot.replay.policies import catalog

    require_writable(json_file, html_file, sources=traces or ())
    console = output()
    sources = named_sources(traces or ())
    require(sources, half)
    settings = {source.name: changed(setting_of(source), changes or ()) for source in sources}
    require_fit(sources, half, settings)
    note_engines(console, settings)
    with console.status("reading policies"):
        planned = runs(sources, half, policies or catalog.names(), starts or DEFAULT_STARTS, seeds, settings)
    lanes = simulated(console, planned, jobs)
    rank = {run.key: index for index, run in enumerate(planned)}
    lanes.sort(key=lambda lane: rank[lane.row.key])
    print_scenes(console, [lane.row for lane in lanes])
    about = _about(settings)
    if json_file is not None:
        _write_json(json_file, lanes, about)
    if html_file is not None:
        html_file.write_text(_page(planned, lanes, about), encoding="utf-8")


def print_scenes(console: Console, rows: Sequence[Row]) -> None:
    """A table a scene, and what our settings came to in it."""
    from dynamo_snapshot.replay.comparison.rows import scenes
    from dynamo_snapshot.replay.comparison.table import ordered
    from dynamo_snapshot.replay.comparison.verdict import verdicts
    from dynamo_snapshot.replay.comparison.wording import verdict_sentence

    for scene, members in scenes(rows).items():
        print_scene(console, str(scene), ordered(members))
        for verdict in verdicts(members):
            style = ("green" if verdict.stands else "yellow") if verdict.rivals else None
            console.print(verdict_sentence(verdict), style=style)
        console.print()


def print_scene(console: Console, title: str, points: Sequence[Point]) -> None:
    """One table, a line a point."""
    from rich.table import Column, Table

    from dynamo_snapshot.replay.comparison.rows import OURS
    from dynamo_snapshot.replay.comparison.table import HEADER, cells

    # Folded where the terminal is narrow: a policy's name that is cut tells nothing.
    longest = max([len(HEADER[0]), *(len(point.name) for point in points)])
    name_width = min(longest, max(LEAST_NAME, console.width - FIGURES))
    columns = [Column(HEADER[0], width=name_width, overflow="fold"), Column(HEADER[1], no_wrap=True)]
    columns += [Column(name, justify="right", overflow="fold") for name in HEADER[2:]]
    table = Table(*columns, title=title, title_justify="left", box=None, pad_edge=False, collapse_padding=True)
    for point in points:
        table.add_row(*cells(point), style="bold" if point.policy == OURS else None)
    console.print(table)


def _about(settings: dict[str, Any]) -> dict[str, Any]:
    import msgspec

    from dynamo_snapshot.local.host import environment

    return {"settings": msgspec.to_builtins(settings), "environment": environment()}


def _write_json(file: Path, lanes: Sequence[Lane], about: dict[str, Any]) -> None:
    import json

    import msgspec

    rows = [
        {**msgspec.to_builtins(lane.row), "replicas": [[size.at, size.ready, size.starting] for size in lane.sizes]}
        for lane in lanes
    ]
    file.write_text(json.dumps({**about, "rows": rows}, indent=1) + "\n", encoding="utf-8")


def _page(planned: Sequence[Run], lanes: Sequence[Lane], about: dict[str, Any]) -> str:
    from dynamo_snapshot.replay.comparison.page import render
    from dynamo_snapshot.replay.comparison.sources import part

    parts = {(run.source.name, str(run.half)): part(run.source, run.half) for run in planned}
    arrivals = {where: [request.offset_s for request in found.requests] for where, found in parts.items()}
    durations = {where: found.duration_s for where, found in parts.items()}
    first_seeds = [lane for lane in lanes if lane.row.seed == 0]
    return render([lane.row for lane in lanes], first_seeds, arrivals, durations, about)
