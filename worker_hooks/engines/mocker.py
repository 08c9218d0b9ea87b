"""Makes ``dynamo.mocker`` speak the protocol.

The mocker runs as it is, in this process: its own ``worker()`` parses the arguments and prepares the
engine, and the seams it leaves as module names (``launch_workers``, ``create_runtime``, ``run_input``,
``graceful_shutdown``) are where the hooks come in. What it lacks to stand for a real engine is simulated
and said so: a boot of :data:`BOOT_SECONDS_ENV` seconds and :data:`RESIDENT_MIB_ENV` MiB of real memory,
whose digest the self-test checks.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib
import os
import sys
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from worker_hooks.engines.resident import ResidentMemory
from worker_hooks.engines.symbols import require
from worker_hooks.gate import Gate, Presence, unreachable
from worker_hooks.hooks import Hooks
from worker_hooks.lifecycle import Event
from worker_hooks.reasons import HookError, HookReason

BOOT_SECONDS_ENV = "MOCKER_BOOT_SECONDS"
RESIDENT_MIB_ENV = "MOCKER_RESIDENT_MIB"
GATE_ENV = "DYNAMO_SNAPSHOT_GATE"
"""``off``: the control run. It registers before boot and self-test are done, as the mocker does by itself."""

_SEAMS = ("worker", "launch_workers", "create_runtime", "run_input", "graceful_shutdown")
_FROM_ENVIRONMENT = {
    "DYN_DISCOVERY_BACKEND": "discovery_backend",
    "DYN_REQUEST_PLANE": "request_plane",
    "DYN_EVENT_PLANE": "event_plane",
    "DYN_NAMESPACE": "endpoint",
}
"""Variables that a restore context may change, and the mocker's argument that defaults to each."""


async def run_mocker(hooks: Hooks, arguments: Sequence[str]) -> None:
    """Runs the mocker with ``arguments`` until it has drained; for :func:`worker_hooks.hooks.run`."""
    mocker = require("dynamo.mocker.main", _SEAMS)
    # Without the gate requests reach an engine that still boots, and wait for it, as with any other engine.
    booting = [] if _gated() else ["--startup-time", _boot_seconds()]
    sys.argv = ["dynamo.mocker", *arguments, *booting]
    await MockerWorker(hooks, mocker).run()


class MockerWorker:
    """One mocker process under the hooks."""

    def __init__(self, hooks: Hooks, mocker: Any) -> None:
        self._hooks = hooks
        self._mocker = mocker
        self._launch: Callable[..., Awaitable[None]] = mocker.launch_workers
        self._create_runtime: Callable[..., tuple[Any, Any]] = mocker.create_runtime
        self._run_input: Callable[..., Awaitable[None]] = mocker.run_input
        self._runtimes: list[Any] = []
        self._presences: list[Presence] = []
        self._inputs: list[asyncio.Future[None]] = []
        self._expected = 1
        self._all_watched = asyncio.Event()
        self._gate_open = asyncio.Event()

    async def run(self) -> None:
        self._mocker.launch_workers = self._gated_launch
        self._mocker.create_runtime = self._noted_runtime
        self._mocker.run_input = self._gated_input
        await self._mocker.worker()

    async def _gated_launch(self, arguments: argparse.Namespace, engine: Any) -> None:
        """Stands in for ``launch_workers``: all that needs no runtime has been done when it is called."""
        self._expected = arguments.num_workers
        if not _gated():
            await self._ungated(arguments, engine)
            return
        memory = await self._boot()
        before = _relevant_environment()
        await self._hooks.snapshot_point(quiesce=_nothing, resume=_nothing)
        if _relevant_environment() != before:
            fresh = importlib.reload(require("dynamo.mocker.args", ["parse_args"])).parse_args()  # read at import
            for name in _FROM_ENVIRONMENT.values():
                setattr(arguments, name, getattr(fresh, name))
        gate = self._own_shutdown()
        # The runtime comes up beside the self-test, begun first; the gate in run_input holds the registration back.
        tested = asyncio.ensure_future(self._self_test(memory))
        launched = asyncio.ensure_future(self._launch(arguments, engine))
        await _unless_ended(launched, tested)
        if gate.stop_requested.is_set():
            self._hooks.stop()
        self._gate_open.set()
        await self._served(gate, launched)

    async def _ungated(self, arguments: argparse.Namespace, engine: Any) -> None:
        self._hooks.lifecycle.evidence["gate"] = "off"
        gate = self._own_shutdown()
        self._gate_open.set()
        launched = asyncio.ensure_future(self._launch(arguments, engine))
        await _unless_ended(launched, self._self_test(await self._boot()))
        await self._served(gate, launched)

    async def _self_test(self, memory: ResidentMemory) -> None:
        await self._hooks.self_test(lambda: asyncio.to_thread(memory.check))

    async def _served(self, gate: Gate, launched: asyncio.Future[None]) -> None:
        await _unless_ended(launched, self._all_watched.wait())
        await gate.serve(self._runtimes, self._presences, asyncio.gather(*self._inputs))

    async def _boot(self) -> ResidentMemory:
        memory = await asyncio.to_thread(ResidentMemory, int(os.environ.get(RESIDENT_MIB_ENV) or 0))
        await asyncio.sleep(float(_boot_seconds()))
        self._hooks.lifecycle.evidence["resident_digest"] = memory.digest
        self._hooks.lifecycle.fire(Event.BOOTED)
        return memory

    def _own_shutdown(self) -> Gate:
        """The mocker's signal handler calls ``graceful_shutdown``, which cuts off routers that have not heard yet."""
        gate = Gate(self._hooks)

        async def requested(runtimes: list[Any]) -> None:
            gate.stop_requested.set()

        self._mocker.graceful_shutdown = requested
        return gate

    def _noted_runtime(self, *arguments: Any, **options: Any) -> tuple[Any, Any]:
        try:
            runtime, loop = self._create_runtime(*arguments, **options)
        except Exception as error:  # the binding raises nothing narrower
            raise unreachable(error) from error
        self._runtimes.append(runtime)
        return runtime, loop

    def _gated_input(self, runtime: Any, endpoint: str, engine: Any) -> Awaitable[None]:
        async def run() -> None:
            self._presences.append(await Presence.watch(runtime, endpoint))
            if len(self._presences) == self._expected:
                self._all_watched.set()
            await self._gate_open.wait()
            await self._run_input(runtime, endpoint, engine)

        self._inputs.append(asyncio.ensure_future(run()))
        return self._inputs[-1]


async def _unless_ended(launched: asyncio.Future[None], step: Awaitable[Any]) -> None:
    """Awaits ``step``, but raises what ended ``launched`` meanwhile."""
    working: asyncio.Future[Any] = asyncio.ensure_future(step)
    await asyncio.wait({working, launched}, return_when=asyncio.FIRST_COMPLETED)
    if launched.done() and not working.done():
        working.cancel()
        launched.result()
        raise HookError(HookReason.ENDPOINT_ENDED, "the mocker ended before its registration")
    await working


def _gated() -> bool:
    return os.environ.get(GATE_ENV) != "off"


def _boot_seconds() -> str:
    return os.environ.get(BOOT_SECONDS_ENV) or "0"


def _relevant_environment() -> dict[str, str | None]:
    return {name: os.environ.get(name) for name in _FROM_ENVIRONMENT}


def _nothing() -> None:
    """The mocker holds nothing that must not be captured before its runtime exists."""
