from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
from virtual_time import run_virtually

from dynamo_snapshot.agent.pipelines import phases
from dynamo_snapshot.agent.pipelines.capture import Capture
from dynamo_snapshot.agent.pipelines.cold_start import ColdStart
from dynamo_snapshot.agent.pipelines.parking import Park, Wake
from dynamo_snapshot.agent.pipelines.phases import PIPELINES, Limit, Limits, PhaseSpec
from dynamo_snapshot.agent.pipelines.prefetch import Prefetch
from dynamo_snapshot.agent.pipelines.restore import Restore
from dynamo_snapshot.config import PhaseDeadlines
from dynamo_snapshot.errors import SnapshotError
from dynamo_snapshot.model import Reason

STEPS = {
    phases.CAPTURE: Capture, phases.RESTORE: Restore, phases.COLD_START: ColdStart,
    phases.PARK: Park, phases.WAKE: Wake, phases.PREFETCH: Prefetch,
}  # fmt: skip
EVERY_PHASE = [(pipeline, spec.name) for pipeline, specs in PIPELINES.items() for spec in specs]
LIMITS = Limits(phases=PhaseDeadlines(), boot_timeout_s=600, order_s=10_000)


class Recorded:
    """Steps and undos of one pipeline that only write down their names; one phase may do something else."""

    def __init__(self, pipeline: str, phase: str = "", instead: Callable[[], Awaitable[None]] | None = None) -> None:
        self.calls: list[str] = []
        for spec in PIPELINES[pipeline]:
            setattr(self, spec.name, self._step(spec.name, instead if spec.name == phase else None))
            if spec.undo:
                setattr(self, spec.undo, self._step(spec.undo, None))

    def _step(self, name: str, instead: Callable[[], Awaitable[None]] | None) -> Callable[[], object]:
        async def step() -> None:
            self.calls.append(name)
            if instead is not None:
                await instead()

        return step

    async def commit(self, order_id: str, phase: str) -> None:
        self.calls.append(f"commit {phase}")


def carry_out(pipeline: str, steps: Recorded, limits: Limits = LIMITS, first: str | None = None) -> phases.Result:
    async def work() -> phases.Result:
        clock = asyncio.get_running_loop().time
        return await phases.run(
            pipeline, steps, order_id="o", limits=limits, commits=steps, clock=clock, first=first
        )  # fmt: skip

    return run_virtually(work())


def expected_undo(pipeline: str, until: str) -> list[str]:
    specs = PIPELINES[pipeline]
    begun = specs[: [spec.name for spec in specs].index(until) + 1]
    return [spec.undo for spec in reversed(begun) if spec.undo]


@pytest.mark.parametrize("pipeline", PIPELINES)
def test_every_phase_and_undo_is_a_method_of_its_pipeline(pipeline: str) -> None:
    for spec in PIPELINES[pipeline]:
        for name in filter(None, (spec.name, spec.undo)):
            assert asyncio.iscoroutinefunction(getattr(STEPS[pipeline], name))


@pytest.mark.parametrize("pipeline", PIPELINES)
def test_phases_run_in_order_and_a_commit_stands_before_its_phase(pipeline: str) -> None:
    steps = Recorded(pipeline)
    result = carry_out(pipeline, steps)
    assert [call for call in steps.calls if not call.startswith("commit")] == [s.name for s in PIPELINES[pipeline]]
    assert [phase.name for phase in result.phases] == [spec.name for spec in PIPELINES[pipeline]]
    for spec in PIPELINES[pipeline]:
        at = steps.calls.index(spec.name)
        assert (steps.calls[at - 1] == f"commit {spec.name}") == spec.commits
    assert result.error is None


@pytest.mark.parametrize(("pipeline", "phase"), EVERY_PHASE)
def test_a_failure_undoes_what_was_begun_in_reverse(pipeline: str, phase: str) -> None:
    async def fail() -> None:
        raise SnapshotError(Reason.DISK_FULL, "full")

    steps = Recorded(pipeline, phase, fail)
    result = carry_out(pipeline, steps)
    assert steps.calls[steps.calls.index(phase) + 1 :] == expected_undo(pipeline, phase)
    assert result.error is not None
    assert result.error.reason is Reason.DISK_FULL
    assert result.failed_phase == phase


@pytest.mark.parametrize(("pipeline", "phase"), EVERY_PHASE)
def test_a_phase_that_hangs_ends_at_its_deadline(pipeline: str, phase: str) -> None:
    steps = Recorded(pipeline, phase, lambda: asyncio.sleep(1e9))
    result = carry_out(pipeline, steps)
    spec = next(spec for spec in PIPELINES[pipeline] if spec.name == phase)
    assert result.error is not None
    assert result.error.reason is (Reason.DEADLINE_EXCEEDED if spec.limit is Limit.ORDER else Reason.PHASE_TIMED_OUT)
    assert result.phases[-1].seconds == pytest.approx(LIMITS.of(spec.limit))
    assert steps.calls[-len(expected_undo(pipeline, phase)) or len(steps.calls) :] == expected_undo(pipeline, phase)


@pytest.mark.parametrize(("pipeline", "phase"), EVERY_PHASE)
def test_the_orders_deadline_ends_every_phase(pipeline: str, phase: str) -> None:
    steps = Recorded(pipeline, phase, lambda: asyncio.sleep(1e9))
    result = carry_out(pipeline, steps, Limits(phases=PhaseDeadlines(), boot_timeout_s=600, order_s=2.5))
    assert result.error is not None
    assert result.error.reason is Reason.DEADLINE_EXCEEDED
    assert result.phases[-1].seconds == pytest.approx(2.5)


@pytest.mark.parametrize(("pipeline", "phase"), EVERY_PHASE)
def test_a_cancellation_undoes_to_the_end_even_when_repeated(pipeline: str, phase: str) -> None:
    async def work() -> tuple[phases.Result, Recorded]:
        steps = Recorded(pipeline, phase, lambda: asyncio.sleep(5))
        for spec in PIPELINES[pipeline]:
            if spec.undo:
                setattr(steps, spec.undo, _slow(steps, spec.undo))
        clock = asyncio.get_running_loop().time
        task = asyncio.create_task(
            phases.run(pipeline, steps, order_id="o", limits=LIMITS, commits=steps, clock=clock)
        )  # fmt: skip
        for after in (1.0, 0.5, 0.5):
            await asyncio.sleep(after)
            task.cancel()
        return await task, steps

    result, steps = run_virtually(work())
    assert result.cancelled
    undone = [call for call in steps.calls if call.startswith("undone ")]
    assert undone == [f"undone {name}" for name in expected_undo(pipeline, phase)]


def _slow(steps: Recorded, name: str) -> Callable[[], object]:
    async def undo() -> None:
        await asyncio.sleep(3)
        steps.calls.append(f"undone {name}")

    return undo


def test_an_undo_that_fails_hides_neither_the_cause_nor_the_other_undos() -> None:
    async def fail() -> None:
        raise SnapshotError(Reason.CRIU_RESTORE_FAILED, "no")

    steps = Recorded(phases.RESTORE, "restore", fail)

    async def broken() -> None:
        raise OSError("busy")

    steps.remove_house = broken  # type: ignore[attr-defined]  # one of the names that Recorded sets
    result = carry_out(phases.RESTORE, steps)
    assert result.error is not None
    assert result.error.reason is Reason.CRIU_RESTORE_FAILED
    assert steps.calls[-2:] == ["give_back", "leave_queue"]


def test_an_unexpected_error_is_an_internal_one_and_want_of_space_is_named() -> None:
    async def bug() -> None:
        raise ZeroDivisionError("division by zero")

    async def full() -> None:
        raise OSError(28, "No space left on device", "/store/x")

    result = carry_out(phases.RESTORE, Recorded(phases.RESTORE, "adopt", bug))
    assert result.error is not None
    assert result.error.reason is Reason.INTERNAL_ERROR
    assert "ZeroDivisionError" in result.error.message
    result = carry_out(phases.CAPTURE, Recorded(phases.CAPTURE, "keep_shm", full))
    assert result.error is not None
    assert result.error.reason is Reason.DISK_FULL


def test_a_resumed_pipeline_begins_late_and_undoes_all() -> None:
    async def fail() -> None:
        raise SnapshotError(Reason.WORKER_EXITED, "gone")

    steps = Recorded(phases.COLD_START, "resume", fail)
    result = carry_out(phases.COLD_START, steps, first="hold")
    assert steps.calls == ["hold", "resume", "remove_house", "give_back"]
    assert [phase.name for phase in result.phases] == ["hold", "resume"]


def test_time_that_no_phase_claims_is_unaccounted() -> None:
    ticks = iter(range(1000))

    async def work() -> phases.Result:
        steps = Recorded(phases.COLD_START)
        return await phases.run(
            phases.COLD_START, steps, order_id="o", limits=LIMITS, commits=steps, clock=lambda: float(next(ticks))
        )

    result = run_virtually(work())
    # A clock that moves by one at each look: one step inside each phase, one between any two.
    assert all(phase.seconds == 1 for phase in result.phases)
    assert result.unaccounted_s == len(PIPELINES[phases.COLD_START]) + 1


def test_names_are_unique_within_a_pipeline() -> None:
    for specs in PIPELINES.values():
        assert len({spec.name for spec in specs}) == len(specs)
        assert all(isinstance(spec, PhaseSpec) for spec in specs)


def test_the_documentation_has_every_pipeline_as_the_table_has_it() -> None:
    page = (Path(__file__).parents[2] / "docs" / "node-agent.md").read_text()
    for pipeline, specs in PIPELINES.items():
        assert f"| {pipeline} | {', '.join(spec.name for spec in specs)} |" in page
