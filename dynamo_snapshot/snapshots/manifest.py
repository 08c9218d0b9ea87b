"""``manifest.json``: what a published snapshot says of itself.

A reader refuses a manifest of a newer schema than it knows, and never guesses. A field that an old
reader may ignore is added with a default and keeps the version; anything else raises it.
"""

from __future__ import annotations

import msgspec

from dynamo_snapshot.errors import SnapshotError
from dynamo_snapshot.model import Phase, Reason, Value, encode
from dynamo_snapshot.snapshots.compatibility import CompatibilityParts

SCHEMA_VERSION = 2
MANIFEST = "manifest.json"
IMAGES = "images"
"""The folder beside the manifest that holds everything else: CRIU's images and what belongs to them."""


class FileEntry(Value, frozen=True):
    """One file below the images folder."""

    path: str
    """Relative to the images folder, with ``/``."""
    size: int
    digest: str


class WeightSegment(Value, frozen=True):
    """Model weights kept apart from the process image and mapped back at the address they had."""

    address: int
    size: int
    device: int
    """As the worker numbers its devices."""
    tag: str
    """Whose memory it was: ``weights``, …"""
    digest: str
    """Names its bytes in the store, which snapshots share (see :mod:`dynamo_snapshot.snapshots.segments`)."""


class DeviceRecord(Value, frozen=True):
    """One GPU that the captured worker could see, and what a restore needs of it."""

    uuid: str
    name: str
    total_bytes: int
    needed_bytes: int = 0
    """GPU memory of the restored tree: what the driver brings back, contexts, and weight segments."""


class CudaRecord(Value, frozen=True):
    """What a restore must know of the source's GPUs."""

    driver_version: str
    devices: tuple[DeviceRecord, ...]
    """In the order in which the worker numbers them."""


class Capture(Value, frozen=True):
    """What the capturing agent knows and a restore needs."""

    pool: str
    compatibility: CompatibilityParts
    source_pid: int
    """The worker's root process, as numbered inside its pid namespace."""
    house: str
    """Where the house was mounted inside the replica's mount namespace."""
    log_path: str
    """The worker's log as the image names it, to be replaced by the new replica's own."""
    criu_version: str
    kernel: str
    phases: tuple[Phase, ...] = ()
    """Of the capture, up to the point where the images were on disk."""
    cold_start_s: float | None = None
    """Seconds from order to ready-for-snapshot of the source: what a restore saves."""
    evidence: dict[str, str] = msgspec.field(default_factory=dict)
    """What the worker told of itself when it was ready-for-snapshot."""
    weights: tuple[WeightSegment, ...] = ()
    cuda: CudaRecord | None = None
    """None: no process of the worker used CUDA."""


class Manifest(Value, frozen=True):
    schema_version: int
    id: str
    created_at: float
    compatibility_key: str
    digest_algorithm: str
    capture: Capture
    files: tuple[FileEntry, ...]

    @property
    def size_bytes(self) -> int:
        """Of the images; weight segments may be another snapshot's as well."""
        return sum(entry.size for entry in self.files)

    @property
    def weights_bytes(self) -> int:
        return sum(segment.size for segment in self.capture.weights)


class _Header(msgspec.Struct):
    schema_version: int


def encode_manifest(manifest: Manifest) -> bytes:
    return msgspec.json.format(encode(manifest), indent=1) + b"\n"


def decode_manifest(data: bytes, snapshot_id: str) -> Manifest:
    """Returns the manifest of ``snapshot_id``.

    Raises:
        SnapshotError: ``snapshot_incompatible`` for a newer schema, ``snapshot_corrupt`` for anything
            that is not a manifest of this snapshot.
    """
    try:
        version = msgspec.json.decode(data, type=_Header).schema_version
    except msgspec.MsgspecError as error:
        raise _corrupt(snapshot_id, str(error)) from error
    if version > SCHEMA_VERSION:
        raise SnapshotError(
            Reason.SNAPSHOT_INCOMPATIBLE,
            f"snapshot {snapshot_id} has manifest schema {version}; this version reads up to {SCHEMA_VERSION}",
            "Upgrade dynamo-snapshot on this node, or capture again with this version.",
        )
    try:
        manifest = msgspec.json.decode(data, type=Manifest)
    except msgspec.MsgspecError as error:
        raise _corrupt(snapshot_id, str(error)) from error
    if manifest.id != snapshot_id:
        raise _corrupt(snapshot_id, f"it says that it belongs to {manifest.id}")
    return manifest


def _corrupt(snapshot_id: str, cause: str) -> SnapshotError:
    return SnapshotError(
        Reason.SNAPSHOT_CORRUPT,
        f"{MANIFEST} of snapshot {snapshot_id} cannot be used: {cause}",
        f"Remove it with `dynamo-snapshot snapshots rm {snapshot_id}` and capture again.",
    )
