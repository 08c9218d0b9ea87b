"""Writing so that a crash or power cut leaves the old state or the new one, never a mixture."""

from __future__ import annotations

import os
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

# fsync waits for the device, not for a core: a few at once let it merge the writes.
_SYNC_THREADS = 8


def sync_path(path: Path) -> None:
    """Flushes one file's data, or one folder's entries, to the device."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync_tree(folder: Path) -> None:
    """Flushes every file below ``folder``, then every folder, the deepest first, and ``folder`` itself."""
    files: list[Path] = []
    folders: list[Path] = []
    for base, _, names in os.walk(folder):
        folders.append(Path(base))
        files += (Path(base, name) for name in names)
    with ThreadPoolExecutor(_SYNC_THREADS, thread_name_prefix="fsync") as pool:
        list(pool.map(sync_path, files))
    for path in reversed(folders):
        sync_path(path)


def write_synced(path: Path, data: bytes) -> None:
    """Writes a new file and flushes its data; the entry in its folder is the caller's to flush."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def replace_synced(path: Path, data: bytes) -> None:
    """Replaces ``path`` as a whole: temporary file, fsync, rename, fsync of the folder."""
    # Of this thread's own: others may replace the same file at the same time.
    temporary = path.with_name(f".{path.name}.{threading.get_native_id()}.tmp")
    try:
        write_synced(temporary, data)
        temporary.rename(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    sync_path(path.parent)
