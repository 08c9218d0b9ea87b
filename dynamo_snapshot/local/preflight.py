"""Everything that must be so before a fleet starts on this host; checked whole, before anything runs."""

from __future__ import annotations

import importlib.util
import os
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

from dynamo_snapshot.agent.criu.command import find as find_criu
from dynamo_snapshot.agent.criu.probe import probe_criu
from dynamo_snapshot.agent.doctor.examine import Check
from dynamo_snapshot.agent.doctor.findings import Finding, Host, error, ok
from dynamo_snapshot.config import Fleet, ScalingPolicy
from dynamo_snapshot.errors import SnapshotError
from dynamo_snapshot.local.ports import require_free
from dynamo_snapshot.local.processes import planner_configuration
from dynamo_snapshot.local.servers import server_program
from dynamo_snapshot.model import Reason
from dynamo_snapshot.programs import find_program
from planner.config import plugin_options
from planner.engine import engine_from_options


def check(fleet: Fleet) -> None:
    """Raises the first ``SnapshotError`` that would keep ``fleet`` from running here; changes nothing."""
    require_planner(fleet)
    require_root()
    require_criu(fleet.agent.criu)
    require_dynamo()
    require_model(fleet)
    require_commands(fleet)
    require_servers(fleet)
    require_free(
        fleet.frontend.host,
        fleet.frontend.port,
        "the frontend",
        "Stop what listens there, or choose another frontend.port in fleet.yaml.",
    )
    for part, port in (("controller", fleet.metrics.controller_port), ("agent", fleet.metrics.agent_port)):
        if port:
            remedy = f"Stop what listens there, or choose another metrics.{part}_port in fleet.yaml."
            require_free(fleet.metrics.host, port, f"the {part}, for its metrics,", remedy)
    require_space(fleet.agent.store_dir, fleet.agent.minimum_free_bytes)


def fleet_checks(fleet: Fleet) -> dict[str, Check]:
    """What the doctor asks of a fleet beside its host: whether its file names what is there."""
    programs = dict.fromkeys(pool.worker.command[0] for pool in fleet.pools.values())
    return {
        "planner": _check("planner", require_planner, fleet, f"policy {fleet.planner.policy}, as the fleet sets it"),
        "model": _check("model", require_model, fleet, str(fleet.model.path)),
        "workers": _check("workers", require_commands, fleet, f"run {', '.join(programs)}"),
    }


def _check(name: str, require: Callable[[Fleet], None], fleet: Fleet, seen: str) -> Check:
    def check(_: Host) -> Iterator[Finding]:
        try:
            require(fleet)
        except SnapshotError as problem:
            yield error(name, problem.message, problem.remedy)
        else:
            yield ok(name, seen)

    return check


def require_planner(fleet: Fleet) -> None:
    """Has the planner's plugin look at its options here, as it will when it starts."""
    if fleet.planner.policy is not ScalingPolicy.SNAPSHOT:
        return
    # It reads the file of what was learnt, which is no part of the question; NATS has no address before it runs.
    options = {**plugin_options(planner_configuration(fleet)), "learnt_path": None, "hints_nats": "nats://later:4222"}
    try:
        engine_from_options(**options)
    except (ArithmeticError, TypeError, ValueError) as refusal:
        raise SnapshotError(
            Reason.CONFIGURATION_INVALID,
            f"planner: {_in_fields(str(refusal))}",
            "docs/fleet-reference.md lists every field with its unit and default.",
        ) from refusal


def _in_fields(text: str) -> str:
    """The plugin's words with the fields of fleet.yaml."""
    return text.replace("spare_replicas", "headroom_replicas").replace("roles.", "pools of role ")


def require_root() -> None:
    if os.geteuid() != 0:
        raise SnapshotError(
            Reason.NOT_PRIVILEGED,
            f"this runs as user {os.geteuid()}, and CRIU, namespaces and mounts need root",
            "Run it as root, for instance with sudo.",
        )


def require_criu(configured: Path | None) -> None:
    criu = find_criu(configured)
    # Tried, not asked for its version: whether it works depends on the kernel. It takes half a second.
    probe = probe_criu(criu)
    if not probe.works:
        raise SnapshotError(
            Reason.CRIU_TOO_OLD,
            f"{criu} ({probe.version or 'version unknown'}) cannot dump and restore a process here: {probe.problem}",
            "Run `dynamo-snapshot install-criu`, or name another one under agent.criu.",
        )


def require_dynamo() -> None:
    # Looked for, not imported: the import takes seconds.
    if importlib.util.find_spec("dynamo") is None or importlib.util.find_spec("dynamo.frontend") is None:
        raise SnapshotError(
            Reason.CONFIGURATION_INVALID,
            f"NVIDIA Dynamo is not installed in {sys.prefix}",
            "Install the pinned set: uv pip sync --require-hashes requirements.lock.",
        )


def require_model(fleet: Fleet) -> None:
    path = fleet.model.path
    if not (path / "config.json").is_file():
        what = "has no config.json" if path.is_dir() else "is not a folder"
        raise SnapshotError(
            Reason.CONFIGURATION_INVALID,
            f"model.path: {path} {what}",
            "Name a folder with the model's files; for Dynamo's mocker "
            f"`python -m dynamo_snapshot.local.tiny_model {path}` writes one.",
        )


def require_commands(fleet: Fleet) -> None:
    for name, pool in fleet.pools.items():
        program = pool.worker.command[0]
        if find_program(program) is None:  # as a worker will look for it
            raise SnapshotError(
                Reason.CONFIGURATION_INVALID,
                f"pools.{name}.worker.command: {program} is neither beside {sys.executable} nor on PATH",
                "Give its full path, or install it.",
            )


def require_servers(fleet: Fleet) -> None:
    if fleet.servers.etcd == "embedded":
        server_program("etcd")
    if fleet.servers.nats == "embedded":
        server_program("nats-server")


def require_space(folder: Path, free_bytes: int) -> None:
    existing = next(parent for parent in (folder, *folder.parents) if parent.exists())
    free = shutil.disk_usage(existing).free
    if free < free_bytes:
        raise SnapshotError(
            Reason.DISK_FULL,
            f"{existing} has {free >> 20} MiB free, and agent.minimum_free_bytes asks for {free_bytes >> 20}",
            "Make room, or name another agent.store_dir in fleet.yaml.",
        )
