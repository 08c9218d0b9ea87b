"""Load over time, a row a second, with what it costs the generator and the frontend in CPU."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any

from dynamo_snapshot.local.host import CpuMeter, process_cpu_seconds
from dynamo_snapshot.replay.load import LoadGenerator

INTERVAL_S = 1.0


class LoadMeter:
    """Takes a row a second within its block.

    Args:
        frontend: tells the frontend's process; None while it is down.
    """

    def __init__(self, generator: LoadGenerator, frontend: Callable[[], int | None]) -> None:
        self.rows: list[dict[str, Any]] = []
        self._generator = generator
        self._frontend = frontend
        self._task: asyncio.Task[None] | None = None
        self._began = self._ended = 0.0
        self._frontend_cpu_s = 0.0

    async def __aenter__(self) -> LoadMeter:
        self._began = time.monotonic()
        self._frontend_cpu_s = -self._frontend_seconds()
        self._task = asyncio.create_task(self._measure(), name="load meter")
        return self

    async def __aexit__(self, *_: object) -> None:
        self._ended = time.monotonic()
        self._frontend_cpu_s += self._frontend_seconds()
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    def cores(self) -> dict[str, float]:
        """CPU seconds a second, over the whole load."""
        duration = max(self._ended - self._began, 1e-9)
        generator = self._generator.summary().generator_cpu_s / duration
        frontend = max(0.0, self._frontend_cpu_s) / duration
        return {
            "generator": round(generator, 3),
            "frontend": round(frontend, 3),
            "both": round(generator + frontend, 3),
        }

    async def _measure(self) -> None:
        cpu = CpuMeter()
        sent = 0
        while True:
            await asyncio.sleep(INTERVAL_S)
            progress = self._generator.progress
            self.rows.append(
                {
                    "at": time.time(),
                    "sent_per_s": (progress.sent - sent) / INTERVAL_S,
                    "in_flight": progress.in_flight,
                    "failed": progress.failed,
                    "idle_cpu": round(cpu.idle(), 3),
                }
            )
            sent = progress.sent

    def _frontend_seconds(self) -> float:
        pid = self._frontend()
        return process_cpu_seconds(pid) if pid is not None else 0.0
