"""What `bench restore` captures and restores: a worker of an example engine, of any size or model."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

from dynamo_snapshot.errors import SnapshotError
from dynamo_snapshot.model import Reason, WorkerSpec
from worker_hooks import holder

BOOT_S = 600.0
EXAMPLES = Path(__file__).parents[2] / "examples"

WorkerOf = Callable[[bool, Path], WorkerSpec]
"""The worker of a series: whether it keeps its weights out of its image, and the folder of their segments."""


@dataclass(frozen=True)
class Subject:
    """One case."""

    engine: str
    case: str
    worker: WorkerOf
    weight_bytes: int
    """At most; what may be pinned for it."""
    keeps_weights_apart_always: bool = False


def torch_subject(gib: float, environment: Mapping[str, str] = MappingProxyType({})) -> Subject:
    """The torch reference engine with ``gib`` GiB of weights."""
    command = (*_example("torch_engine.py"), "--house", holder.HOUSE, "--weights-gib", f"{gib:g}")

    def worker(detached: bool, segments: Path) -> WorkerSpec:
        apart = ("--segments", str(segments)) if detached else ()
        return _spec((*command, *apart), environment)

    return Subject("torch", f"{gib:g}GiB", worker, int((gib + 1) * (1 << 30)))


def vllm_subject(
    model: Path | None,
    case: str | None,
    arguments: Sequence[str],
    environment: Mapping[str, str] = MappingProxyType({}),
) -> Subject:
    """vLLM with the model in the folder ``model``, in vLLM's normal process tree.

    Args:
        case: the model's name in the results; the folder's unless given.
        arguments: more of them for ``examples/vllm_engine.py``.
        environment: of the worker.

    Raises:
        SnapshotError: ``configuration_invalid``: no such folder, or none with weights in safetensors.
    """
    weights = sum(file.stat().st_size for file in model.glob("*.safetensors")) if model is not None else 0
    if model is None or not weights:
        raise SnapshotError(
            Reason.CONFIGURATION_INVALID,
            f"{model or 'no folder'} has no model to measure vLLM with",
            "Give --model a folder with a configuration and weights in safetensors.",
        )
    command = (*_example("vllm_engine.py"), "--model", str(model.absolute()), *arguments)

    def worker(detached: bool, segments: Path) -> WorkerSpec:
        return _spec((*command, "--segments", str(segments)), environment)

    # The allocator rounds each block up: the segments are larger than the files.
    return Subject("vllm", case or model.absolute().name, worker, weights + (2 << 30), keeps_weights_apart_always=True)


def _spec(command: tuple[str, ...], environment: Mapping[str, str]) -> WorkerSpec:
    return WorkerSpec(command=command, environment=dict(environment), gpus=1, boot_timeout_s=BOOT_S)


def _example(name: str) -> tuple[str, str]:
    path = EXAMPLES / name
    if not path.exists():
        raise SnapshotError(
            Reason.CONFIGURATION_INVALID,
            f"{path} is missing: the engines to measure are in the source's examples/",
            "Run this from a checkout, installed with pip install -e.",
        )
    return sys.executable, str(path)
