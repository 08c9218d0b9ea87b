"""Prometheus metrics of a process: what a metric is called and means, and where they are read."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Literal

from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.exposition import choose_encoder

from dynamo_snapshot.errors import SnapshotError
from dynamo_snapshot.model import Reason

PATH = "/metrics"
SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0)
"""Upper bounds of histograms: from a phase of a restore to the boot of a large engine."""


@dataclass(frozen=True)
class Family:
    """One metric as ``docs/metrics.md`` lists it."""

    name: str
    kind: Literal["counter", "gauge", "histogram"]
    """The name of a counter ends in ``_total``."""
    meaning: str
    labels: tuple[str, ...] = ()

    def gauge(self, rows: Iterable[tuple[tuple[str, ...], float]]) -> GaugeMetricFamily:
        """A gauge with these label values and numbers, for a collector."""
        family = GaugeMetricFamily(self.name, self.meaning, labels=self.labels)
        for labels, value in rows:
            family.add_metric(labels, value)
        return family


def registry() -> CollectorRegistry:
    """A registry with what the kernel knows of this process, as ``process_…``."""
    made = CollectorRegistry(auto_describe=False)
    ProcessCollector(registry=made)
    return made


@asynccontextmanager
async def exposed(metrics: CollectorRegistry, host: str, port: int) -> AsyncIterator[None]:
    """Within: ``metrics`` are read at ``http://host:port/metrics``, by this event loop. Port 0: nowhere.

    Raises:
        SnapshotError: ``port_in_use``.
    """
    if not port:
        yield
        return
    from aiohttp import web  # who exposes nothing need not wait for it

    async def answer(request: web.Request) -> web.Response:
        encode, content_type = choose_encoder(request.headers.get("Accept", ""))
        return web.Response(body=encode(metrics), headers={"Content-Type": content_type})

    application = web.Application()
    application.router.add_get(PATH, answer)
    runner = web.AppRunner(application, access_log=None)
    await runner.setup()
    try:
        try:
            await web.TCPSite(runner, host, port).start()
        except OSError as error:
            raise SnapshotError(
                Reason.PORT_IN_USE,
                f"{host}:{port}, for metrics, cannot be used: {error.strerror}",
                "Stop what listens there, or choose another port under metrics in fleet.yaml; 0 is none.",
            ) from error
        yield
    finally:
        await runner.cleanup()
