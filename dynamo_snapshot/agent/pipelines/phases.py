"""Every phase of every pipeline, in one table: its deadline, what undoes it, whether it can be taken back.

:func:`run` walks one pipeline of the table. It times each phase, ends it at its deadline, undoes what was
begun in reverse order when one fails, and says how much wall time no phase claims. Tests generate their
kill points from the table, so a phase that is added without one fails.
"""

from __future__ import annotations

import asyncio
import errno
import os
import signal
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

import structlog

from dynamo_snapshot.config import PhaseDeadlines
from dynamo_snapshot.errors import SnapshotError
from dynamo_snapshot.model import Phase, Reason

log = structlog.get_logger()

CRASH_ENV = "DYNAMO_SNAPSHOT_CRASH_AT"
"""Fault drills only: ``<pipeline>.<phase>[+seconds]`` makes the agent kill itself in that phase."""
UNDO_S = 20.0
"""The longest that undoing one phase may take."""


class Share(StrEnum):
    """Whose time a phase is, for measurements of what this project itself adds."""

    OWN = "own"
    CRIU = "criu"
    DRIVER = "driver"
    """The CUDA driver's; nothing without a GPU."""
    ENGINE = "engine"
    VERIFY = "verify"
    WAIT = "wait"
    """For an order, a slot, a capture: nobody works."""


class Limit(StrEnum):
    """Where a phase's deadline comes from."""

    DEFAULT = "default_s"
    DUMP = "dump_s"
    RESTORE = "restore_s"
    DIGEST = "digest_s"
    BOOT = "boot_timeout_s"
    """Of the worker, not of the agent."""
    ORDER = "order"
    """The order's own deadline, which ends every phase."""


@dataclass(frozen=True)
class PhaseSpec:
    name: str
    """Also the pipeline's method that carries it out."""
    limit: Limit = Limit.DEFAULT
    undo: str | None = None
    """The pipeline's method that takes it back, complete or not; it may run though nothing was done yet."""
    commits: bool = False
    """Once begun it may have been seen by the worker: its intent is on disk before, and it is not repeated."""
    share: Share = Share.OWN


CAPTURE = "capture"
RESTORE = "restore"
COLD_START = "cold_start"
PARK = "park"
WAKE = "wake"
PREFETCH = "prefetch"

PIPELINES: dict[str, tuple[PhaseSpec, ...]] = {
    CAPTURE: (
        PhaseSpec("admit"),
        PhaseSpec("inspect", undo="release_source"),
        PhaseSpec("stage", undo="discard"),
        PhaseSpec("freeze", Limit.DUMP, undo="thaw_source", share=Share.DRIVER),
        PhaseSpec("dump", Limit.DUMP, undo="settle_source", share=Share.CRIU),
        PhaseSpec("thaw", Limit.RESTORE, share=Share.DRIVER),
        PhaseSpec("keep_shm"),
        PhaseSpec("drop_zeros", Limit.DIGEST),
        PhaseSpec("sync", Limit.DIGEST),
        PhaseSpec("release", commits=True),
        PhaseSpec("publish", Limit.DIGEST, share=Share.VERIFY),
    ),
    RESTORE: (
        PhaseSpec("queue", Limit.ORDER, undo="leave_queue", share=Share.WAIT),
        PhaseSpec("admit", undo="give_back"),
        PhaseSpec("load", undo="give_up_load"),
        PhaseSpec("house", undo="remove_house"),
        PhaseSpec("restore", Limit.RESTORE, share=Share.CRIU),
        PhaseSpec("adopt"),
        PhaseSpec("thaw", Limit.RESTORE, share=Share.DRIVER),
        PhaseSpec("release", commits=True),
        PhaseSpec("resume", Limit.RESTORE, share=Share.ENGINE),
    ),
    COLD_START: (
        PhaseSpec("admit", undo="give_back"),
        PhaseSpec("house", undo="remove_house"),
        PhaseSpec("start"),
        PhaseSpec("boot", Limit.BOOT, share=Share.ENGINE),
        PhaseSpec("hold", Limit.ORDER, share=Share.WAIT),
        PhaseSpec("resume", Limit.RESTORE, share=Share.ENGINE),
    ),
    PARK: (
        PhaseSpec("queue", Limit.ORDER, undo="leave_queue", share=Share.WAIT),
        PhaseSpec("admit", undo="give_back"),
        PhaseSpec("house", undo="remove_house"),
        PhaseSpec("restore", Limit.RESTORE, share=Share.CRIU),
        PhaseSpec("adopt"),
        PhaseSpec("thaw", Limit.RESTORE, share=Share.DRIVER),
        PhaseSpec("release", commits=True),
        PhaseSpec("settle", Limit.RESTORE, share=Share.ENGINE),
    ),
    WAKE: (
        PhaseSpec("admit", undo="stay_parked"),
        PhaseSpec("load", undo="give_up_load"),
        PhaseSpec("release", undo="remove_house", commits=True),
        PhaseSpec("resume", Limit.RESTORE, share=Share.ENGINE),
    ),
    PREFETCH: (
        PhaseSpec("queue", Limit.ORDER, undo="leave_queue", share=Share.WAIT),
        PhaseSpec("admit", undo="give_back"),
        PhaseSpec("read", Limit.ORDER, share=Share.VERIFY),
    ),
}


class CommitLog(Protocol):
    """Where the intent of a committing phase is kept."""

    async def commit(self, order_id: str, phase: str) -> None:
        """Returns once the intent is on disk."""


@dataclass(frozen=True)
class Result:
    """How one run of a pipeline ended."""

    phases: tuple[Phase, ...]
    unaccounted_s: float
    error: SnapshotError | None = None
    failed_phase: str | None = None
    cancelled: bool = False


@dataclass(frozen=True)
class Limits:
    """All that bounds one run, in seconds."""

    phases: PhaseDeadlines
    boot_timeout_s: float
    order_s: float
    """Left to the whole order when it begins."""

    def of(self, limit: Limit) -> float:
        if limit is Limit.ORDER:
            return self.order_s
        if limit is Limit.BOOT:
            return self.boot_timeout_s
        return float(getattr(self.phases, limit.value))


async def run(
    pipeline: str,
    steps: object,
    *,
    order_id: str,
    limits: Limits,
    commits: CommitLog,
    clock: Callable[[], float],
    first: str | None = None,
) -> Result:
    """Carries out ``pipeline`` by calling ``steps``' methods named like its phases.

    A failure or a cancellation is a value of the result, not an exception: what had been begun is undone by then.

    Args:
        clock: monotonic seconds.
        first: the phase to begin with, where an earlier agent got that far; those before it are undone all the same.
    """
    specs = PIPELINES[pipeline]
    begin = next((index for index, spec in enumerate(specs) if spec.name == first), 0)
    started = clock()
    phases: list[Phase] = []
    error: SnapshotError | None = None
    cancelled = False
    failed: PhaseSpec | None = None
    for spec in specs[begin:]:
        entered = clock()
        try:
            _crash_drill(pipeline, spec.name)
            if spec.commits:
                await commits.commit(order_id, spec.name)
            await _bounded(pipeline, spec, getattr(steps, spec.name), limits, limits.order_s - (entered - started))
        except asyncio.CancelledError:
            cancelled, failed = True, spec
        except SnapshotError as problem:
            error, failed = problem, spec
        except Exception as problem:
            error, failed = _unexpected(pipeline, spec, problem), spec
        finally:
            phases.append(Phase(name=spec.name, seconds=clock() - entered))
        if failed is not None:
            await _shielded(_undo(pipeline, specs[: specs.index(spec) + 1], steps, order_id))
            break
    total = clock() - started
    claimed = sum(phase.seconds for phase in phases)
    return Result(
        phases=tuple(phases),
        unaccounted_s=max(0.0, total - claimed),
        error=error,
        failed_phase=failed.name if failed else None,
        cancelled=cancelled,
    )


async def _bounded(
    pipeline: str, spec: PhaseSpec, step: Callable[[], Awaitable[None]], limits: Limits, order_left_s: float
) -> None:
    own = limits.of(spec.limit)
    try:
        async with asyncio.timeout(min(own, order_left_s)):
            await step()
    except TimeoutError as error:
        if order_left_s <= own:
            raise SnapshotError(
                Reason.DEADLINE_EXCEEDED, f"the order's deadline passed in phase {spec.name} of {pipeline}"
            ) from error
        raise SnapshotError(
            Reason.PHASE_TIMED_OUT,
            f"phase {spec.name} of {pipeline} did not end in {own:g} s and was ended",
            f"Raise {_field(spec.limit)} in fleet.yaml if it was only slow.",
        ) from error


def _field(limit: Limit) -> str:
    return "the worker's boot_timeout_s" if limit is Limit.BOOT else f"agent.deadlines.{limit.value}"


async def _undo(pipeline: str, begun: tuple[PhaseSpec, ...], steps: object, order_id: str) -> None:
    for spec in reversed(begun):
        if spec.undo is None:
            continue
        try:
            async with asyncio.timeout(UNDO_S):
                await getattr(steps, spec.undo)()
        except Exception as problem:
            # The order has failed already; what could not be undone must not hide why.
            log.error("undo_failed", pipeline=pipeline, undo=spec.undo, order=order_id, cause=str(problem))


async def _shielded(work: Awaitable[None]) -> None:
    """Awaits ``work`` to its end, whoever cancels meanwhile: half an undo is worse than a late one."""
    task = asyncio.ensure_future(work)
    while not task.done():
        try:
            await asyncio.shield(task)
        except asyncio.CancelledError:
            continue


def _unexpected(pipeline: str, spec: PhaseSpec, problem: Exception) -> SnapshotError:
    if isinstance(problem, OSError) and problem.errno in (errno.ENOSPC, errno.EDQUOT):
        error = SnapshotError(
            Reason.DISK_FULL, f"phase {spec.name} of {pipeline}: {problem}", "Free space there, or remove snapshots."
        )
    else:
        log.error("phase_failed_unexpectedly", pipeline=pipeline, phase=spec.name, exc_info=problem)
        error = SnapshotError(
            Reason.INTERNAL_ERROR, f"phase {spec.name} of {pipeline} failed: {type(problem).__name__}: {problem}"
        )
    error.__cause__ = problem
    return error


def _crash_drill(pipeline: str, phase: str) -> None:
    """Kills this agent here if a fault drill asks for it."""
    where, _, delay = os.environ.get(CRASH_ENV, "").partition("+")
    if where != f"{pipeline}.{phase}":
        return
    if delay:
        asyncio.get_running_loop().call_later(float(delay), os.kill, os.getpid(), signal.SIGKILL)
    else:
        os.kill(os.getpid(), signal.SIGKILL)
