"""Which change makes a snapshot unusable, and which does not."""

from __future__ import annotations

import msgspec
import pytest

from dynamo_snapshot.model import WorkerSpec
from dynamo_snapshot.snapshots.compatibility import (
    KEY_VERSION,
    CompatibilityParts,
    ModelFile,
    compatibility_key,
    environment_that_matters,
    explain_difference,
)
from dynamo_snapshot.snapshots.fingerprint import engine_of, fingerprint
from dynamo_snapshot.snapshots.host_facts import HostFacts

PARTS = CompatibilityParts(
    engine="vllm",
    engine_version="0.20.0",
    command=("python", "-m", "dynamo.vllm", "--model", "/models/tiny"),
    environment={"VLLM_USE_V1": "1"},
    model_files=(ModelFile(path="config.json", size=2, digest="sha256:aa"),),
    python="3.12.3",
    distributions={"vllm": "0.20.0 0011"},
    image_digest="",
    architecture="x86_64",
    kernel="6.18.1",
    cpu_features=("avx2", "avx512f"),
    criu="4.2.1",
    gpu_models=("NVIDIA H200",),
    gpu_driver="580.159.04",
)

CHANGES: dict[str, object] = {
    "engine": "sglang",
    "engine_version": "0.20.1",
    "command": (*PARTS.command, "--max-model-len", "4096"),
    "environment": {"VLLM_USE_V1": "0"},
    "model_files": (ModelFile(path="config.json", size=2, digest="sha256:ab"),),
    "python": "3.12.4",
    "distributions": {"vllm": "0.20.0 0012"},
    "image_digest": "sha256:1234",
    "architecture": "aarch64",
    "kernel": "6.18.2",
    "cpu_features": ("avx2",),
    "criu": "4.3",
    "gpu_models": ("NVIDIA H200", "NVIDIA H200"),
    "gpu_driver": "580.159.05",
}


def test_every_part_is_in_the_table() -> None:
    assert set(CHANGES) == set(CompatibilityParts.__struct_fields__)


@pytest.mark.parametrize("field", CHANGES)
def test_each_part_changes_the_key_and_is_explained(field: str) -> None:
    changed = msgspec.structs.replace(PARTS, **{field: CHANGES[field]})
    assert compatibility_key(changed) != compatibility_key(PARTS)
    [line] = explain_difference(PARTS, changed)
    assert line.startswith(field.replace("_", " ").removesuffix("s"))


def test_equal_parts_have_one_key_whatever_the_order_of_mappings() -> None:
    one = msgspec.structs.replace(PARTS, environment={"A": "1", "B": "2"}, distributions={"a": "1", "b": "2"})
    other = msgspec.structs.replace(PARTS, environment={"B": "2", "A": "1"}, distributions={"b": "2", "a": "1"})
    assert compatibility_key(one) == compatibility_key(other)
    assert explain_difference(one, other) == []


def test_key_names_its_version_and_stays() -> None:
    # A changed value here makes every published snapshot unusable: raise KEY_VERSION when it is meant.
    assert compatibility_key(PARTS) == f"v{KEY_VERSION}-0d1c054e4f836ac0e0129c85a7b66394"


def test_differences_name_file_variable_distribution_and_feature() -> None:
    changed = msgspec.structs.replace(
        PARTS,
        environment={"VLLM_USE_V1": "1", "NEW": "x"},
        model_files=(),
        distributions={"vllm": "0.21.0 0013"},
        cpu_features=("avx2", "amx"),
        gpu_models=(),
    )
    assert explain_difference(PARTS, changed) == [
        "environment NEW: absent -> x",
        "model file config.json: 2 bytes, sha256:aa -> absent",
        "distribution vllm: 0.20.0 0011 -> 0.21.0 0013",
        "cpu features: missing here: avx512f; new here: amx",
        "gpu models: NVIDIA H200 -> none",
    ]


@pytest.mark.parametrize(
    "name", ["DYN_LOG", "RUST_LOG", "VLLM_LOGGING_LEVEL", "DYN_LOGGING_JSONL", "OTEL_SERVICE_NAME"]
)
def test_log_level_and_labels_do_not_matter(name: str) -> None:
    assert environment_that_matters({name: "debug", "VLLM_USE_V1": "1"}) == {"VLLM_USE_V1": "1"}


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("incarnation_environment", {"ETCD_ENDPOINTS": "http://127.0.0.1:2379"}),
        ("memory_limit_bytes", 1 << 30),
        ("drain_timeout_s", 1.0),
        ("boot_timeout_s", 1.0),
        ("environment", {"DYN_LOG": "debug"}),
    ],
)
def test_what_a_restore_does_not_depend_on_leaves_the_key(field: str, value: object) -> None:
    host = HostFacts(architecture="x86_64", kernel="6.18", cpu_features=(), gpu_models=(), gpu_driver="")
    spec = WorkerSpec(command=("sleep", "1"))
    before = compatibility_key(fingerprint(spec, host, "4.2.1"))
    assert compatibility_key(fingerprint(msgspec.structs.replace(spec, **{field: value}), host, "4.2.1")) == before
    other = msgspec.structs.replace(spec, environment={"A": "1"})
    assert compatibility_key(fingerprint(other, host, "4.2.1")) != before


@pytest.mark.parametrize(
    ("command", "engine"),
    [
        (("python", "-m", "dynamo.vllm", "--model", "x"), "vllm"),
        (("python3", "-m", "worker_hooks.engines.mocker"), "mocker"),
        (("dynamo-snapshot-worker", "run", "--", "-m", "dynamo.sglang"), "sglang"),
        (("/opt/venv/bin/vllm", "serve"), "vllm"),
        (("python", "mine.py"), "custom"),
    ],
)
def test_engine_is_read_from_the_command(command: tuple[str, ...], engine: str) -> None:
    assert engine_of(command) == engine
