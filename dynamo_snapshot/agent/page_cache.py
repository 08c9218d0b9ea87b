"""How much of a file is in the page cache (``cachestat``, Linux 6.5)."""

from __future__ import annotations

import ctypes
import os
from pathlib import Path

_CACHESTAT = 451
_libc = ctypes.CDLL(None, use_errno=True)


class _Range(ctypes.Structure):
    _fields_ = (("offset", ctypes.c_uint64), ("length", ctypes.c_uint64))


class _Stat(ctypes.Structure):
    _fields_ = tuple((name, ctypes.c_uint64) for name in ("cache", "dirty", "writeback", "evicted", "recently_evicted"))


def cached_bytes(path: Path) -> int:
    """Returns how many bytes of the file at ``path`` are in memory; 0 where the kernel cannot say."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        whole, found = _Range(0, 0), _Stat()
        done = _libc.syscall(_CACHESTAT, descriptor, ctypes.byref(whole), ctypes.byref(found), 0)
        return 0 if done else int(found.cache) * os.sysconf("SC_PAGE_SIZE")
    finally:
        os.close(descriptor)
