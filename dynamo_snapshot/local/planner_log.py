"""What our planner plugin decided and why, read from its decision log."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

TAIL_BYTES = 8192


def planner_changes(log: Path) -> list[dict[str, Any]]:
    """The decisions that differ from the one before for the same role: at, role, action, replicas, reason, load."""
    changes = []
    last: dict[str, Any] = {}
    try:
        lines = log.read_text(encoding="utf-8").splitlines()
    except OSError:
        return []
    for entry in filter(None, map(_entry, lines)):
        if last.get(entry["role"]) != entry["replicas"]:
            last[entry["role"]] = entry["replicas"]
            changes.append(
                {name: entry[name] for name in ("at", "role", "action", "replicas", "running", "queued", "reason")}
            )
    return changes


def latest_reason(log: Path) -> str | None:
    """The newest decision with its reason, for a person; None: there is none."""
    try:
        with log.open("rb") as file:
            file.seek(max(0, log.stat().st_size - TAIL_BYTES))
            lines = file.read().decode("utf-8", "replace").splitlines()
    except OSError:
        return None
    entry = next(filter(None, map(_entry, reversed(lines))), None)
    return None if entry is None else f"{entry['role']}: {entry['reason']}"


def _entry(line: str) -> dict[str, Any] | None:
    """One record; None for a line that is being written."""
    try:
        entry = json.loads(line)
    except ValueError:
        return None
    return entry if isinstance(entry, dict) and "role" in entry else None
