"""How idle the host's processors were a moment ago, so that a slow restore can be told from a busy host."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path

WINDOW_S = 1.0
_STEP_S = 0.25


class IdleShare:
    """Keeps ``/proc/stat`` of the last second; :meth:`run` samples it until cancelled."""

    def __init__(self, stat: Path = Path("/proc/stat"), clock: Callable[[], float] = time.monotonic) -> None:
        self._stat, self._clock = stat, clock
        self._samples: deque[tuple[float, int, int]] = deque(maxlen=int(WINDOW_S / _STEP_S) + 1)

    async def run(self) -> None:
        while True:
            self.sample()
            await asyncio.sleep(_STEP_S)

    def sample(self) -> None:
        fields = [int(value) for value in self._stat.read_text().split("\n", 1)[0].split()[1:9]]
        idle = fields[3] + fields[4]  # idle and waiting for a device
        self._samples.append((self._clock(), idle, sum(fields)))

    def share(self) -> float | None:
        """The idle share of all processors' time over about the last second, 0 to 1; None before there was one."""
        if len(self._samples) < 2:
            return None
        (_, idle_then, total_then), (_, idle_now, total_now) = self._samples[0], self._samples[-1]
        total = total_now - total_then
        return (idle_now - idle_then) / total if total > 0 else None
