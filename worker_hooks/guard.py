"""What must not be in a worker's process tree at the instant of its capture, and who holds it.

The worker looks at itself before it says that it is ready, and the agent looks at it from outside, by
host pid, before it freezes anything; both call :func:`scan`.

Sockets: a TCP, UDP or raw socket with a peer is allowed only where the peer is in the tree too.
Listeners have no peer and may be bound anywhere (torch's rendezvous store binds every address); whether
their port is free is checked where they are restored.
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from worker_hooks.proc_net import Connection, connections
from worker_hooks.reasons import HookReason

RUNTIME_THREADS = ("tokio-rt-worker", "tokio-runtime-w")
"""How the kernel names the threads of Dynamo's runtime: tokio's default name, new and old, cut to 15 bytes."""

LARGEST_GHOST_BYTES = 512 << 20
"""An unlinked open file is copied into the image up to this size."""

CAPTURABLE_ANONYMOUS = frozenset(
    {"eventfd", "eventpoll", "inotify", "fanotify", "signalfd", "timerfd", "pidfd", "bpf-map"}
)
"""The anonymous inodes that CRIU can dump."""

_SOCKET = re.compile(r"socket:\[(\d+)\]")
_PIPE = re.compile(r"pipe:\[(\d+)\]")
_ANONYMOUS = re.compile(r"anon_inode:\[?([^\]]+)\]?")
_NAMESPACE = re.compile(r"(cgroup|ipc|mnt|net|pid|time|user|uts):\[(\d+)\]")
_DELETED = " (deleted)"
_STANDARD = (0, 1, 2)


@dataclass(frozen=True)
class Finding:
    """One thing that stands in the way of a capture, and its holder."""

    reason: HookReason
    pid: int
    process: str
    what: str
    fd: int | None = None
    thread: int | None = None

    def __str__(self) -> str:
        where = [f"pid {self.pid}"]
        if self.fd is not None:
            where.append(f"fd {self.fd}")
        if self.thread is not None:
            where.append(f"thread {self.thread}")
        return f"{self.process} ({', '.join(where)}): {self.what}"


@dataclass
class _Process:
    pid: int
    folder: Path
    name: str
    links: dict[int, str] = field(default_factory=dict)
    """What each descriptor points at."""


def scan(pid: int, proc: Path = Path("/proc")) -> list[Finding]:
    """Everything that forbids a capture in the tree below ``pid`` (a pid of ``proc``'s namespace), itself included.

    Raises:
        PermissionError: a process of the tree may not be looked at; not knowing is not the same as finding nothing.
        ProcessLookupError: ``pid`` does not exist.
    """
    processes = [_read(each, proc) for each in tree(pid, proc)]
    if not processes:
        raise ProcessLookupError(f"no process {pid} in {proc}")
    findings: list[Finding] = []
    for process in processes:
        findings += _runtime_threads(process)
        findings += _rings(process)
    findings += _sockets(processes)
    findings += _files(processes)
    return findings


def tree(pid: int, proc: Path = Path("/proc")) -> Iterator[int]:
    """The processes at and below ``pid``, each parent before its children."""
    folder = proc / str(pid)
    try:
        threads = os.listdir(folder / "task")
    except FileNotFoundError:
        return
    yield pid
    for thread in threads:
        try:
            children = (folder / "task" / thread / "children").read_text().split()
        except (FileNotFoundError, ProcessLookupError):  # the thread has ended meanwhile
            continue
        for child in children:
            yield from tree(int(child), proc)


def _read(pid: int, proc: Path) -> _Process:
    folder = proc / str(pid)
    process = _Process(pid, folder, "?")
    try:
        process.name = (folder / "comm").read_text().rstrip("\n")
        for fd in os.listdir(folder / "fd"):
            try:
                process.links[int(fd)] = os.readlink(folder / "fd" / fd)
            except FileNotFoundError:
                continue
    except (FileNotFoundError, ProcessLookupError):
        process.links.clear()
    return process


def _runtime_threads(process: _Process) -> Iterator[Finding]:
    for thread in _listing(process.folder / "task"):
        name = _text(process.folder / "task" / thread / "comm").rstrip("\n")
        if name.startswith(RUNTIME_THREADS):
            yield Finding(
                HookReason.RUNTIME_THREAD, process.pid, process.name, f"runtime thread {name}", thread=int(thread)
            )


def _rings(process: _Process) -> Iterator[Finding]:
    for fd, link in process.links.items():
        if link == "anon_inode:[io_uring]":
            yield Finding(HookReason.IO_URING_OPEN, process.pid, process.name, "an io_uring", fd=fd)
    for line in _text(process.folder / "maps").splitlines():
        if "anon_inode:[io_uring]" in line:
            what = f"an io_uring mapped at {line.split()[0]}"
            yield Finding(HookReason.IO_URING_OPEN, process.pid, process.name, what)


def _sockets(tree: list[_Process]) -> Iterator[Finding]:
    tables: dict[str, dict[int, Connection]] = {}
    held: list[tuple[_Process, int, Connection]] = []
    for process in tree:
        namespace = _link(process.folder / "ns" / "net")
        if namespace not in tables:
            tables[namespace] = {each.inode: each for each in connections(process.folder / "net")}
        for fd, link in process.links.items():
            match = _SOCKET.fullmatch(link)
            connection = tables[namespace].get(int(match[1])) if match else None
            if connection is not None:
                held.append((process, fd, connection))
    ends = {(each.protocol, each.local) for _, _, each in held}
    for process, fd, each in held:
        if each.remote is None or (each.protocol, each.remote) in ends:
            continue
        what = f"{each.protocol} connection to {each.remote}"
        yield Finding(HookReason.OUTSIDE_SOCKET, process.pid, process.name, what, fd=fd)


def _files(tree: list[_Process]) -> Iterator[Finding]:
    namespaces = {
        match[2] for each in tree for name in _listing(each.folder / "ns") if (match := _namespace(each.folder, name))
    }
    pipe_ends = _pipe_ends(tree)
    for process in tree:
        mounts = {line.split()[0] for line in _text(process.folder / "mountinfo").splitlines()}
        for fd, link in process.links.items():
            what = (
                _unreopenable_anonymous(link)
                or _unreopenable_namespace(link, namespaces)
                or _outside_pipe(fd, link, pipe_ends)
                or _unreopenable_path(process, fd, link, mounts)
            )
            if what:
                yield Finding(HookReason.UNREOPENABLE_FILE, process.pid, process.name, what, fd=fd)


def _unreopenable_anonymous(link: str) -> str | None:
    match = _ANONYMOUS.fullmatch(link)
    if match is None or match[1] in CAPTURABLE_ANONYMOUS or match[1] == "io_uring":  # a ring has its own reason
        return None
    return f"{link}, which CRIU cannot dump"


def _unreopenable_namespace(link: str, own: set[str]) -> str | None:
    match = _NAMESPACE.fullmatch(link)
    return f"{link}, a namespace that is not the worker's own" if match and match[2] not in own else None


def _outside_pipe(fd: int, link: str, ends: dict[str, set[int]]) -> str | None:
    """A pipe whose other end is not in the tree: after a restore nobody is there to write to."""
    match = _PIPE.fullmatch(link)
    if match is None or fd in _STANDARD or len(ends[match[1]]) == 2:
        return None
    return f"{link}, whose other end is outside"


def _unreopenable_path(process: _Process, fd: int, link: str, mounts: set[str]) -> str | None:
    if not link.startswith("/") or link.startswith("/memfd:"):
        return None
    if link.startswith(("/dev/pts/", "/dev/tty")):
        return f"the terminal {link}"
    try:
        status = os.stat(process.folder / "fd" / str(fd))
    except OSError:  # closed meanwhile, or a path that cannot be followed from here: CRIU has the last word
        return None
    deleted = link.endswith(_DELETED)
    if deleted and stat.S_ISREG(status.st_mode) and status.st_nlink == 0 and status.st_size > LARGEST_GHOST_BYTES:
        return f"{link}, unlinked and too large ({status.st_size >> 20} MiB) to go into the image"
    mount = _fdinfo(process, fd).get("mnt_id")
    if mount is not None and mount not in mounts and not stat.S_ISSOCK(status.st_mode):
        return f"{link}, opened in another mount namespace"
    return None


def _pipe_ends(tree: list[_Process]) -> dict[str, set[int]]:
    """For each pipe the access modes (read, write) that the tree holds; opened for both counts as both."""
    ends: dict[str, set[int]] = {}
    for process in tree:
        for fd, link in process.links.items():
            if match := _PIPE.fullmatch(link):
                mode = int(_fdinfo(process, fd).get("flags", "0"), 8) & os.O_ACCMODE
                held = {os.O_RDONLY, os.O_WRONLY} if mode == os.O_RDWR else {mode}
                ends.setdefault(match[1], set()).update(held)
    return ends


def _namespace(folder: Path, name: str) -> re.Match[str] | None:
    return _NAMESPACE.fullmatch(_link(folder / "ns" / name))


def _fdinfo(process: _Process, fd: int) -> dict[str, str]:
    lines = _text(process.folder / "fdinfo" / str(fd)).splitlines()
    return {name: value.strip() for name, _, value in (line.partition(":") for line in lines)}


def _listing(folder: Path) -> list[str]:
    try:
        return os.listdir(folder)
    except (FileNotFoundError, ProcessLookupError):
        return []


def _text(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except (FileNotFoundError, ProcessLookupError):
        return ""


def _link(path: Path) -> str:
    try:
        return os.readlink(path)
    except (FileNotFoundError, ProcessLookupError):
        return ""
