"""Forward-pass metrics of ``dynamo.vllm`` across a capture: a port and a name of the incarnation's own.

Dynamo's scheduler publishes them from vLLM's engine core, a child of the process that takes requests: on a port that
the environment names, under the worker id that the environment named at the engine's start. A process that is to be
captured has no id by then, and all its clones would speak without one, from one port of the host. So the publisher is
closed before the capture. Afterwards another one listens on a free port, silent until it knows whose words it speaks.
"""

from __future__ import annotations

import errno
import os
import random
import socket
from collections.abc import MutableMapping
from typing import Any

from worker_hooks.engines.symbols import require
from worker_hooks.reasons import HookError, HookReason

PORT_ENV = "DYN_FORWARDPASS_METRIC_PORT"
"""Dynamo's: set, metrics are published there. 0, which Dynamo does not take: on a free port that the hooks find."""
PORTS = range(30000, 32768)
"""Dynamo takes none above 49151, the kernel gives those from 32768 to connections, an agent lower ones to workers."""
SCHEDULERS = "dynamo.vllm.instrumented_scheduler"
_NAMES = ("InstrumentedScheduler", "_FpmPublisherThread.shutdown", "_FpmPublisherThread.resume")
_OF_SCHEDULER = ("_publisher", "_fpm_worker_id", "_fpm_dp_rank")
_ATTEMPTS = 3


def choose_port(environ: MutableMapping[str, str] = os.environ) -> None:
    """Names a free port where none in particular is asked for, whether or not the worker is to be captured."""
    if environ.get(PORT_ENV) == "0":
        environ[PORT_ENV] = str(free_port())


class ForwardPassMetrics:
    """The metrics of one engine, in the process of its scheduler."""

    def __init__(self) -> None:
        self._scheduler: Any = None
        self._open = False

    def follow(self, config: Any) -> None:
        """Hears of the scheduler that vLLM makes by ``config``, its ``SchedulerConfig``, if that is Dynamo's.

        Raises:
            HookError: ``symbols_missing``: it is, but not one that can be told who it is.
        """
        made = config.get_scheduler_cls()
        if not any(each.__module__ == SCHEDULERS for each in made.__mro__):
            return
        require(SCHEDULERS, _NAMES)

        def made_and_told(scheduler: Any, *arguments: Any, **options: Any) -> None:
            made.__init__(scheduler, *arguments, **options)
            self._made(scheduler)

        config.scheduler_cls = type(made.__name__, (made,), {"__init__": made_and_told, "__module__": made.__module__})

    def close(self) -> None:
        """No thread and no listener is left; what is published meanwhile is lost."""
        if self._scheduler is not None and self._open:
            self._scheduler._publisher.shutdown()
            self._open = False

    def reopen(self) -> int | None:
        """Listens anew, silently; returns the port as Dynamo counts it, before the rank is added. None: no metrics."""
        if self._scheduler is None:
            return None
        self.close()
        rank: int = self._scheduler._fpm_dp_rank
        self._scheduler._publisher, port = _publisher(rank)
        self._open = True
        return port - rank

    def speak_as(self, worker_id: str) -> None:
        """From here on the metrics go out, under ``worker_id``."""
        if self._scheduler is not None:
            self._scheduler._fpm_worker_id = worker_id
            self._scheduler._publisher._worker_id = worker_id
            self._scheduler._publisher.resume()

    def _made(self, scheduler: Any) -> None:
        missing = [name for name in _OF_SCHEDULER if not hasattr(scheduler, name)]
        missing += [] if hasattr(getattr(scheduler, "_publisher", None), "_worker_id") else ["_publisher._worker_id"]
        if missing:
            raise HookError(
                HookReason.SYMBOLS_MISSING, f"missing in {SCHEDULERS}.InstrumentedScheduler: {', '.join(missing)}"
            )
        self._scheduler, self._open = scheduler, True


def free_port() -> int:
    """Returns one of :data:`PORTS` that nobody listens on, at any address."""
    for port in random.SystemRandom().sample(PORTS, len(PORTS)):
        with socket.socket() as probe:
            try:
                probe.bind(("", port))
            except OSError:
                continue
            return port
    raise HookError(HookReason.RESUME_FAILED, f"no port is free from {PORTS.start} to {PORTS.stop - 1}")


def _publisher(rank: int) -> tuple[Any, int]:
    made = require(SCHEDULERS, _NAMES)._FpmPublisherThread
    for left in reversed(range(_ATTEMPTS)):
        port = free_port()
        try:
            return made(f"tcp://127.0.0.1:{port}", worker_id="", dp_rank=rank, start_paused=True), port
        except Exception as error:  # ZeroMQ's is no OSError
            if getattr(error, "errno", None) != errno.EADDRINUSE or not left:
                raise
    raise AssertionError("not reached")
