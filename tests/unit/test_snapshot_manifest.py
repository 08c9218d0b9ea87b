"""The manifest: written, read back, refused when newer or not its own."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dynamo_snapshot.errors import SnapshotError
from dynamo_snapshot.model import Phase, Reason
from dynamo_snapshot.snapshots.compatibility import CompatibilityParts, ModelFile
from dynamo_snapshot.snapshots.manifest import (
    SCHEMA_VERSION,
    Capture,
    CudaRecord,
    DeviceRecord,
    FileEntry,
    Manifest,
    WeightSegment,
    decode_manifest,
    encode_manifest,
)

TEXT = st.text(max_size=12)
SIZE = st.integers(0, 1 << 62)
SECONDS = st.floats(0, 1e9, allow_nan=False)
PARTS = st.builds(
    CompatibilityParts,
    command=st.lists(TEXT, max_size=3).map(tuple),
    environment=st.dictionaries(TEXT, TEXT, max_size=3),
    distributions=st.dictionaries(TEXT, TEXT, max_size=3),
    model_files=st.lists(st.builds(ModelFile, path=TEXT, size=SIZE, digest=TEXT), max_size=2).map(tuple),
    cpu_features=st.lists(TEXT, max_size=3).map(tuple),
    gpu_models=st.lists(TEXT, max_size=2).map(tuple),
)
CAPTURES = st.builds(
    Capture,
    pool=TEXT,
    compatibility=PARTS,
    source_pid=st.integers(1, 1 << 22),
    phases=st.lists(st.builds(Phase, name=TEXT, seconds=SECONDS), max_size=3).map(tuple),
    cold_start_s=st.none() | SECONDS,
    evidence=st.dictionaries(TEXT, TEXT, max_size=2),
    weights=st.lists(
        st.builds(WeightSegment, address=SIZE, size=SIZE, device=st.integers(0, 7), tag=TEXT, digest=TEXT), max_size=2
    ).map(tuple),
    cuda=st.none()
    | st.builds(
        CudaRecord,
        driver_version=TEXT,
        devices=st.lists(
            st.builds(DeviceRecord, uuid=TEXT, name=TEXT, total_bytes=SIZE, needed_bytes=SIZE), max_size=2
        ).map(tuple),
    ),
)
MANIFESTS = st.builds(
    Manifest,
    schema_version=st.just(SCHEMA_VERSION),
    created_at=SECONDS,
    capture=CAPTURES,
    files=st.lists(st.builds(FileEntry, path=TEXT, size=SIZE, digest=TEXT), max_size=4).map(tuple),
)


@given(MANIFESTS)
def test_manifest_comes_back_as_it_was_written(manifest: Manifest) -> None:
    assert decode_manifest(encode_manifest(manifest), manifest.id) == manifest
    assert manifest.size_bytes == sum(entry.size for entry in manifest.files)


def refusal(data: bytes, snapshot_id: str = "a") -> SnapshotError:
    with pytest.raises(SnapshotError) as caught:
        decode_manifest(data, snapshot_id)
    return caught.value


def test_newer_schema_is_refused_whatever_else_it_holds() -> None:
    error = refusal(b'{"schema_version": 7, "unheard_of": [1, 2]}')
    assert error.reason is Reason.SNAPSHOT_INCOMPATIBLE
    assert "schema 7" in error.message
    assert "Upgrade" in error.remedy


@pytest.mark.parametrize(
    "data", [b"", b"{", b"[]", b"{}", b'{"schema_version": 1}', b'{"schema_version": "1"}', b"\xff"]
)
def test_what_is_no_manifest_is_refused(data: bytes) -> None:
    assert refusal(data).reason is Reason.SNAPSHOT_CORRUPT


@given(MANIFESTS)
def test_manifest_of_another_snapshot_is_refused(manifest: Manifest) -> None:
    error = refusal(encode_manifest(manifest), manifest.id + "x")
    assert error.reason is Reason.SNAPSHOT_CORRUPT
    assert "belongs to" in error.message


@given(MANIFESTS)
def test_unknown_fields_of_the_same_schema_are_passed_over(manifest: Manifest) -> None:
    tree = msgspec.json.decode(encode_manifest(manifest))
    tree["added_later"] = {"x": 1}
    assert decode_manifest(msgspec.json.encode(tree), manifest.id) == manifest
