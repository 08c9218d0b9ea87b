"""The machine a figure was measured on, and how busy it is."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from dynamo_snapshot.agent.idle import cpu_times

PACKAGES = ("dynamo-snapshot", "ai-dynamo", "ai-dynamo-runtime", "aetcd", "nats-py")


def environment(criu: Path | None = None, packages: Sequence[str] = ()) -> dict[str, Any]:
    """Kernel, processors, memory and versions, of ``packages`` too; what cannot be told is None."""
    return {
        "kernel": platform.release(),
        "distribution": _distribution(),
        "cpus": len(os.sched_getaffinity(0)),
        "cpu_model": _field(Path("/proc/cpuinfo"), "model name"),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "python": platform.python_version(),
        "criu": _version([str(criu), "--version"]) if criu else None,
        "packages": {name: _package(name) for name in (*PACKAGES, *packages)},
    }


class CpuMeter:
    """Shares of the machine's CPU time since the last look, 0 to 1."""

    def __init__(self) -> None:
        self._last = cpu_times()

    def idle(self) -> float:
        """The idle share since the last call, or since the meter was made."""
        before, self._last = self._last, cpu_times()
        total = self._last[1] - before[1]
        return (self._last[0] - before[0]) / total if total > 0 else 1.0


def process_cpu_seconds(pid: int) -> float:
    """CPU seconds that ``pid`` has used, in user and kernel mode; 0 if it is gone."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    except (OSError, IndexError):
        return 0.0
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _distribution() -> str | None:
    try:
        return platform.freedesktop_os_release().get("PRETTY_NAME")
    except OSError:
        return None


def _field(path: Path, name: str) -> str | None:
    try:
        for line in path.read_text().splitlines():
            if line.startswith(name):
                return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return None


def _package(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _version(command: list[str]) -> str | None:
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=10, check=True).stdout.splitlines()[0]
    except (OSError, subprocess.SubprocessError, IndexError):
        return None
