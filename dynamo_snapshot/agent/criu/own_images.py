"""A snapshot's images as one replica needs them: all shared, but for names that two replicas cannot both have.

The CUDA driver listens in each of its processes on an abstract unix socket, ``\\0cuda-uvmfd-<namespace>-<pid>\\0``,
that names the process's PID namespace. Abstract names belong to the network namespace, which a host's replicas
share: with the source's name in it no image could be restored while the source, or another replica, still runs.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

FILES = "files.img"
"""Where CRIU keeps open files, sockets among them."""
_DRIVER_SOCKET = re.compile(rb"\0cuda-uvmfd-(\d+)-(\d+)\0")


def own_images(shared: Path, own: Path, namespace: int) -> Path:
    """Returns the folder to restore from: ``shared``, or the new folder ``own`` where something differs. Blocks.

    Args:
        shared: the snapshot's images; they stay as they are.
        own: made of links to ``shared``, if it is made.
        namespace: inode of the PID namespace that the replica is restored into.
    """
    files = (shared / FILES).read_bytes()
    renamed = _DRIVER_SOCKET.sub(lambda name: _renamed(name, namespace), files)
    if renamed == files:
        return shared
    own.mkdir()
    for image in shared.iterdir():
        if image.name != FILES:
            (own / image.name).symlink_to(image)
    (own / FILES).write_bytes(renamed)
    return own


def pid_namespace(pid: int) -> int:
    """The inode of the PID namespace that ``pid`` is in; raises ``OSError`` when it has ended."""
    return os.stat(f"/proc/{pid}/ns/pid").st_ino


def _renamed(name: re.Match[bytes], namespace: int) -> bytes:
    # Of the same length, for a message says how long its parts are.
    before = name[1]
    number = str(namespace).encode().zfill(len(before))[-len(before) :]
    return name[0].replace(before, number, 1)
