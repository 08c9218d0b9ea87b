"""One cgroup a replica, where the host allows: a limit, and a way to end everything at once.

Version 2 only, also beside version 1 (``/sys/fs/cgroup/unified``). The groups lie at the top of the
hierarchy and not below the agent's own: a service manager that stops the agent ends its group, and
serving replicas must outlive the agent.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Iterable
from pathlib import Path

import structlog

log = structlog.get_logger()

_TOP = "dynamo-snapshot"


class Cgroups:
    """The groups of one runtime folder's replicas. Every method does nothing where version 2 is not writable."""

    def __init__(self, runtime_dir: Path, mount: Path | None = None) -> None:
        mount = mount or _mount()
        name = hashlib.sha256(str(runtime_dir.resolve()).encode()).hexdigest()[:12]
        self.base = mount / _TOP / name if mount else None

    def make(self, replica_id: str, memory_limit_bytes: int | None) -> Path | None:
        """Returns the new group's folder, or None where the host has none to give."""
        if self.base is None:
            return None
        group = self.base / replica_id
        try:
            group.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            log.info("no_cgroup", folder=str(self.base), cause=error.strerror)
            self.base = None
            return None
        if memory_limit_bytes is not None and not self._limit(group, memory_limit_bytes):
            log.warning("memory_limit_not_applied", replica=replica_id, cause="no memory controller for cgroup v2")
        return group

    @staticmethod
    def move(group: Path, pids: Iterable[int]) -> None:
        """Moves processes into ``group``; what they start from then on is in it too."""
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                (group / "cgroup.procs").write_text(str(pid))

    def find(self, replica_id: str) -> Path | None:
        group = self.base / replica_id if self.base else None
        return group if group and group.is_dir() else None

    def existing(self) -> list[Path]:
        """Every replica's group that there is."""
        return sorted(path for path in self.base.iterdir() if path.is_dir()) if self.base and self.base.is_dir() else []

    def remove(self, group: Path) -> None:
        """Removes an empty group; its processes must have ended."""
        with contextlib.suppress(FileNotFoundError):
            group.rmdir()

    def remove_base(self) -> None:
        """Removes the folders above the replicas' groups unless someone still uses them."""
        if self.base is not None:
            with contextlib.suppress(OSError):
                self.base.rmdir()
                self.base.parent.rmdir()

    @staticmethod
    def processes(group: Path) -> list[int]:
        try:
            return [int(pid) for pid in (group / "cgroup.procs").read_text().split()]
        except OSError:
            return []

    @staticmethod
    def kill(group: Path) -> None:
        """Kills every process of the group (Linux 5.14)."""
        with contextlib.suppress(OSError):
            (group / "cgroup.kill").write_text("1")

    def _limit(self, group: Path, limit: int) -> bool:
        assert self.base is not None
        try:
            for folder in (self.base.parent.parent, self.base.parent, self.base):
                if "memory" not in (folder / "cgroup.subtree_control").read_text().split():
                    (folder / "cgroup.subtree_control").write_text("+memory")
            (group / "memory.max").write_text(str(limit))
        except OSError:
            return False
        return True


def _mount() -> Path | None:
    """Where cgroup v2 is mounted; None if it is not."""
    for line in Path("/proc/self/mounts").read_text().splitlines():
        _, where, kind, *_ = line.split()
        if kind == "cgroup2":
            return Path(where)
    return None
