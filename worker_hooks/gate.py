"""The discovery gate: in only after the self-test, and out first.

The gate watches discovery through the runtime's own client, so it works with every backend: a worker
is registered when its instance can be seen there, and has lost its lease when it cannot any more.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
from collections.abc import Awaitable, Iterable
from typing import Any

from worker_hooks.control import DRAIN_TIMEOUT_ENV
from worker_hooks.hooks import Hooks
from worker_hooks.lifecycle import Event
from worker_hooks.reasons import HookError, HookReason

logger = logging.getLogger(__name__)

APPEAR_TIMEOUT_S = 30.0
DRAIN_TIMEOUT_S = 30.0
"""Unless :data:`DRAIN_TIMEOUT_ENV` says otherwise."""
LEAVE_TIMEOUT_S = 2.0
"""Discovery that does not answer must not take the time that requests in flight have."""
LEAVE_GRACE_S = 0.25
"""After it has left discovery a worker still accepts for this long: routers hear of it a little later."""
LOST_AFTER_S = 1.0
"""An instance that was seen and is missing for this long has lost its lease; shorter gaps are a watch being renewed."""

_LOOK_WHILE_APPEARING_S = 0.002
_LOOK_WHILE_SERVING_S = 0.2


def drain_timeout_s() -> float:
    return float(os.environ.get(DRAIN_TIMEOUT_ENV) or DRAIN_TIMEOUT_S)


def open_runtime(discovery_backend: str, request_plane: str, event_plane: str | None) -> Any:
    """Creates the ``DistributedRuntime``: its lease, and with it the instance id, are this incarnation's own.

    Raises:
        HookError: ``server_unreachable``.
    """
    from dynamo.runtime import DistributedRuntime

    loop = asyncio.get_running_loop()
    try:
        return DistributedRuntime(loop, discovery_backend, request_plane, event_plane=event_plane)
    except Exception as error:  # the binding raises nothing narrower
        raise unreachable(error) from error


def unreachable(error: Exception) -> HookError:
    """What a runtime that could not be created means, and where it looked."""
    where = [f"{name}={os.environ[name]}" for name in ("ETCD_ENDPOINTS", "NATS_SERVER") if name in os.environ]
    return HookError(
        HookReason.SERVER_UNREACHABLE, f"no runtime with {' '.join(where) or 'default addresses'}: {error}"
    )


class Presence:
    """Whether one endpoint of this worker is in discovery."""

    def __init__(self, endpoint: Any, client: Any) -> None:
        self._endpoint = endpoint
        self._client = client
        self.instance_id: int = endpoint.connection_id()

    @classmethod
    async def watch(cls, runtime: Any, path: str) -> Presence:
        """Begins to watch ``path``: before the registration, for a watch begun amid writes hears of them late."""
        endpoint = runtime.endpoint(path)
        return cls(endpoint, await endpoint.client())

    def visible(self) -> bool:
        return self.instance_id in self._client.instance_ids()

    async def appeared(self) -> None:
        """Returns once the instance can be seen."""
        # The client is told of changes but tells nobody; asking it is a look into this process's memory.
        while not self.visible():  # noqa: ASYNC110
            await asyncio.sleep(_LOOK_WHILE_APPEARING_S)

    async def lost(self) -> None:
        """Returns once the instance, seen before, has been missing for :data:`LOST_AFTER_S`."""
        clock = asyncio.get_running_loop().time
        missing_since: float | None = None
        while missing_since is None or clock() - missing_since < LOST_AFTER_S:
            await asyncio.sleep(_LOOK_WHILE_SERVING_S)
            if self.visible():
                missing_since = None
            elif missing_since is None:
                missing_since = clock()

    async def leave(self) -> None:
        """Takes the instance out of discovery; what is under way goes on."""
        try:
            async with asyncio.timeout(LEAVE_TIMEOUT_S):
                await self._endpoint.unregister_endpoint_instance()
        except Exception as error:  # the lease's end takes the key along anyway
            logger.warning("instance %x could not be taken out of discovery: %r", self.instance_id, error)


class Gate:
    """One worker's way in and out; made before its runtime is opened, and from then on the owner of SIGTERM."""

    def __init__(self, hooks: Hooks) -> None:
        self._hooks = hooks
        self.stop_requested = asyncio.Event()
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, self.stop_requested.set)

    async def serve(self, runtimes: Iterable[Any], presences: list[Presence], serving: Awaitable[Any]) -> None:
        """Reports the registration, then returns when the worker was asked to stop and has drained.

        Args:
            runtimes: what to shut down in the end.
            presences: every endpoint that has to be in discovery.
            serving: ends when the endpoints have finished what was in flight.

        Raises:
            HookError: ``registration_failed``, ``lease_lost``, ``endpoint_ended`` or ``drain_timed_out``.
        """
        served = asyncio.ensure_future(serving)
        await self._registered(presences, served)
        lost = asyncio.create_task(_first_lost(presences), name="lease watch")
        stopped = asyncio.create_task(self.stop_requested.wait(), name="stop requested")
        await asyncio.wait({served, lost, stopped}, return_when=asyncio.FIRST_COMPLETED)
        for watcher in (lost, stopped):
            watcher.cancel()
        if self.stop_requested.is_set():
            await self._drain(runtimes, presences, served)
            return
        error = _cause(presences, served)
        await self._finish(runtimes, served)
        raise error

    async def _registered(self, presences: list[Presence], served: asyncio.Future[Any]) -> None:
        appeared = asyncio.gather(*(each.appeared() for each in presences))
        await asyncio.wait({appeared, served}, timeout=APPEAR_TIMEOUT_S, return_when=asyncio.FIRST_COMPLETED)
        if not appeared.done():
            appeared.cancel()
            text = (
                f"the endpoint ended: {_text(served)}" if served.done() else f"not seen within {APPEAR_TIMEOUT_S:g} s"
            )
            raise HookError(HookReason.REGISTRATION_FAILED, text)
        self._hooks.lifecycle.evidence["instance_id"] = str(presences[0].instance_id)
        self._hooks.registered()

    async def _drain(self, runtimes: Iterable[Any], presences: list[Presence], served: asyncio.Future[Any]) -> None:
        self._hooks.lifecycle.fire(Event.DRAIN)
        await asyncio.gather(*(each.leave() for each in presences))
        await asyncio.sleep(LEAVE_GRACE_S)
        if not await self._finish(runtimes, served):
            raise HookError(HookReason.DRAIN_TIMED_OUT, f"requests still in flight after {drain_timeout_s():g} s")
        self._hooks.lifecycle.fire(Event.STOP)

    async def _finish(self, runtimes: Iterable[Any], served: asyncio.Future[Any]) -> bool:
        for runtime in runtimes:
            runtime.shutdown()
        done, _ = await asyncio.wait({served}, timeout=drain_timeout_s())
        if done and not served.cancelled():
            served.exception()  # the runtime calls every end of an endpoint unexpected; taken note of
        return bool(done)


async def _first_lost(presences: list[Presence]) -> None:
    watches = [asyncio.ensure_future(each.lost()) for each in presences]
    try:
        await asyncio.wait(watches, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for watch in watches:
            watch.cancel()


def _cause(presences: list[Presence], served: asyncio.Future[Any]) -> HookError:
    """Why a worker that nobody stopped does not serve any more."""
    missing = [each for each in presences if not each.visible()]
    if missing:
        return HookError(HookReason.LEASE_LOST, f"instance {missing[0].instance_id:x} is not in discovery any more")
    return HookError(HookReason.ENDPOINT_ENDED, f"the endpoint ended: {_text(served)}")


def _text(served: asyncio.Future[Any]) -> str:
    if served.cancelled():
        return "cancelled"
    error = served.exception()
    return f"{type(error).__name__}: {error}" if error else "without an error"
