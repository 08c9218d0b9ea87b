"""Listeners of a process that nobody connects to, made such that a clone can listen on the same ports beside it.

torch's gloo listens on a port of the kernel's choice for each process group, of one rank too. A clone's CRIU binds
those ports anew, with SO_REUSEPORT; it may where whoever has them, a source or another clone, has that option as well.
"""

from __future__ import annotations

import os
import socket
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress

_INET = (socket.AF_INET, socket.AF_INET6)


@contextmanager
def sharing_ports() -> Iterator[None]:
    """The TCP listeners that this process opens within the block have ports that its clones can share."""
    before = {inode for inode, _ in _listeners()}
    yield
    for inode, listener in _listeners():
        if inode not in before:
            with suppress(OSError):  # closed meanwhile
                listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)


def _listeners() -> Iterator[tuple[int, socket.socket]]:
    """Each TCP listener of this process, with its inode; only lent, for as long as it is looked at."""
    for name in os.listdir("/proc/self/fd"):
        try:
            status = os.fstat(int(name))
            if not stat.S_ISSOCK(status.st_mode):
                continue
            lent = socket.socket(fileno=int(name))
        except OSError:  # closed meanwhile
            continue
        try:
            if lent.family in _INET and _listens(lent):
                yield status.st_ino, lent
        finally:
            lent.detach()


def _listens(lent: socket.socket) -> bool:
    try:
        return bool(lent.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN))
    except OSError:  # closed by another thread, and its number may be a file's by now
        return False
