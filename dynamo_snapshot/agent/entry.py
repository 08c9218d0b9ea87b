"""Puts a node agent together from a fleet's configuration."""

from __future__ import annotations

import asyncio
import fcntl
import os
import signal
import sys
from collections.abc import Mapping
from pathlib import Path

from dynamo_snapshot import metrics
from dynamo_snapshot.agent.compatibility_cache import CompatibilityCache
from dynamo_snapshot.agent.criu.command import Criu
from dynamo_snapshot.agent.gpus import Gpus
from dynamo_snapshot.agent.house import HostHouses
from dynamo_snapshot.agent.journal import Journal
from dynamo_snapshot.agent.metrics import AgentMetrics
from dynamo_snapshot.agent.node import Discoverable, Node, nowhere
from dynamo_snapshot.agent.registered import asking
from dynamo_snapshot.agent.service import AgentService
from dynamo_snapshot.bus.directory import FOLDER, DirectoryBus
from dynamo_snapshot.bus.interface import Bus
from dynamo_snapshot.config import Agent as Settings
from dynamo_snapshot.config import Fleet
from dynamo_snapshot.errors import SnapshotError
from dynamo_snapshot.model import Reason
from dynamo_snapshot.snapshots.store import SnapshotStore
from worker_hooks.guard import scan

JOURNAL = Path("agent", "journal")
LOCK = Path("agent", "lock")


async def run_agent(
    fleet: Fleet, node: str, bus: Bus, stop: asyncio.Event, *, discoverable: Discoverable = nowhere
) -> None:
    """Runs ``fleet``'s agent as ``node`` until ``stop`` is set; replicas that serve live on and are adopted later.

    Args:
        discoverable: asked before a capture whether an instance with this TCP port is registered.

    Raises:
        SnapshotError: ``criu_missing``, ``not_privileged``, or ``runtime_dir_in_use`` where another agent runs.
    """
    lock = hold_runtime_dir(fleet.agent.runtime_dir)
    try:
        made, compatibility = build_node(fleet.agent, discoverable)
        policies = {name: pool.snapshot for name, pool in fleet.pools.items()}
        registry = metrics.registry()
        observer = AgentMetrics(registry, fleet.pools)
        async with metrics.exposed(registry, fleet.metrics.host, fleet.metrics.agent_port):
            await AgentService(node, made, bus, compatibility, policies, observer).run(stop)
    finally:
        os.close(lock)


async def serve(fleet: Fleet, node: str) -> None:
    """Runs ``fleet``'s agent on the bus in its runtime folder until SIGTERM or SIGINT.

    Embedded servers have ports that only their starter knows: it sets ``ETCD_ENDPOINTS``, as for any Dynamo process.
    """
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    bus = DirectoryBus(fleet.agent.runtime_dir / FOLDER)
    await run_agent(fleet, node, bus, stop, discoverable=_discovery(fleet, os.environ))


def _discovery(fleet: Fleet, environment: Mapping[str, str]) -> Discoverable:
    """Where workers of ``fleet`` register; nowhere that the agent could look, if it was told no etcd."""
    url = fleet.servers.etcd_url(environment)
    if url is None:
        return nowhere
    from dynamo_snapshot.discovery.etcd import EtcdDiscovery

    return asking(EtcdDiscovery(url, fleet.namespace))


def build_node(settings: Settings, discoverable: Discoverable = nowhere) -> tuple[Node, CompatibilityCache]:
    """Returns a node of this host, with its journal read. Blocks for some 50 ms."""
    # Workers and what they are compatible with are looked up alike: beside this Python first.
    beside = str(Path(sys.executable).parent)
    search = os.environ.get("PATH", os.defpath)
    if beside not in search.split(os.pathsep):
        os.environ["PATH"] = f"{beside}{os.pathsep}{search}"
    criu = Criu.locate(settings.criu)
    compatibility = CompatibilityCache(criu.version)
    store = SnapshotStore(settings.store_dir)
    node = Node(
        settings=settings,
        houses=HostHouses(settings.runtime_dir, settings.standby_houses),
        store=store,
        criu=criu,
        journal=Journal(settings.runtime_dir / JOURNAL),
        parts=compatibility,
        guard=scan,
        discoverable=discoverable,
        gpus=Gpus.of_host(settings.gpu, settings.runtime_dir, store.segments.folder),
    )
    return node, compatibility


def hold_runtime_dir(runtime_dir: Path) -> int:
    """Returns a descriptor whose lock makes this process the only agent of ``runtime_dir``."""
    path = runtime_dir / LOCK
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise SnapshotError(
            Reason.NOT_PRIVILEGED,
            f"{error.filename}: {error.strerror}",
            "Run the agent as root, or name another agent.runtime_dir.",
        ) from error
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        raise SnapshotError(
            Reason.RUNTIME_DIR_IN_USE,
            f"another agent works in {runtime_dir}",
            "Stop it first, or name another agent.runtime_dir.",
        ) from None
    return descriptor
