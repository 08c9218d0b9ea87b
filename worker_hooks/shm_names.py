"""Gives shared-memory files back the names that their mappings know them by.

``sem_open`` (so every semaphore of ``multiprocessing``) maps a file under a temporary name, links it to its own and
unlinks the first; the kernel then calls the mapping ``<first name> (deleted)``. CRIU looks for a file of just that
name. Where there is none but the file has another, it makes a link that it restores from, and, if the source runs on,
removes it at the end of the dump (``check_path_remap``, ``cr_dump_finish``). So there is to be one before the capture,
which then goes with ``/dev/shm`` into the snapshot.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

from worker_hooks.guard import tree

SHM = Path("/dev/shm")
_MAPPING = re.compile(r"^\S+ \S+ \S+ \S+ (?P<inode>\d+) +(?P<path>/.* \(deleted\))$")


def put_back(pid: int, shm: Path = SHM, proc: Path = Path("/proc")) -> list[Path]:
    """Returns the names made in ``shm``, for files that processes at or below ``pid`` map and that have another name.

    A file without any name needs none: CRIU takes it into the image.
    """
    lost: dict[int, Path] = {}
    for each in tree(pid, proc):
        try:
            mappings = (proc / str(each) / "maps").read_text(errors="replace")
        except (FileNotFoundError, ProcessLookupError):  # it has ended meanwhile
            continue
        for line in mappings.splitlines():
            match = _MAPPING.match(line)
            if match and Path(match["path"]).parent == shm and not Path(match["path"]).exists():
                lost[int(match["inode"])] = Path(match["path"])
    made = []
    for entry in sorted(shm.iterdir()) if lost else ():
        name = lost.pop(entry.stat(follow_symlinks=False).st_ino, None)
        if name is not None:
            os.link(entry, name)
            made.append(name)
    return made
