"""What of this host a snapshot depends on: kernel, CPU features, GPUs and their driver."""

from __future__ import annotations

import platform
import re
import shutil
import subprocess
from pathlib import Path

from dynamo_snapshot.model import Value

_TIMEOUT_S = 20.0


class HostFacts(Value, frozen=True):
    architecture: str
    kernel: str
    cpu_features: tuple[str, ...]
    gpu_models: tuple[str, ...]
    gpu_driver: str


def read_host_facts(proc: Path = Path("/proc")) -> HostFacts:
    """Returns the facts of this host; GPUs from the driver's files, or else from nvidia-smi."""
    models, driver = _gpus_of_driver(proc / "driver" / "nvidia")
    if not driver:
        models, driver = _gpus_of_nvidia_smi()
    return HostFacts(
        architecture=platform.machine(),
        kernel=platform.release(),
        cpu_features=cpu_features((proc / "cpuinfo").read_text(errors="replace")),
        gpu_models=tuple(sorted(models)),
        gpu_driver=driver,
    )


def cpu_features(cpuinfo: str) -> tuple[str, ...]:
    """Returns, sorted, the features that every processor in ``/proc/cpuinfo`` has (``flags``; on Arm ``Features``)."""
    lines = re.findall(r"^(?:flags|Features)\s*:\s*(.*)$", cpuinfo, re.MULTILINE)
    return tuple(sorted(set.intersection(*(set(line.split()) for line in lines)))) if lines else ()


def _gpus_of_driver(folder: Path) -> tuple[list[str], str]:
    try:
        version = re.search(r"Kernel Module.*?(\d{3,}\.[\d.]+)", (folder / "version").read_text(errors="replace"))
    except OSError:
        return [], ""
    models = []
    for information in sorted((folder / "gpus").glob("*/information")):
        model = re.search(r"^Model:\s*(.*\S)", information.read_text(errors="replace"), re.MULTILINE)
        models.append(model[1] if model else "unknown")
    return models, version[1] if version else "unknown"


def _gpus_of_nvidia_smi() -> tuple[list[str], str]:
    program = shutil.which("nvidia-smi")
    if program is None:
        return [], ""
    query = [program, "--query-gpu=name,driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(query, capture_output=True, text=True, timeout=_TIMEOUT_S, check=True)
    except (OSError, subprocess.SubprocessError):
        return [], ""
    rows = [[field.strip() for field in line.split(",")] for line in done.stdout.splitlines() if "," in line]
    return [row[0] for row in rows], rows[0][-1] if rows else ""
