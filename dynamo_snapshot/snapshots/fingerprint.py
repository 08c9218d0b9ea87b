"""Gathers a worker's compatibility parts on this host, now."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import msgspec

from dynamo_snapshot.errors import SnapshotError
from dynamo_snapshot.model import Reason, WorkerSpec
from dynamo_snapshot.snapshots.compatibility import CompatibilityParts, environment_that_matters
from dynamo_snapshot.snapshots.distributions import installed_distributions, interpreter_of
from dynamo_snapshot.snapshots.host_facts import HostFacts
from dynamo_snapshot.snapshots.model_files import identify_model

# An engine's name in module or program names, and the distribution whose version is the engine's.
_ENGINES = {"vllm": "vllm", "sglang": "sglang", "trtllm": "tensorrt-llm", "mocker": "ai-dynamo"}


def fingerprint(
    spec: WorkerSpec, host: HostFacts, criu_version: str, *, image_digest: str = "", engine: str | None = None
) -> CompatibilityParts:
    """Returns everything a snapshot must share with a cold start of ``spec`` here.

    Reads files and runs the command's Python once; what did not change since the last call is
    remembered. Takes about 0.2 s at first and 30 ms later: call it in a thread.

    Args:
        spec: the worker.
        host: of :func:`read_host_facts`.
        criu_version: of the criu that captures and restores.
        image_digest: of the container image that holds the command; what is installed outside one is
            looked up instead.
        engine: its name; None: taken from the command.

    Raises:
        SnapshotError: ``configuration_invalid`` when program or model cannot be read.
    """
    try:
        interpreter = interpreter_of(spec.command, spec.environment)
        distributions = installed_distributions(interpreter.path) if not image_digest else {}
    except OSError as error:  # an installation under way takes files away between a look and a read
        raise SnapshotError(
            Reason.CONFIGURATION_INVALID,
            f"what is installed for {spec.command[0]!r} cannot be read: {error.strerror}: {error.filename}",
            "It is looked at again by itself; if an installation was under way, nothing is to be done.",
        ) from error
    name = engine or engine_of(spec.command)
    return CompatibilityParts(
        engine=name,
        engine_version=distributions.get(_ENGINES.get(name, name), "").partition(" ")[0],
        command=spec.command,
        environment=environment_that_matters(spec.environment),
        model_files=identify_model(Path(spec.model_path)) if spec.model_path else (),
        python=interpreter.version,
        distributions=distributions,
        image_digest=image_digest,
        architecture=host.architecture,
        kernel=host.kernel,
        cpu_features=host.cpu_features,
        criu=criu_version,
        gpu_models=host.gpu_models,
        gpu_driver=host.gpu_driver,
    )


def on_host(parts: CompatibilityParts, host: HostFacts) -> CompatibilityParts:
    """Returns ``parts`` as they would be on ``host`` with everything but the host the same."""
    return msgspec.structs.replace(parts, **msgspec.structs.asdict(host))


def engine_of(command: Sequence[str]) -> str:
    """Returns the engine that a module (``dynamo.vllm``) or program (``vllm``) names, else ``custom``."""
    for word in command:
        for part in Path(word).name.split("."):
            if part in _ENGINES:
                return part
    return "custom"
