"""A bus between the processes of one host: a folder of JSON files and inotify.

``wanted/<node>.json`` and ``reported/<node>.json`` are replaced as a whole: written beside, fsynced
and renamed, so that a reader sees one version or the next and a crash leaves the last whole one.
"""

from __future__ import annotations

import asyncio
import errno
import re
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

import msgspec

from dynamo_snapshot.bus.inotify import FolderWatch
from dynamo_snapshot.durable import replace_synced
from dynamo_snapshot.errors import SnapshotError
from dynamo_snapshot.model import Reason, Reported, Wanted, decode, encode

T = TypeVar("T", Wanted, Reported)

FOLDER = Path("bus")
"""Below a fleet's ``runtime_dir``."""
_SUFFIX = ".json"
_NODE = re.compile(r"[A-Za-z0-9][-A-Za-z0-9_.]{0,200}")


class DirectoryBus:
    """One fleet's bus in ``root``, which is made where it is missing."""

    def __init__(self, root: Path) -> None:
        self._wanted = root / "wanted"
        self._reported = root / "reported"
        for folder in (self._wanted, self._reported):
            try:
                folder.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                raise _unwritable(folder, error) from error
        # One thread writes: fsync blocks, and a write that was given up must not overtake a later one.
        self._writer = ThreadPoolExecutor(max_workers=1, thread_name_prefix="bus")

    async def publish_wanted(self, wanted: Wanted) -> None:
        await self._replace(_file(self._wanted, wanted.node), encode(wanted))

    async def publish_reported(self, reported: Reported) -> None:
        await self._replace(_file(self._reported, reported.node), encode(reported))

    async def read_wanted(self, node: str) -> Wanted | None:
        path = _file(self._wanted, node)
        data = _read(path)
        return None if data is None else _decode(path, data, Wanted)

    async def read_reported(self) -> dict[str, Reported]:
        reports = {}
        for path in _files(self._reported):
            data = _read(path)
            if data is not None:
                report = _decode(path, data, Reported)
                reports[report.node] = report
        return reports

    async def watch_wanted(self, node: str) -> AsyncIterator[Wanted]:
        path = _file(self._wanted, node)
        async for wanted in _watch(self._wanted, Wanted, only=path):
            yield wanted

    async def watch_reported(self) -> AsyncIterator[Reported]:
        async for reported in _watch(self._reported, Reported):
            yield reported

    async def _replace(self, path: Path, data: bytes) -> None:
        await asyncio.get_running_loop().run_in_executor(self._writer, _replace, path, data)


async def _watch(folder: Path, kind: type[T], only: Path | None = None) -> AsyncIterator[T]:
    seen: dict[Path, bytes] = {}
    with FolderWatch(folder) as watch:  # opened before the first look, so that no change between is missed
        names: frozenset[str] | None = None
        while True:
            candidates = [only] if only else _files(folder)
            for path in candidates:
                if names is not None and path.name not in names:
                    continue
                data = _read(path)
                if data is not None and seen.get(path) != data:
                    seen[path] = data
                    yield _decode(path, data, kind)
            names = await watch.renamed()


def _file(folder: Path, node: str) -> Path:
    if not _NODE.fullmatch(node):
        raise SnapshotError(
            Reason.CONFIGURATION_INVALID,
            f"node name {node!r} cannot be a file name",
            "Use letters, digits, '-', '_' and '.', starting with a letter or digit.",
        )
    return folder / f"{node}{_SUFFIX}"


def _files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.iterdir() if path.suffix == _SUFFIX and not path.name.startswith("."))


def _read(path: Path) -> bytes | None:
    # In the event loop on purpose: some kilobytes from the page cache take less time than a thread.
    try:
        return path.read_bytes()
    except FileNotFoundError:
        return None
    except OSError as error:
        raise SnapshotError(
            Reason.NOT_PRIVILEGED if isinstance(error, PermissionError) else Reason.SERVER_UNREACHABLE,
            f"{path}: cannot be read: {error.strerror}",
            "Run as the user that runs the fleet; agent.runtime_dir says where it is.",
        ) from error


def _decode(path: Path, data: bytes, kind: type[T]) -> T:
    try:
        return decode(data, kind)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise SnapshotError(
            Reason.STATE_CORRUPT,
            f"{path}: not a {kind.__name__.lower()} list: {error}",
            "Run one version of this project on the host; stop the fleet and remove the file.",
        ) from error


def _replace(path: Path, data: bytes) -> None:
    try:
        replace_synced(path, data)
    except OSError as error:
        raise _unwritable(path, error) from error


def _unwritable(path: Path, error: OSError) -> SnapshotError:
    what = f"{path}: cannot be written: {error.strerror}"
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return SnapshotError(Reason.DISK_FULL, what, "Free space in agent.runtime_dir.")
    if isinstance(error, PermissionError):
        return SnapshotError(Reason.NOT_PRIVILEGED, what, "Run as root, or name another agent.runtime_dir.")
    return SnapshotError(Reason.SERVER_UNREACHABLE, what, "Check that agent.runtime_dir is a folder of this host.")
