"""The hooks of one worker: its walk from boot to registration, and out again.

Every way in (``serve``, the mocker's adapter, ``run --``) drives the same object, so the order of the
steps is written once, here: restored, identity, resume, self-test, and only then registration.
"""

from __future__ import annotations

import argparse
import asyncio
import atexit
import contextlib
import gc
import inspect
import logging
import os
import random
import signal
import sys
import traceback
from collections.abc import Awaitable, Callable, Mapping
from typing import NoReturn

from worker_hooks import guard, identity, shm_names
from worker_hooks.control import (
    INCARNATION_ENV,
    WAKE,
    ControlDirectory,
    Release,
    WorkerState,
    capture_directory,
    control_directory,
)
from worker_hooks.lifecycle import FINAL, Event, Lifecycle, State
from worker_hooks.reasons import HookError, HookReason

logger = logging.getLogger(__name__)

Step = Callable[[], Awaitable[object] | object]
"""A step of an engine, a plain function or an async one."""

CHILD_TIMEOUT_S = 5.0


class Hooks:
    """What a worker calls on its way; see the module's text for the order.

    Args:
        control: where to report, and where to wait; None: nobody watches this worker.
        capture_wanted: the worker is to become ready-for-snapshot before it registers.
        incarnation: its name, where it was given one.
    """

    def __init__(self, control: ControlDirectory | None, *, capture_wanted: bool, incarnation: str | None) -> None:
        self.control = control
        self.capture_wanted = capture_wanted and control is not None
        if control is not None:
            control.prepare()
        self._pid = os.getpid()
        self.lifecycle = Lifecycle(self._report, pid=self._pid, incarnation=incarnation)

    @classmethod
    def from_environment(cls, environ: Mapping[str, str] = os.environ) -> Hooks:
        """As the agent's, or NVIDIA Snapshot's, variables say. Takes SIGTERM until :mod:`gate` does."""
        hooks = cls(
            control_directory(environ),
            capture_wanted=capture_directory(environ) is not None,
            incarnation=environ.get(INCARNATION_ENV),
        )
        # Nothing is in flight before registration: a SIGTERM there ends the worker at once, in order.
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, hooks._stopped_early)
        return hooks

    def __repr__(self) -> str:
        return f"Hooks({self.lifecycle!r}, {self.control!r})"

    def booted(self) -> None:
        self.lifecycle.fire(Event.BOOTED)

    async def snapshot_point(self, quiesce: Step, resume: Step) -> None:
        """Becomes ready-for-snapshot and waits there, if a capture is wanted; returns resumed, as whom it is released.

        An incarnation that is to be parked waits once more, with its identity and before it resumes. A worker that
        cannot be captured goes on as a cold start: ``capture_refused`` in its evidence tells why.

        Raises:
            HookError: quiesce, identity or resume failed.
            SystemExit: the capture is done and, by NVIDIA Snapshot's contract, this process with it.
        """
        if not self.capture_wanted or self.control is None:
            return
        if await self.await_release(self.control, quiesce):
            self.lifecycle.fire(Event.RESUME)
        await self.step(HookReason.RESUME_FAILED, resume)

    async def await_release(self, control: ControlDirectory, quiesce: Step) -> bool:
        """Quiesces, waits, applies the identity, and parks where it is told to.

        True: a new incarnation, not resumed yet; False: the same one.
        """
        self.lifecycle.fire(Event.QUIESCE)
        try:
            await self.step(HookReason.QUIESCE_FAILED, quiesce)
        except HookError as error:
            if error.reason is not HookReason.PAUSE_UNSUPPORTED:
                raise
            return self._refused(error.reason, f"{error.reason}: {error.message}")
        shm_names.put_back(self._pid)
        findings = guard.scan(os.getpid())
        if findings:
            refusal = f"{findings[0].reason}: " + "; ".join(map(str, findings))
            return self._refused(findings[0].reason, refusal)
        # What lives now is not looked at by the collector again: fewer pages of clones become their own.
        gc.collect()
        gc.freeze()
        self.lifecycle.fire(Event.QUIESCED)
        try:
            control.write_ready()
        except OSError as error:  # a full disk: nobody will capture this worker, and it can serve without
            logger.error("not ready for a snapshot, going on without: %s", error)
            self.lifecycle.evidence["capture_refused"] = f"{control.path} cannot be written: {error}"
            self.lifecycle.fire(Event.RELEASED)
            return False
        release = await control.wait_release()
        control.remove_ready()
        if release.captured:
            self.stop()
        if release.incarnation is not None and release.incarnation == self.lifecycle.incarnation:
            self.lifecycle.fire(Event.RELEASED)
            return False
        self.lifecycle.fire(Event.RESTORED)
        parks = self._adopt(control, release)
        self.lifecycle.fire(Event.IDENTITY_APPLIED)
        if parks:
            await self._park(control)
        return True

    def _refused(self, reason: str, refusal: str) -> bool:
        """The worker cannot be captured: it goes on as the cold start it is."""
        logger.error("not ready for a snapshot, going on without: %s", refusal)
        self.lifecycle.evidence["capture_refused"] = refusal
        self.lifecycle.fire(Event.REFUSED, reason=reason, message=refusal)
        return False

    async def _park(self, control: ControlDirectory) -> None:
        """Waits until this incarnation is woken; SIGTERM ends it meanwhile, as it serves nobody."""
        self.lifecycle.fire(Event.PARK)
        woken = await control.wait_woken()
        if woken.incarnation is not None and woken.incarnation != self.lifecycle.incarnation:
            raise HookError(
                HookReason.INCARNATION_MISMATCH,
                f"{control.path}: {WAKE} names {woken.incarnation}, this is {self.lifecycle.incarnation}",
            )

    async def self_test(self, test: Step) -> None:
        """Runs ``test``, which raises where the engine does not answer as it should, and stamps its passing."""
        self.lifecycle.fire(Event.SELF_TEST)
        self.lifecycle.evidence.setdefault("first_random", repr(random.random()))
        await self.step(HookReason.SELF_TEST_FAILED, test)
        self.lifecycle.passed_self_test()

    def registered(self) -> None:
        self.lifecycle.fire(Event.REGISTERED)

    async def step(self, reason: HookReason, step: Step) -> None:
        """Runs one step of the engine; whatever it raises becomes a :class:`HookError` with ``reason``."""
        try:
            result = step()
            if inspect.isawaitable(result):
                await result
        except HookError:
            raise
        except Exception as error:
            raise HookError(reason, f"{type(error).__name__}: {error}") from error

    def failed(self, error: HookError) -> None:
        if self.lifecycle.state not in FINAL:
            self.lifecycle.fire(Event.FAIL, reason=error.reason, message=error.message)

    def stop(self) -> NoReturn:
        """Ends the worker in order."""
        self.lifecycle.fire(Event.STOP)
        raise SystemExit(0)

    def _stopped_early(self, number: int, frame: object) -> None:
        if os.getpid() != self._pid:  # a forked child has this handler too, but is not the worker
            signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(number)
            return
        if self.lifecycle.state in FINAL:
            raise SystemExit(0)
        self.stop()

    def _adopt(self, control: ControlDirectory, release: Release) -> bool:
        """Takes the new identity over; returns whether to park with it."""
        context = identity.read_context(control, release)
        identity.apply_environment(context)
        identity.reseed()
        self.lifecycle.incarnation = context.incarnation
        self.lifecycle.evidence["first_random"] = repr(random.random())
        identity.hand_on(context, CHILD_TIMEOUT_S)
        return context.park

    def _report(self, state: WorkerState) -> None:
        logger.info("worker %s%s", state.state, f": {state.message}" if state.message else "")
        if self.control is None:
            return
        try:
            self.control.write_state(state)
        except OSError as error:  # a full disk is no reason to stop serving; the agent sees the old state
            logger.error("%s cannot be written: %s", self.control.path, error)


def exit_error(state: State, who: str, ended: SystemExit) -> HookError:
    """Returns why ``who`` failed that called ``sys.exit`` in ``state``, with what argparse said if it was that."""
    said = [
        str(frame.f_locals.get("message"))
        for frame, _ in traceback.walk_tb(ended.__traceback__)
        if frame.f_code is argparse.ArgumentParser.error.__code__
    ]
    reason = HookReason.BOOT_FAILED if state is State.BOOTING else HookReason.ENDPOINT_ENDED
    return HookError(reason, ": ".join([f"{who} exited with status {ended.code}", *said]))


def run(main: Callable[[Hooks], Awaitable[None]], hooks: Hooks) -> int:
    """Runs ``main`` to its end on a loop of the standard library and returns the process's exit status.

    Status 0 after an orderly end; otherwise 1, with state FAILED and a reason.
    """
    try:
        asyncio.run(_awaited(main(hooks)))
    except SystemExit as ended:
        if ended.code in (0, None):
            return 0
        hooks.failed(exit_error(hooks.lifecycle.state, "the worker", ended))
        return ended.code if isinstance(ended.code, int) else 1
    except HookError as error:
        return _report_failure(hooks, error)
    except Exception as error:
        reason = HookReason.BOOT_FAILED if hooks.lifecycle.state is State.BOOTING else HookReason.INTERNAL_ERROR
        logger.exception("the worker failed in state %s", hooks.lifecycle.state)
        return _report_failure(hooks, HookError(reason, f"{type(error).__name__}: {error}"))
    return 0


def leave(status: int) -> NoReturn:
    """Ends the process with ``status`` once what is registered for its end has run.

    The interpreter is not torn down: threads of Dynamo's runtime may still call into it, and would abort the process.
    """
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    os._exit(status)


def _report_failure(hooks: Hooks, error: HookError) -> int:
    hooks.failed(error)
    print(f"dynamo-snapshot-worker: {error}", file=sys.stderr, flush=True)
    return 1


async def _awaited(result: Awaitable[None]) -> None:
    await result
