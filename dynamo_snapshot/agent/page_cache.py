"""Files in the page cache: how much of one is there (``cachestat``, Linux 6.5), and how all of it gets there."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable
from pathlib import Path

_CACHESTAT = 451
_CHUNK = 4 << 20
_AHEAD = 64 << 20
"""What the kernel is told to read before it is asked for: disks want much at once."""
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


def read_into_cache(path: Path, stopped: Callable[[], bool]) -> int:
    """Reads the file at ``path`` until its end or until ``stopped``, which is asked every 4 MiB; returns the bytes."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        buffer, done, told = bytearray(_CHUNK), 0, 0
        while not stopped():
            if told < done + _AHEAD:
                os.posix_fadvise(descriptor, told, _AHEAD, os.POSIX_FADV_WILLNEED)
                told += _AHEAD
            got = os.preadv(descriptor, [buffer], done)
            if not got:
                break
            done += got
        return done
    finally:
        os.close(descriptor)


def available_bytes() -> int:
    """Returns how much memory programs of this host could still have (``MemAvailable``)."""
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) << 10
    return 0
