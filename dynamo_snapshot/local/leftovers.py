"""What a fleet has left on this host: found by marks that only this fleet's things bear.

One list serves twice: a start removes what a killed predecessor left, and a stop counts what it did
not manage to remove. A thing is this fleet's when it bears the runtime folder: in its environment
(processes), as its house (replicas' processes), in its path (mounts, sockets, files) or its name (cgroups).
"""

from __future__ import annotations

import asyncio
import ctypes
import os
import shutil
import signal
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from dynamo_snapshot.agent.cgroups import Cgroups
from dynamo_snapshot.agent.house import MARK, MOUNT_POINT
from dynamo_snapshot.agent.mounts import mount_points
from dynamo_snapshot.agent.process import wait_pid
from dynamo_snapshot.agent.teardown import teardown
from dynamo_snapshot.local.processes import LEARNT, RUNTIME_DIR_TAG

KEPT = ("logs", LEARNT, MOUNT_POINT.name)
"""Entries of the runtime folder that stay: people read logs, the next planner goes on with what was learnt, and another
fleet's houses may use the mount point."""


KILL_TIMEOUT_S = 10.0


@dataclass(frozen=True)
class Leftover:
    """One thing that outlived its fleet."""

    kind: str
    """One of :data:`KINDS`."""
    what: str

    def __str__(self) -> str:
        return f"{self.kind}: {self.what}"


KINDS = ("process", "namespace", "mount", "socket", "cgroup", "file", "key")


def processes(runtime_dir: Path) -> list[int]:
    """Processes of the fleet of ``runtime_dir``, this one and its ancestors left out; outermost first."""
    houses = {identity for path in _entries(runtime_dir / "replicas") if (identity := _identity(path))}
    tag, mark = f"{RUNTIME_DIR_TAG}={runtime_dir}".encode(), f"{MARK}={runtime_dir}/".encode()
    own = set(_ancestry(os.getpid()))
    found = []
    for pid in sorted(int(entry.name) for entry in _entries(Path("/proc")) if entry.name.isdigit()):
        if pid in own or _is_zombie(pid):
            continue
        house = _identity(Path(f"/proc/{pid}/root{MOUNT_POINT}"))
        named = any(entry == tag or entry.startswith(mark) for entry in _environment(pid))
        if named or (house is not None and house in houses):
            found.append(pid)
    return found


def sockets(*folders: Path) -> list[str]:
    """Paths of bound unix sockets below ``folders``."""
    rows = Path("/proc/net/unix").read_text().splitlines()[1:]
    paths = {row.split(maxsplit=7)[7] for row in rows if len(row.split(maxsplit=7)) == 8}
    return sorted(path for path in paths if any(_within(path.lstrip("@"), folder) for folder in folders))


def listening(pids: Iterable[int]) -> list[int]:
    """The TCP ports on which processes ``pids`` listen, in this network namespace."""
    held = {link for pid in pids for link in _links(pid)}
    ports = set()
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        with suppress(OSError):
            for row in Path(table).read_text().splitlines()[1:]:
                fields = row.split()
                if fields[3] == "0A" and f"socket:[{fields[9]}]" in held:  # TCP_LISTEN
                    ports.add(int(fields[1].rsplit(":", 1)[1], 16))
    return sorted(ports)


def namespaces(pids: Iterable[int]) -> list[str]:
    """The namespaces that processes ``pids`` hold and the first process does not.

    By process, because the kernel gives the number of a namespace that has gone to the next one.
    """
    kinds = ("pid", "mnt", "net")
    own = {_namespace(1, kind) for kind in kinds}
    return sorted({found for pid in pids for kind in kinds if (found := _namespace(pid, kind))} - own)


def count(runtime_dir: Path) -> list[Leftover]:
    """All that is left of the fleet of ``runtime_dir`` but for the files that it works with while it runs."""
    pids = processes(runtime_dir)
    left = [Leftover("process", describe(pid)) for pid in pids]
    left += [Leftover("namespace", name) for name in namespaces(pids)]
    left += [Leftover("mount", point) for point in mount_points(runtime_dir)]
    # Every house binds its socket at the one mount point, which may lie in this folder: whose it is, its
    # process tells, which is counted above.
    left += [Leftover("socket", path) for path in sockets(runtime_dir) if not _within(path, MOUNT_POINT)]
    left += [Leftover("socket", f"TCP port {port}") for port in listening(pids)]
    left += [Leftover("cgroup", path) for path in cgroups(runtime_dir)]
    return left + [Leftover("file", str(path)) for path in sorted((runtime_dir / "replicas").rglob("*"))]


def cgroups(runtime_dir: Path) -> list[str]:
    """The groups of the fleet's replicas, and the folders above them."""
    groups = Cgroups(runtime_dir)
    base = [groups.base] if groups.base and groups.base.is_dir() else []
    return [str(path) for path in (*groups.existing(), *base)]


def describe(pid: int) -> str:
    """``pid`` with its command line, for a person."""
    with suppress(OSError):
        command = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode("utf-8", "replace").strip()
        return f"{pid} {command[:160]}"
    return str(pid)


async def remove(runtime_dir: Path) -> list[Leftover]:
    """Ends and removes all that a predecessor left in ``runtime_dir``; returns what it was.

    The caller holds the folder's lock: no other fleet runs there.
    """
    removed = [Leftover("process", describe(pid)) for pid in processes(runtime_dir)]
    await teardown(runtime_dir)
    pids = processes(runtime_dir)
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    with suppress(TimeoutError):
        async with asyncio.timeout(KILL_TIMEOUT_S):
            await asyncio.gather(*(wait_pid(pid) for pid in pids))
    for point in mount_points(runtime_dir):
        removed.append(Leftover("mount", point))
        _unmount(point)
    for entry in _entries(runtime_dir):
        if entry.name not in KEPT:
            removed.append(Leftover("file", str(entry)))
            await asyncio.to_thread(_delete, entry)
    return removed


def _delete(entry: Path) -> None:
    if entry.is_dir() and not entry.is_symlink():
        shutil.rmtree(entry, ignore_errors=True)
    else:
        entry.unlink(missing_ok=True)


def _unmount(point: str) -> None:
    detach = 2  # MNT_DETACH
    ctypes.CDLL(None, use_errno=True).umount2(os.fsencode(point), detach)


def _namespace(pid: int, kind: str) -> str:
    """Such as ``pid:[4026531836]``; empty where the process is gone."""
    try:
        return os.readlink(f"/proc/{pid}/ns/{kind}")
    except OSError:
        return ""


def _links(pid: int) -> list[str]:
    """What the descriptors of ``pid`` lead to."""
    found = []
    for entry in _entries(Path(f"/proc/{pid}/fd")):
        with suppress(OSError):
            found.append(os.readlink(entry))
    return found


def _within(path: str, folder: Path) -> bool:
    return path == str(folder) or path.startswith(f"{folder}/")


def _entries(folder: Path) -> list[Path]:
    try:
        return list(folder.iterdir())
    except OSError:
        return []


def _identity(path: Path) -> tuple[int, int] | None:
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_dev, found.st_ino


def _environment(pid: int) -> list[bytes]:
    try:
        return Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:
        return []


def _stat_fields(pid: int) -> list[str]:
    """The fields of /proc/PID/stat after the command's name: state, parent, …; empty where it is gone."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    except (OSError, IndexError):
        return []


def _is_zombie(pid: int) -> bool:
    fields = _stat_fields(pid)
    return not fields or fields[0] in ("Z", "X")


def _ancestry(pid: int) -> list[int]:
    line = []
    while pid > 0:
        line.append(pid)
        fields = _stat_fields(pid)
        pid = int(fields[1]) if len(fields) > 1 else 0
    return line
