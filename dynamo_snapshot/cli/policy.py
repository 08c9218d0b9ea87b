"""`dynamo-snapshot policy`: why a fleet is the size it is, which knob to take, and how ours does among others."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from dynamo_snapshot.cli.simulation_options import Changes, Jobs, Seeds, Traces, WhichHalf
from dynamo_snapshot.replay.comparison.halves import Half

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.console import Console

    from dynamo_snapshot.replay.comparison.rows import Row

app = typer.Typer(no_args_is_help=True)


@app.callback()
def policy() -> None:
    """Explain and verify the planner's decisions, tune its policy on a trace, compare it with others."""


LogFile = Annotated[
    Path,
    typer.Argument(
        metavar="DECISIONS.jsonl",
        help="The planner plugin's decision log; with `up`, decisions.jsonl in the runtime folder.",
    ),
]


@app.command("explain")
def explain(
    log_file: LogFile,
    at: Annotated[
        str | None,
        typer.Option(
            metavar="TIME",
            help="2026-11-30T15:20:18, 15:20:18, seconds since 1970, or -90: seconds before the last decision.",
        ),
    ] = None,
    pool: Annotated[str | None, typer.Option(metavar="ROLE", help="decode or prefill, if the log has both.")] = None,
    last: Annotated[int, typer.Option(min=0, help="How many changes before that moment to list.")] = 5,
) -> None:
    """Say in plain sentences why a pool was the size it was at a moment; without --at, at the last decision."""
    from dynamo_snapshot.cli.running import output
    from dynamo_snapshot.replay.decisions.log import moment, of_role, read_log
    from dynamo_snapshot.replay.decisions.sentences import changes, clock
    from dynamo_snapshot.replay.decisions.sentences import explain as sentences

    console = output()
    log = read_log(log_file)
    decisions = of_role(log.decisions, pool)
    when = moment(at, decisions)
    for sentence in sentences(decisions, when):
        console.print(sentence, markup=False)
    before = [change for change in changes(decisions) if change[0].at <= when][-last:] if last else []
    if before:
        console.print("\nChanges before that:", style="bold")
    for decision, size in before:
        console.print(f"  {clock(decision.at)}  {size} -> {decision.replicas}: {decision.reason}", markup=False)
    if log.unreadable:
        console.print(f"\n{log.unreadable} lines could not be read and were left out.", style="dim")


@app.command("verify")
def verify(log_file: LogFile) -> None:
    """Decide anew, from what the planner saw, and say whether its log holds just these decisions.

    Exit status 1 where one differs, a line is missing or is no entry of a decision log, or no run's beginning is in
    it. A last line that is half written, as while the planner is at work, is left out and told.
    """
    from dynamo_snapshot.cli.running import output
    from dynamo_snapshot.replay.decisions.anew import outcome
    from dynamo_snapshot.replay.decisions.anew import verify as decide_anew

    console = output()
    found = decide_anew(log_file)
    for sentence, good in outcome(found):
        console.print(sentence, markup=False, style=None if good else "yellow")
    if not found.holds:
        raise typer.Exit(1)


@app.command("tune")
def tune(
    traces: Traces = None,
    start: Annotated[
        str, typer.Option(metavar="MODEL", help="How long your replicas take to serve: restore-2s, cold-45s, …")
    ] = "restore-2s",
    knobs: Annotated[
        list[str] | None,
        typer.Option(
            "--knob", metavar="NAME=VALUE,VALUE", help="Values to try for a knob of the policy; may be repeated."
        ),
    ] = None,
    attainment: Annotated[
        float, typer.Option(min=0, max=100, help="Percent of the requests whose first token is to be in time.")
    ] = 99.0,
    gpu_hours: Annotated[
        # With an upper bound NaN is refused too.
        float | None,
        typer.Option(min=0, max=1e9, help="Or: the most GPU-hours that the trace may take."),
    ] = None,
    half: WhichHalf = Half.WHOLE,
    seeds: Seeds = 3,
    changes: Changes = None,
    jobs: Jobs = None,
) -> None:
    """Try the settings of the planner's policy on a trace and recommend one.

    Without --knob, miss_cost_s is swept: what a request outside its objective is worth, in GPU-seconds. Fleets of
    constant size are simulated beside it.
    """
    from dynamo_snapshot.cli.replay import print_scene
    from dynamo_snapshot.cli.running import note_engines, output, simulated
    from dynamo_snapshot.replay.comparison.advice import Wish, advise
    from dynamo_snapshot.replay.comparison.fit import require_fit
    from dynamo_snapshot.replay.comparison.frontier import frontier
    from dynamo_snapshot.replay.comparison.matrix import swept
    from dynamo_snapshot.replay.comparison.rows import OURS, scenes
    from dynamo_snapshot.replay.comparison.runs import runs
    from dynamo_snapshot.replay.comparison.settings import changed, combinations, setting_of
    from dynamo_snapshot.replay.comparison.sources import named_sources, require
    from dynamo_snapshot.replay.comparison.verdict import points

    console = output()
    sources = named_sources(traces or ())
    require(sources, half)
    settings = {source.name: changed(setting_of(source), changes or ()) for source in sources}
    require_fit(sources, half, settings)
    note_engines(console, settings)
    ours = combinations(OURS, knobs) if knobs else swept(OURS)
    sizes = sorted({setting.bounded(size) for setting in settings.values() for size in range(1, 65)})
    planned = runs(sources, half, [*ours, *(f"static({size})" for size in sizes)], [start], seeds, settings)
    rows = [lane.row for lane in simulated(console, planned, jobs)]
    wish = Wish(attainment / 100, gpu_hours)
    for scene, members in scenes(rows).items():
        there = points(members)
        print_scene(console, str(scene), [*frontier(point for point in there if point.policy == OURS)])
        advice = advise(there, wish, settings[scene.trace].ttft_objective_s)
        console.print(advice.sentence, style="bold")
        console.print()


@app.command("bench")
def bench(
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="Where the published traces lie.")],
    half: Annotated[Half, typer.Option(help="Which half of each trace; the second is for knobs that are final.")] = (
        Half.FIRST
    ),
    seeds: Seeds = 5,
    traces: Annotated[
        list[str] | None, typer.Option("--trace", metavar="NAME", help="Only this trace; may be repeated.")
    ] = None,
    policies: Annotated[
        list[str] | None, typer.Option("--policy", metavar="NAME", help="Only this policy; may be repeated.")
    ] = None,
    json_file: Annotated[Path, typer.Option("--json", metavar="FILE", help="The table; its rows are kept.")] = (
        Path("policy.json")
    ),
    plot: Annotated[Path | None, typer.Option(metavar="FILE", help="Write the frontiers as SVG.")] = None,
    again: Annotated[bool, typer.Option("--again", help="Run anew what the table holds already.")] = False,
    jobs: Jobs = None,
) -> None:
    """Run every policy with every setting of its sweep on the published traces, and say who beats whom.

    What is done is saved as it goes: after Ctrl-C or SIGTERM the same command goes on where it was.
    """
    from dynamo_snapshot.cli.results import require_writable
    from dynamo_snapshot.cli.running import ending, output, shown, usable_processors
    from dynamo_snapshot.local.host import environment
    from dynamo_snapshot.replay.comparison.bench import Bench
    from dynamo_snapshot.replay.comparison.fit import require_fit
    from dynamo_snapshot.replay.comparison.matrix import Matrix
    from dynamo_snapshot.replay.comparison.overview_plot import overview
    from dynamo_snapshot.replay.comparison.settings import setting_of
    from dynamo_snapshot.replay.comparison.sources import require, study_sources
    from dynamo_snapshot.replay.comparison.store import held
    from dynamo_snapshot.replay.policies import catalog

    console = output()
    sources = study_sources(folder, traces)
    require_writable(plot, sources=(json_file,))
    with held(json_file):
        require(sources, half)
        settings = {source.name: setting_of(source) for source in sources}
        require_fit(sources, half, settings)
        matrix = Matrix(sources, half, policies or catalog.names(), seeds, settings)
        run = Bench(matrix, json_file, again=again, environment=environment())
        if run.dropped:
            console.print(f"{run.dropped} rows were made with other settings and are run anew", style="yellow")
        if run.stale:
            console.print(f"{run.stale} rows were made by other code; --again runs them anew", style="yellow")
        with ending(console, f"{json_file} holds what is done"), shown(console) as tell:
            run.run(jobs or usable_processors(), tell)
    rows = [row for row in run.rows if row.half == half]
    if plot is not None:
        plot.write_text(overview(rows, f"Scaling policies, {half} halves"), encoding="utf-8")
    _print_verdicts(console, rows)


def _print_verdicts(console: Console, rows: Sequence[Row]) -> None:
    from dynamo_snapshot.replay.comparison.verdict import unbeaten, verdicts
    from dynamo_snapshot.replay.comparison.wording import scene_sentence, verdict_sentence

    found = verdicts(rows)
    counts = unbeaten(found)
    for scene in counts:
        console.print(scene_sentence(scene, counts), style="bold")
        for verdict in found:
            if verdict.scene == scene:
                mark, style = ("✓", "green") if verdict.stands else ("✗", "red")
                mark, style = (mark, style) if verdict.rivals else ("-", "dim")
                console.print(f"  {mark} {verdict_sentence(verdict)}", style=style)
