"""One look at a fleet of this host, from what its parts publish: for the live view and for `status`."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import aiohttp
import msgspec

from dynamo_snapshot.bus.directory import FOLDER
from dynamo_snapshot.local.planner_log import latest_reason
from dynamo_snapshot.local.processes import DECISION_LOG, FLEET_STATUS
from dynamo_snapshot.local.service import ServiceStatus
from dynamo_snapshot.model import FleetStatus, Reported, decode

if TYPE_CHECKING:
    from dynamo_snapshot.local.up import LocalFleet

T = TypeVar("T")

VIEW_INTERVAL_S = 0.5
STALE_AFTER_S = 10.0
"""A status older than this is shown with its age: its controller does not write."""


@dataclass(frozen=True, kw_only=True)
class FleetView:
    """A fleet as it shows itself. ``at`` is wall-clock seconds; None and empty mean: not known."""

    at: float
    status: FleetStatus | None = None
    reports: dict[str, Reported] = field(default_factory=dict)
    services: tuple[ServiceStatus, ...] = ()
    requests_per_s: float | None = None
    planner: str | None = None
    """The planner's newest decision with its reason."""

    @property
    def status_age_s(self) -> float | None:
        return None if self.status is None else max(0.0, self.at - self.status.at)


def read_view(
    runtime_dir: Path, services: tuple[ServiceStatus, ...] = (), requests_per_s: float | None = None
) -> FleetView:
    """Reads what controller and agents have published in ``runtime_dir``; what cannot be read is not known."""
    reports = {}
    folder = runtime_dir / FOLDER / "reported"
    for path in sorted(folder.glob("*.json")) if folder.is_dir() else ():
        reported = _read(path, Reported)
        if reported is not None and not path.name.startswith("."):
            reports[reported.node] = reported
    return FleetView(
        at=time.time(),
        status=_read(runtime_dir / FLEET_STATUS, FleetStatus),
        reports=reports,
        services=services,
        requests_per_s=requests_per_s,
        planner=latest_reason(runtime_dir / DECISION_LOG),
    )


async def observe(local: LocalFleet, show: Callable[[FleetView], None]) -> None:
    """Shows a fresh view every half second until cancelled."""
    rate = RequestRate(f"{local.frontend_url}/metrics")
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=1)) as session:
        while True:
            requests_per_s = await rate.read(session)
            show(read_view(local.runtime_dir, local.supervisor.status(), requests_per_s))
            await asyncio.sleep(VIEW_INTERVAL_S)


class RequestRate:
    """Requests a second from the frontend's counter, over the last few looks."""

    WINDOW = 6

    def __init__(self, url: str) -> None:
        self._url = url
        self._looks: list[tuple[float, float]] = []

    async def read(self, session: aiohttp.ClientSession) -> float | None:
        try:
            async with session.get(self._url) as answer:
                total = counter_total(await answer.text(), "dynamo_frontend_requests_total")
        except (aiohttp.ClientError, OSError, TimeoutError):
            self._looks.clear()
            return None
        if self._looks and total < self._looks[-1][1]:
            self._looks.clear()  # the frontend was started again
        self._looks = [*self._looks[-self.WINDOW :], (time.monotonic(), total)]
        (first_at, first), (last_at, last) = self._looks[0], self._looks[-1]
        return (last - first) / (last_at - first_at) if last_at > first_at else None


def counter_total(text: str, name: str) -> float:
    """The sum over all labels of a counter in Prometheus' text format."""
    rows = (line.rpartition(" ") for line in text.splitlines() if line.startswith((f"{name}{{", f"{name} ")))
    return sum(float(value) for _, _, value in rows)


def _read(path: Path, kind: type[T]) -> T | None:
    try:
        return decode(path.read_bytes(), kind)
    except (OSError, msgspec.DecodeError):
        return None
