"""Real memory that stands for an engine's: filled at boot, digested then and again at each self-test."""

from __future__ import annotations

import hashlib
import mmap
import os
from concurrent.futures import ThreadPoolExecutor

from worker_hooks.reasons import HookError, HookReason

_BLOCK = 1 << 20
_THREADS = 2
"""hashlib lets go of the interpreter: two threads digest 300 MiB in about 0.1 s on two cores."""


class ResidentMemory:
    """``mebibytes`` MiB of private memory without a zero page; ``digest`` is SHA-256, as at boot."""

    def __init__(self, mebibytes: int) -> None:
        self.size = mebibytes * _BLOCK
        self._memory = mmap.mmap(-1, max(self.size, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        block = bytearray(os.urandom(_BLOCK))
        for start in range(0, self.size, _BLOCK):
            block[:8] = start.to_bytes(8, "little")
            self._memory[start : start + _BLOCK] = bytes(block)
        self.digest = self.current_digest()

    def current_digest(self) -> str:
        step = -(-self.size // _THREADS) or 1
        with memoryview(self._memory) as view, ThreadPoolExecutor(_THREADS) as pool:
            parts = list(
                pool.map(lambda start: _sha256(view[start : min(start + step, self.size)]), range(0, self.size, step))
            )
        return hashlib.sha256(b"".join(parts)).hexdigest()

    def check(self) -> None:
        """Raises ``self_test_failed`` where the memory is not what it was at boot."""
        current = self.current_digest()
        if current != self.digest:
            raise HookError(
                HookReason.SELF_TEST_FAILED,
                f"{self.size >> 20} MiB of memory digest to {current[:16]}…, at boot to {self.digest[:16]}…",
            )


def _sha256(part: memoryview) -> bytes:
    with part:
        return hashlib.sha256(part).digest()
