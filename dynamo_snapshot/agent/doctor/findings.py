"""What the doctor finds, and where it looks."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path

from dynamo_snapshot.agent.direct_folder import DIRECT_DIR
from dynamo_snapshot.model import Value


class Severity(StrEnum):
    OK = "ok"
    WARNING = "warning"
    """Something is slower, or missing that only some fleets need."""
    ERROR = "error"
    """Restoring cannot work."""


class Finding(Value, frozen=True):
    check: str
    severity: Severity
    seen: str
    remedy: str = ""


class Host(Value, frozen=True):
    """Where to look."""

    store_dir: Path
    runtime_dir: Path
    minimum_free_bytes: int
    criu: Path | None = None
    """The criu that the configuration names, if any."""
    direct_dir: Path = DIRECT_DIR
    """Where `capture` and `restore` keep what is theirs while they run."""
    proc: Path = Path("/proc")
    sys: Path = Path("/sys")


def ok(check: str, seen: str, remedy: str = "") -> Finding:
    return Finding(check=check, severity=Severity.OK, seen=seen, remedy=remedy)


def warning(check: str, seen: str, remedy: str) -> Finding:
    return Finding(check=check, severity=Severity.WARNING, seen=seen, remedy=remedy)


def error(check: str, seen: str, remedy: str) -> Finding:
    return Finding(check=check, severity=Severity.ERROR, seen=seen, remedy=remedy)
