"""Prometheus metrics of a process: what a metric is called and means, and where they are read."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Literal

import structlog
from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.exposition import choose_encoder

log = structlog.get_logger()

PATH = "/metrics"
RETRY_S = 10.0
"""How soon a port that was taken is tried again."""
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

    A port that is taken is tried again until it is free: replicas are looked after without metrics, too.
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

    async def listens() -> bool:
        site = web.TCPSite(runner, host, port)
        try:
            await site.start()
        except OSError as error:
            log.error("metrics_not_exposed", host=host, port=port, cause=error.strerror, next_try_in_s=RETRY_S)
            await site.stop()
            return False
        return True

    async def listen_later() -> None:
        while True:
            await asyncio.sleep(RETRY_S)
            if await listens():
                return

    later = None if await listens() else asyncio.create_task(listen_later(), name="metrics")
    try:
        yield
    finally:
        if later is not None:
            later.cancel()
            await asyncio.gather(later, return_exceptions=True)
        await runner.cleanup()
