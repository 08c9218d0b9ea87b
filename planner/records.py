"""Decision records: one line of JSON a tick and role, with the inputs and the reason."""

from __future__ import annotations

import json
import logging
import math
from pathlib import Path
from typing import Any

from planner.observation import Observation
from planner.policy import Proposal

log = logging.getLogger(__name__)

MAX_BYTES = 64 << 20
"""At this size the file is moved to ``<name>.1``, replacing an older one."""


def record(at: float, observation: Observation, proposal: Proposal) -> dict[str, Any]:
    """One decision as JSON-ready values. ``at`` is wall-clock seconds; loads are requests."""
    return {
        "at": at,
        "role": proposal.role.value,
        "action": proposal.action.value,
        "replicas": proposal.replicas,
        "floor": proposal.floor,
        "desired": proposal.desired,
        "reason": proposal.reason,
        "ready": observation.ready,
        "running": proposal.load.running,
        "queued": proposal.load.queued,
        "fresh_workers": proposal.load.fresh,
        "unknown": list(proposal.load.unknown),
        "workers": {
            f"{sample.worker_id}/{sample.dp_rank}": [_plain(sample.running), _plain(sample.queued)]
            for sample in observation.samples
        },
    }


def _plain(value: float | None) -> float | None:
    """JSON knows neither NaN nor infinity."""
    return value if value is not None and math.isfinite(value) else None


class DecisionLog:
    """Appends records to a file; a file that cannot be written is reported once and never stops a decision."""

    def __init__(self, path: Path | None, max_bytes: int = MAX_BYTES) -> None:
        self._path = path
        self._max_bytes = max_bytes
        self._failing = False

    def write(self, entry: dict[str, Any]) -> None:
        if self._path is None:
            return
        try:
            with self._path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(entry, allow_nan=False, default=str) + "\n")
                size = file.tell()
            if size >= self._max_bytes:
                self._path.replace(self._path.with_name(self._path.name + ".1"))
            self._failing = False
        except (OSError, ValueError) as error:
            if not self._failing:
                log.warning("decision log %s cannot be written: %s", self._path, error)
            self._failing = True
