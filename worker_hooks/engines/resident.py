"""Real memory that stands for an engine's: filled at boot, digested then and again at each self-test."""

from __future__ import annotations

import hashlib
import mmap
import os
import zlib
from concurrent.futures import ThreadPoolExecutor

from worker_hooks.reasons import HookError, HookReason

_BLOCK = 1 << 20
_THREADS = 2
"""zlib lets go of the interpreter, so threads help."""


class ResidentMemory:
    """``mebibytes`` MiB of private memory without a zero page, and its digest as at boot.

    The digest is SHA-256 over the CRC-32 of each MiB: it is there to find damage, not to withstand an
    attacker, and has to be cheap on machines whose processor has no SHA instructions (300 MiB take
    0.08 s of one core where SHA-256 alone takes 0.18 s with those instructions and 0.8 s without).
    """

    def __init__(self, mebibytes: int) -> None:
        self.size = mebibytes * _BLOCK
        self._memory = mmap.mmap(-1, max(self.size, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        block = bytearray(os.urandom(_BLOCK))
        for start in range(0, self.size, _BLOCK):
            block[:8] = (start + 1).to_bytes(8, "little")
            self._memory[start : start + _BLOCK] = bytes(block)
        self.digest = self.current_digest()

    def current_digest(self) -> str:
        def checksum(start: int) -> bytes:
            return zlib.crc32(view[start : start + _BLOCK]).to_bytes(4, "little")

        with memoryview(self._memory) as view, ThreadPoolExecutor(_THREADS) as pool:
            return hashlib.sha256(b"".join(pool.map(checksum, range(0, self.size, _BLOCK)))).hexdigest()

    def check(self) -> None:
        """Raises ``self_test_failed`` where the memory is not what it was at boot."""
        current = self.current_digest()
        if current != self.digest:
            raise HookError(
                HookReason.SELF_TEST_FAILED,
                f"{self.size >> 20} MiB of memory digest to {current[:16]}…, at boot to {self.digest[:16]}…",
            )
