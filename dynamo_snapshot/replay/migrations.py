"""Which requests Dynamo's frontend moved to another worker, and from which: read from its log and metrics.

A response names the worker that a request was first routed to and keeps naming it after a migration, so
only the frontend tells. Its log (level info) says ``migration retry scheduled`` once a migration, with the
worker and with the ``x-request-id`` that the client sent.
"""

from __future__ import annotations

import re
from pathlib import Path

from dynamo_snapshot.model import Value

_SGR = re.compile(r"\x1b\[[0-9;]*m")
_MARK = "migration retry scheduled"
_FROM = re.compile(r"migration\.from_worker_id=\"?(\d+)")
_REQUEST = re.compile(r"x_request_id=\"?([^\s\"]+)")
_WHY = re.compile(r"migration\.reason=\"?([^\s\"]+)")
_TOTAL = re.compile(r"^dynamo_frontend_model_migration_total\{([^}]*)\}\s+(\S+)", re.MULTILINE)


class Migration(Value, frozen=True):
    """One request moved once."""

    request_id: str | None
    """The client's ``x-request-id``; None: it sent none."""
    from_worker: int | None
    reason: str


def migrations(log: Path) -> tuple[Migration, ...]:
    """Returns the migrations that a frontend's log names, in its order."""
    found = []
    with log.open(encoding="utf-8", errors="replace") as file:
        for raw in file:
            if _MARK not in raw:
                continue
            line = _SGR.sub("", raw)
            worker, request, why = _FROM.search(line), _REQUEST.search(line), _WHY.search(line)
            found.append(
                Migration(
                    request_id=request[1] if request else None,
                    from_worker=int(worker[1]) if worker else None,
                    reason=why[1] if why else "",
                )
            )
    return tuple(found)


def migration_total(metrics: str) -> int:
    """Returns how many migrations the text of a frontend's ``/metrics`` counts, over models and kinds."""
    return int(sum(float(value) for _, value in _TOTAL.findall(metrics)))
