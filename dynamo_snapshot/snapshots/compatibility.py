"""May this snapshot stand in for a cold start here? A versioned key over everything that makes the difference.

The key is a digest of :class:`CompatibilityParts`. What only labels a worker or says how it logs is
left out: a good snapshot must not be lost to a changed label. What is unknown is part of the key as
"unknown" and so never equals a known value.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

import msgspec

from dynamo_snapshot.model import Value

KEY_VERSION = 1
"""Raised whenever a part is added, dropped or computed in another way; keys of other versions never match."""

_KEY_HEX_DIGITS = 32

# They change what a worker prints or how it is watched, never what it computes.
IGNORED_ENVIRONMENT = frozenset(
    {
        "DYN_LOG",
        "DYN_LOGGING_JSONL",
        "LOG_LEVEL",
        "NO_COLOR",
        "PYTHONUNBUFFERED",
        "RUST_BACKTRACE",
        "RUST_LOG",
        "SGLANG_LOGGING_CONFIG_PATH",
        "TLLM_LOG_LEVEL",
        "VLLM_LOGGING_CONFIG_PATH",
        "VLLM_LOGGING_LEVEL",
    }
)
_IGNORED_PREFIXES = ("DYN_LOGGING_", "OTEL_")


class ModelFile(Value, frozen=True):
    """One file of the model's folder, identified as :mod:`dynamo_snapshot.snapshots.model_files` describes."""

    path: str
    size: int
    digest: str


class CompatibilityParts(Value, frozen=True):
    """All that must be equal between the captured worker and the one it is to replace."""

    engine: str
    engine_version: str
    command: tuple[str, ...]
    environment: dict[str, str]
    """Of the worker, without what :func:`environment_that_matters` leaves out."""
    model_files: tuple[ModelFile, ...]
    python: str
    """The interpreter's version, or ``unknown``."""
    distributions: dict[str, str]
    """Installed Python distributions: name to version and digest of its RECORD."""
    image_digest: str
    """Of the container image; empty outside a container."""
    architecture: str
    kernel: str
    cpu_features: tuple[str, ...]
    criu: str
    gpu_models: tuple[str, ...]
    """Sorted product names, one for each GPU; empty without GPUs."""
    gpu_driver: str
    """Empty without GPUs."""


def environment_that_matters(environment: Mapping[str, str]) -> dict[str, str]:
    """Returns ``environment`` without the variables that only concern logging and tracing."""
    return {
        name: value
        for name, value in sorted(environment.items())
        if name not in IGNORED_ENVIRONMENT and not name.startswith(_IGNORED_PREFIXES)
    }


def compatibility_key(parts: CompatibilityParts) -> str:
    """Returns the key: the recipe's version and a digest of the parts in canonical JSON."""
    canonical = msgspec.json.encode(msgspec.to_builtins(parts), order="deterministic")
    return f"v{KEY_VERSION}-{hashlib.sha256(canonical).hexdigest()[:_KEY_HEX_DIGITS]}"


def explain_difference(captured: CompatibilityParts, wanted: CompatibilityParts) -> list[str]:
    """Returns one line for each part that differs, ``captured -> wanted``; empty when the keys are equal."""
    lines: list[str] = []
    for field in CompatibilityParts.__struct_fields__:
        then, now = getattr(captured, field), getattr(wanted, field)
        if then == now:
            continue
        name = field.replace("_", " ")
        if field == "model_files":
            before = {file.path: f"{file.size} bytes, {file.digest}" for file in then}
            after = {file.path: f"{file.size} bytes, {file.digest}" for file in now}
            lines += _mapping_difference("model file", before, after)
        elif isinstance(then, dict):
            lines += _mapping_difference(name.removesuffix("s"), then, now)
        elif field == "cpu_features":
            gone, come = sorted(set(then) - set(now)), sorted(set(now) - set(then))
            lines.append(f"{name}: missing here: {' '.join(gone) or 'none'}; new here: {' '.join(come) or 'none'}")
        else:
            lines.append(f"{name}: {_show(then)} -> {_show(now)}")
    return lines


def _mapping_difference(name: str, before: Mapping[str, str], after: Mapping[str, str]) -> list[str]:
    return [
        f"{name} {key}: {_show(before.get(key))} -> {_show(after.get(key))}"
        for key in sorted(before.keys() | after.keys())
        if before.get(key) != after.get(key)
    ]


def _show(value: object) -> str:
    if value is None:
        return "absent"
    if isinstance(value, tuple):
        return " ".join(str(item) for item in value) or "none"
    return str(value) or "none"
