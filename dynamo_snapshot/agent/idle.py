"""How idle the host's processors were a moment ago, so that a slow restore can be told from a busy host."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path

STAT = Path("/proc/stat")
WINDOW_S = 1.0
_STEP_S = 0.25


def cpu_times(stat: Path = STAT) -> tuple[int, int]:
    """All processors' idle and total time since boot, in jiffies; waiting for a device counts as idle."""
    fields = [int(value) for value in stat.read_text().split("\n", 1)[0].split()[1:9]]
    return fields[3] + fields[4], sum(fields)


class IdleShare:
    """Keeps ``/proc/stat`` of the last second; :meth:`run` samples it until cancelled."""

    def __init__(self, stat: Path = STAT, clock: Callable[[], float] = time.monotonic) -> None:
        self._stat, self._clock = stat, clock
        self._samples: deque[tuple[float, int, int]] = deque(maxlen=int(WINDOW_S / _STEP_S) + 1)

    async def run(self) -> None:
        while True:
            self.sample()
            await asyncio.sleep(_STEP_S)

    def sample(self) -> None:
        self._samples.append((self._clock(), *cpu_times(self._stat)))

    def share(self) -> float | None:
        """The idle share of all processors' time over about the last second, 0 to 1; None before there was one."""
        if len(self._samples) < 2:
            return None
        (_, idle_then, total_then), (_, idle_now, total_now) = self._samples[0], self._samples[-1]
        total = total_now - total_then
        return (idle_now - idle_then) / total if total > 0 else None
