"""What is mounted where, in this process's mount namespace."""

from __future__ import annotations

import re
from pathlib import Path


def mount_points(*folders: Path, table: str | None = None) -> list[str]:
    """Mount points at or below ``folders``, the innermost first.

    Args:
        table: the text of a mountinfo file (proc_pid_mountinfo(5)) to look at instead of this process's.
    """
    text = Path("/proc/self/mountinfo").read_text() if table is None else table
    points = [_unescaped(line.split()[4]) for line in text.splitlines()]
    inside = {point for point in points for folder in folders if _within(point, folder)}
    return sorted(inside, key=len, reverse=True)


def _within(path: str, folder: Path) -> bool:
    return path == str(folder) or path.startswith(f"{folder}/")


def _unescaped(field: str) -> str:
    # The kernel writes blanks, tabs, line ends and backslashes as \ooo.
    return re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), field)
