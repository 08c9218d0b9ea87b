"""Puts a fleet controller together from a fleet's configuration."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import Mapping

from dynamo_snapshot import metrics
from dynamo_snapshot.bus.directory import FOLDER, DirectoryBus
from dynamo_snapshot.config import ETCD_ENV, NATS_ENV, Fleet
from dynamo_snapshot.discovery.etcd import EtcdDiscovery
from dynamo_snapshot.errors import SnapshotError
from dynamo_snapshot.fleet.controller import Controller
from dynamo_snapshot.fleet.decisions import DynamoPlanner
from dynamo_snapshot.fleet.hints import NatsHints
from dynamo_snapshot.fleet.metrics import FleetMetrics
from dynamo_snapshot.fleet.persistence import etcd_store
from dynamo_snapshot.fleet.publisher import file_and_nats
from dynamo_snapshot.fleet.rules import fleet_rules
from dynamo_snapshot.model import Reason


async def serve(fleet: Fleet) -> None:
    """Runs ``fleet``'s controller until SIGTERM or SIGINT. Replicas and orders live on without it.

    Raises:
        SnapshotError: ``configuration_invalid`` when nothing says where etcd and NATS are; otherwise
            what :meth:`Controller.run` raises.
    """
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    running = asyncio.create_task(run_controller(fleet, os.environ), name="controller")
    stopping = asyncio.create_task(stop.wait(), name="stop")
    await asyncio.wait({running, stopping}, return_when=asyncio.FIRST_COMPLETED)
    stopping.cancel()
    if not running.done():
        running.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await running
    else:
        running.result()


async def run_controller(fleet: Fleet, environment: Mapping[str, str]) -> None:
    """Runs ``fleet``'s controller until it is cancelled."""
    etcd_url = _known("etcd", fleet.servers.etcd_url(environment), ETCD_ENV)
    nats_url = _known("nats", fleet.servers.nats_url(environment), NATS_ENV)
    rules = fleet_rules(fleet, etcd_url, nats_url, environment)
    endpoints = [f"{fleet.namespace}.{pool.component}.{pool.endpoint}" for pool in fleet.pools.values()]
    # The child's Dynamo looks for its servers in the environment.
    child = {**environment, **next(iter(rules.pools.values())).worker.incarnation_environment}
    child["DYN_SKIP_SGLANG_LOG_FORMATTING"] = "1"  # it would leave a file in the folder for temporary files
    registry = metrics.registry()
    async with (
        etcd_store(etcd_url, fleet.namespace) as store,
        file_and_nats(fleet.agent.runtime_dir, nats_url, fleet.namespace) as publisher,
        metrics.exposed(registry, fleet.metrics.host, fleet.metrics.controller_port),
    ):
        await Controller(
            rules,
            DirectoryBus(fleet.agent.runtime_dir / FOLDER),
            EtcdDiscovery(etcd_url, fleet.namespace),
            store,
            DynamoPlanner(etcd_url, fleet.namespace, endpoints, environment=child),
            FleetMetrics(registry, publisher),
            NatsHints(nats_url, fleet.namespace),
        ).run()


def _known(name: str, url: str | None, variable: str) -> str:
    if url is None:
        raise SnapshotError(
            Reason.CONFIGURATION_INVALID,
            f"servers.{name} is 'embedded', and {variable} does not say where it runs",
            f"Let `dynamo-snapshot up` start the controller, set {variable}, or name a URL in fleet.yaml.",
        )
    return url
