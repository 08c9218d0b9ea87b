"""Model files, installed distributions and host facts, on real files and a real interpreter."""

from __future__ import annotations

import json
import os
import struct
import sys
from pathlib import Path

import pytest

from dynamo_snapshot.errors import SnapshotError
from dynamo_snapshot.model import Reason, WorkerSpec
from dynamo_snapshot.snapshots import distributions
from dynamo_snapshot.snapshots.distributions import Interpreter, installed_distributions, interpreter_of
from dynamo_snapshot.snapshots.fingerprint import fingerprint
from dynamo_snapshot.snapshots.host_facts import cpu_features, read_host_facts
from dynamo_snapshot.snapshots.model_files import identify_model

TENSOR_BYTES = 6 << 20


def write_safetensors(path: Path, *, dtype: str = "F32") -> int:
    """Writes four tensors of 6 MiB each and returns the offset of the data."""
    header = json.dumps(
        {"__metadata__": {"format": "pt"}}
        | {
            f"layer.{number}": {
                "dtype": dtype,
                "shape": [TENSOR_BYTES // 4],
                "data_offsets": [number * TENSOR_BYTES, (number + 1) * TENSOR_BYTES],
            }
            for number in range(4)
        }
    ).encode()
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(header)) + header)
        file.truncate(8 + len(header) + 4 * TENSOR_BYTES)
    return 8 + len(header)


def patch(path: Path, offset: int, data: bytes) -> None:
    with path.open("r+b") as file:
        file.seek(offset)
        file.write(data)


@pytest.mark.parametrize("tensor", range(4))
@pytest.mark.parametrize("place", [0, TENSOR_BYTES // 2, TENSOR_BYTES - 4])
def test_change_in_any_tensor_of_large_weights_shows(tmp_path: Path, tensor: int, place: int) -> None:
    weights = tmp_path / "model.safetensors"
    data = write_safetensors(weights)
    [before] = identify_model(tmp_path)
    assert before.digest.startswith("tensors:")
    patch(weights, data + tensor * TENSOR_BYTES + place, b"\x01")
    [after] = identify_model(tmp_path)
    assert after.digest != before.digest


def test_header_of_large_weights_counts(tmp_path: Path) -> None:
    write_safetensors(tmp_path / "model.safetensors")
    [before] = identify_model(tmp_path)
    write_safetensors(tmp_path / "model.safetensors", dtype="I32")
    [after] = identify_model(tmp_path)
    assert (after.size, after.digest != before.digest) == (before.size, True)


def test_other_large_file_is_sampled_to_its_end(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    with path.open("wb") as file:
        file.truncate(32 << 20)
    [before] = identify_model(path)
    assert before.digest.startswith("sampled:")
    patch(path, (32 << 20) - 1, b"\x01")
    assert identify_model(path) != (before,)


def test_broken_safetensors_is_sampled(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    with path.open("wb") as file:
        file.write(b"\xff" * 8)
        file.truncate(32 << 20)
    assert identify_model(path)[0].digest.startswith("sampled:")


def test_copy_of_a_model_is_the_same_model_and_hidden_files_do_not_count(tmp_path: Path) -> None:
    for name in ("one", "two"):
        folder = tmp_path / name
        (folder / "sub").mkdir(parents=True)
        (folder / "config.json").write_text("{}")
        (folder / "sub" / "tokenizer.json").write_text("[]")
        os.utime(folder / "config.json", (1, 1))
    (tmp_path / "two" / ".cache").mkdir()
    (tmp_path / "two" / ".cache" / "lock").write_text("x")
    os.utime(tmp_path / "two" / "config.json", (2, 2))
    assert identify_model(tmp_path / "one") == identify_model(tmp_path / "two")
    assert [file.path for file in identify_model(tmp_path / "one")] == ["config.json", "sub/tokenizer.json"]
    (tmp_path / "two" / "config.json").write_text("[]")
    assert identify_model(tmp_path / "one") != identify_model(tmp_path / "two")


def test_blob_of_a_hub_cache_is_named_by_its_digest(tmp_path: Path) -> None:
    blob = tmp_path / "blobs" / ("ab" * 32)
    blob.parent.mkdir()
    blob.write_bytes(b"weights")
    snapshot = tmp_path / "snapshots" / "main"
    snapshot.mkdir(parents=True)
    (snapshot / "model.safetensors").symlink_to(blob)
    [file] = identify_model(snapshot)
    assert (file.size, file.digest) == (7, "blob:" + "ab" * 16)


def test_missing_model_is_named(tmp_path: Path) -> None:
    with pytest.raises(SnapshotError, match="nowhere") as caught:
        identify_model(tmp_path / "nowhere")
    assert caught.value.reason is Reason.CONFIGURATION_INVALID


def site(tmp_path: Path) -> Path:
    info = tmp_path / "engine_x-1.2.dist-info"
    info.mkdir()
    (info / "RECORD").write_text("engine_x/__init__.py,sha256=AAAA,10\n")
    return info


def test_distribution_is_known_by_the_digest_of_its_record(tmp_path: Path) -> None:
    info = site(tmp_path)
    before = installed_distributions([str(tmp_path), str(tmp_path / "absent")])
    assert list(before) == ["engine-x"]
    assert before["engine-x"].startswith("1.2 ")
    assert installed_distributions([str(tmp_path)]) == before
    (info / "RECORD").write_text("engine_x/__init__.py,sha256=BBBB,10\n")
    os.utime(info / "RECORD", (3, 3))
    assert installed_distributions([str(tmp_path)]) != before


def test_editable_install_is_known_by_its_sources(tmp_path: Path) -> None:
    info = site(tmp_path)
    source = tmp_path / "checkout"
    (source / "engine_x").mkdir(parents=True)
    (source / "engine_x" / "__init__.py").write_text("a = 1")
    (source / "tests").mkdir()
    (source / "tests" / "test_a.py").write_text("a")
    (info / "direct_url.json").write_text(json.dumps({"url": source.as_uri(), "dir_info": {"editable": True}}))
    before = installed_distributions([str(tmp_path)])
    assert "editable:" in before["engine-x"]
    (source / "tests" / "test_a.py").write_text("b")
    assert installed_distributions([str(tmp_path)]) == before
    (source / "engine_x" / "__init__.py").write_text("a = 2")
    assert installed_distributions([str(tmp_path)]) != before


def test_interpreter_is_found_by_name_by_script_and_behind_a_launcher(tmp_path: Path) -> None:
    script = tmp_path / "serve"
    script.write_text(f"#!{sys.executable}\nprint()\n")
    script.chmod(0o755)
    expected = interpreter_of((sys.executable, "-m", "x"), {})
    assert expected.version == ".".join(map(str, sys.version_info[:3]))
    assert any(Path(path, "pytest").is_dir() for path in expected.path)
    assert interpreter_of((str(script),), {}) == expected
    assert interpreter_of(("nice", "-n", "1", sys.executable), {}) == expected
    assert interpreter_of(("sleep", "1"), {}) == Interpreter()
    with_path = interpreter_of((sys.executable,), {"PYTHONPATH": str(tmp_path)})
    assert str(tmp_path) in with_path.path


def test_missing_program_is_named() -> None:
    with pytest.raises(SnapshotError, match="no-such-program") as caught:
        interpreter_of(("no-such-program",), {})
    assert caught.value.reason is Reason.CONFIGURATION_INVALID


def test_fingerprint_of_a_real_worker_command(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    spec = WorkerSpec(command=(sys.executable, "-m", "dynamo.mocker"), model_path=str(tmp_path))
    parts = fingerprint(spec, read_host_facts(), "4.2.1")
    assert (parts.engine, parts.engine_version) == ("mocker", "1.6.1")
    assert [file.path for file in parts.model_files] == ["config.json"]
    assert parts.kernel == os.uname().release
    assert len(parts.distributions) > 50


def test_cpu_features_are_those_of_every_processor() -> None:
    assert cpu_features("flags\t\t: sse2 avx2\nbugs : x\nflags : avx2 amx\n") == ("avx2",)
    assert cpu_features("Features\t: fp asimd\n") == ("asimd", "fp")
    assert cpu_features("nothing") == ()
    assert read_host_facts().cpu_features


def test_gpus_are_read_from_the_drivers_files(tmp_path: Path) -> None:
    (tmp_path / "cpuinfo").write_text("flags : fpu\n")
    nvidia = tmp_path / "driver" / "nvidia"
    for slot, model in (("0000:01:00.0", "NVIDIA H200"), ("0000:02:00.0", "NVIDIA A100")):
        (nvidia / "gpus" / slot).mkdir(parents=True)
        (nvidia / "gpus" / slot / "information").write_text(f"Model: \t\t {model}\nIRQ: 12\n")
    (nvidia / "version").write_text(
        "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.159.04  Release Build\nGCC version: 12.2.0\n"
    )
    facts = read_host_facts(tmp_path)
    assert facts.gpu_models == ("NVIDIA A100", "NVIDIA H200")
    assert facts.gpu_driver == "580.159.04"


def test_an_installation_under_way_is_named_and_no_crash(monkeypatch: pytest.MonkeyPatch) -> None:
    def taken_away(folder: Path) -> str:
        raise FileNotFoundError(2, "No such file or directory", str(folder / "RECORD"))

    monkeypatch.setattr(distributions, "_content", taken_away)
    with pytest.raises(SnapshotError, match="RECORD") as refused:
        fingerprint(WorkerSpec(command=(sys.executable,)), read_host_facts(), "4")
    assert refused.value.reason is Reason.CONFIGURATION_INVALID
