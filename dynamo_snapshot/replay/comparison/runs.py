"""One run: a policy against a half of a trace, in a process of its own or in this one."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence

import msgspec

from dynamo_snapshot.errors import SnapshotError
from dynamo_snapshot.model import Reason
from dynamo_snapshot.replay.comparison.halves import Half
from dynamo_snapshot.replay.comparison.lanes import Lane, Size
from dynamo_snapshot.replay.comparison.marks import STATIC
from dynamo_snapshot.replay.comparison.rows import CEILING, OURS, Key, Row, Start, family, spec_of
from dynamo_snapshot.replay.comparison.sources import Source, part
from dynamo_snapshot.replay.policies import catalog
from dynamo_snapshot.replay.policies.engine_facts import Traffic
from dynamo_snapshot.replay.simulation.outcome import Outcome
from dynamo_snapshot.replay.simulation.run import simulate
from dynamo_snapshot.replay.simulation.setting import Setting
from dynamo_snapshot.replay.simulation.signals import Policy
from dynamo_snapshot.replay.simulation.startup import StartupModel, startup_model

NO_START = "none"
MOST_PLANNED = 128
"""Sizes among which the ceiling can choose: it keeps its choices in a byte each."""
INTERVALS_S = 0.01, 1e6
"""The shortest and the longest between two decisions; with others a run would take for ever."""


class Run(msgspec.Struct, frozen=True, kw_only=True):
    source: Source
    half: Half
    policy: str
    """As the catalog names it."""
    startup: str
    seed: int
    setting: Setting

    @property
    def key(self) -> Key:
        """The key of the rows that this run gives."""
        policy, knob = family(self.policy)
        return Key(self.source.name, self.half, spec_of(policy, knob), self.startup, self.seed)


def runs(
    sources: Iterable[Source],
    half: Half,
    policies: Iterable[str],
    startups: Iterable[str],
    seeds: int,
    settings: Mapping[str, Setting],
) -> tuple[Run, ...]:
    """Every policy with every start-up model on every trace, seeds from 0.

    Where no dice are thrown, there is one seed; where no replica is ever started, one start-up model.

    Args:
        settings: by the name of the trace.

    Raises:
        SnapshotError: ``configuration_invalid``, before anything is simulated.
    """
    models = [known_startup(spec) for spec in startups]
    found: dict[Run, None] = {}
    for source in sources:
        for spec in policies:
            name = _name(spec, settings[source.name])
            for model in (None,) if never_starts(name) else models:
                for seed in range(seeds if model and (model.spread or model.failures) else 1):
                    run = Run(
                        source=source,
                        half=half,
                        policy=name,
                        startup=model.name if model else NO_START,
                        seed=seed,
                        setting=settings[source.name],
                    )
                    found[run] = None
    return tuple(found)


def _name(spec: str, setting: Setting) -> str:
    """The catalog's name of a policy; ours keeps what was said, so that each row tells the knob's value."""
    policy = catalog.build(spec, setting)
    _require_sound(policy, setting)
    name = policy.name
    return "".join(spec.split()) if family(name)[0] == OURS else name


def _require_sound(policy: Policy, setting: Setting) -> None:
    """Refuses what the catalog takes and no run would give a true row of."""
    kind, knob = family(policy.name)
    bounds = f"{setting.min_replicas} to {setting.max_replicas} replicas"
    shortest, longest = INTERVALS_S
    if not shortest <= policy.interval_s <= longest:
        raise SnapshotError(
            Reason.CONFIGURATION_INVALID,
            f"policy {policy.name}: it would decide every {policy.interval_s:g} s",
            f"Let it decide every {shortest:g} to {longest:.0f} s.",
        )
    if kind == CEILING and setting.max_replicas - setting.min_replicas >= MOST_PLANNED:
        raise SnapshotError(
            Reason.CONFIGURATION_INVALID,
            f"policy {CEILING} plans with {MOST_PLANNED} sizes at most, not with {bounds}",
            "Bring max_replicas and min_replicas closer, or name the other policies with --policy.",
        )
    if kind == STATIC and knob and setting.bounded(int(knob)) != int(knob):
        raise SnapshotError(
            Reason.CONFIGURATION_INVALID,
            f"policy {policy.name}: the setting has {bounds}",
            "Name a size within these bounds, or change them with --setting.",
        )


def never_starts(policy: str) -> bool:
    """Whether replicas of this policy are there from the beginning to the end."""
    return family(policy)[0] == STATIC


def known_startup(spec: str) -> StartupModel:
    """Raises ``configuration_invalid`` for a start-up model that cannot be read."""
    try:
        return startup_model(spec)
    except ValueError as error:
        raise SnapshotError(Reason.CONFIGURATION_INVALID, str(error), "For example --start restore-2s.") from error


def perform(run: Run) -> Lane:
    """Simulates ``run``: its row, and the pool's sizes over time.

    Raises:
        SnapshotError: ``configuration_invalid`` where memory does not suffice.
    """
    half = part(run.source, run.half)
    model = startup_model("cold(0)" if run.startup == NO_START else run.startup)
    began = time.perf_counter()
    try:
        outcome = simulate(
            half.played,
            policy_of(run),
            run.setting,
            model,
            seed=run.seed,
            duration_s=half.begin_s + half.duration_s,
            measured_from_s=half.begin_s,
        )
    except MemoryError as error:
        raise SnapshotError(
            Reason.CONFIGURATION_INVALID,
            f"{run.source.name}: memory ran out while {run.policy} was simulated, with at most "
            f"{run.setting.max_replicas} replicas",
            "Take fewer processes (--jobs 1), a lower max_replicas or a shorter trace, or name other policies.",
        ) from error
    return Lane(_row(run, model, outcome, time.perf_counter() - began), _sizes(outcome, half.begin_s))


def perform_all(runs: Sequence[Run]) -> tuple[Lane, ...]:
    """Simulates ``runs`` one after the other: what is worked out for one is there for the next."""
    return tuple(perform(run) for run in runs)


def policy_of(run: Run) -> Policy:
    """A fresh policy; what it may know of the traffic is never of a second half."""
    half = Half.FIRST if run.half is Half.SECOND else run.half
    return catalog.build(run.policy, run.setting, Traffic.of(part(run.source, half).requests))


def _row(run: Run, model: StartupModel, outcome: Outcome, wall_s: float) -> Row:
    policy, knob = family(run.policy)
    starts = run.startup != NO_START
    restores = starts and model.restore_s is not None
    return Row(
        trace=run.source.name,
        half=run.half,
        policy=policy,
        knob=knob,
        start=Start.RESTORE if restores else Start.COLD if starts else Start.NONE,
        startup=run.startup,
        restore_s=model.restore_s if restores else None,
        cold_s=model.cold_s if starts and (model.failures or not restores) else None,
        seed=run.seed,
        requests=outcome.requests,
        ttft_attainment=outcome.ttft_attainment,
        itl_attainment=outcome.itl_attainment,
        both_attainment=outcome.attainment,
        ttft_p50_s=outcome.ttft_p50,
        ttft_p95_s=outcome.ttft_p95,
        ttft_p99_s=outcome.ttft_p99,
        gpu_hours=outcome.gpu_hours,
        scalings=outcome.scalings,
        wall_s=wall_s,
    )


def _sizes(outcome: Outcome, begin_s: float) -> tuple[Size, ...]:
    return tuple(Size(entry.at_s - begin_s, entry.ready, entry.starting) for entry in outcome.replicas)
