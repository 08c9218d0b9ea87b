"""The weight segment format: device memory kept beside a snapshot instead of in its process image.

A segment is one contiguous piece of device memory: where it was, how large, on which device, whose it
is (``tag``), and the digest of its bytes. The bytes lie in a :class:`SegmentStore` under that digest,
so snapshots that hold the same weights share one copy. A snapshot lists its segments in
:data:`SEGMENTS_FILE`.

The digest is the SHA-256 of the SHA-256 digests of the leaves (:data:`LEAF` bytes each, the last may
be shorter), so that leaves can be digested side by side.
"""

from __future__ import annotations

import ctypes
import hashlib
import json
import os
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from worker_hooks.reasons import HookError, HookReason

SEGMENTS_FILE = "weights.json"
SEGMENTS_ENV = "DYNAMO_SNAPSHOT_SEGMENTS"
"""The folder of the segment store, for engines that are told by their environment."""
LEAF = 16 << 20
_VERSION = 1
_HERE, _NO_REPLACE = -100, 1
"""Of ``renameat2``: paths are relative to the working directory; what is there stays."""


@dataclass(frozen=True, slots=True)
class Segment:
    """One piece of device memory and the name of its bytes."""

    address: int
    size: int
    """Bytes; a multiple of the device's allocation granularity."""
    device: int
    """As the worker numbers its devices."""
    tag: str
    """Whose it is: ``weights``, ``kv_cache``, …"""
    digest: str
    """64 hexadecimal digits."""


def encode_segments(segments: Iterable[Segment]) -> bytes:
    """Returns the content of a :data:`SEGMENTS_FILE`."""
    return json.dumps({"version": _VERSION, "segments": [asdict(segment) for segment in segments]}).encode()


def decode_segments(data: bytes) -> list[Segment]:
    """The reverse of :func:`encode_segments`; raises ``weights_corrupt``."""
    try:
        content = json.loads(data)
        if content["version"] != _VERSION:
            raise HookError(
                HookReason.WEIGHTS_CORRUPT, f"a segment list has version {content['version']}, not {_VERSION}"
            )
        return [Segment(**entry) for entry in content["segments"]]
    except (ValueError, TypeError, KeyError) as error:
        raise HookError(HookReason.WEIGHTS_CORRUPT, f"a segment list cannot be read: {error!r}") from error


def leaf_offsets(size: int) -> range:
    """Where the leaves of a segment of ``size`` bytes begin."""
    return range(0, size, LEAF)


def combine(leaves: Iterable[bytes]) -> str:
    """Returns a segment's digest from its leaves' SHA-256 digests, in order."""
    return hashlib.sha256(b"".join(leaves)).hexdigest()


class SegmentStore:
    """Segment bytes by digest in one folder; files appear whole, under their final name, or not at all."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def path(self, digest: str) -> Path:
        return self.folder / digest

    def check(self, segment: Segment) -> Path:
        """Returns the file of ``segment``; raises ``weights_corrupt`` if it is missing or has another size."""
        path = self.path(segment.digest)
        try:
            size = path.stat().st_size
        except FileNotFoundError:
            raise HookError(HookReason.WEIGHTS_CORRUPT, f"weight segment {path} is missing") from None
        if size != segment.size:
            raise HookError(
                HookReason.WEIGHTS_CORRUPT, f"weight segment {path} has {size} bytes instead of {segment.size}"
            )
        return path

    def holds(self, digest: str, size: int) -> bool:
        """Whether the bytes with that digest are here already."""
        try:
            return self.path(digest).stat().st_size == size
        except FileNotFoundError:
            return False

    @contextmanager
    def writing(self, digest: str, size: int) -> Iterator[int]:
        """Gives a descriptor to write ``size`` bytes to at any offsets; published, synced, when the block ends well."""
        self.folder.mkdir(parents=True, exist_ok=True)
        descriptor, staged = tempfile.mkstemp(prefix=f".{digest[:16]}-", dir=self.folder)
        try:
            # What the disk has no room for shows here, not after minutes of writing.
            os.posix_fallocate(descriptor, 0, size)
            yield descriptor
            os.fchmod(descriptor, 0o444)
            os.fsync(descriptor)
            self._publish(staged, digest, size)
        except BaseException:
            os.unlink(staged)
            raise
        finally:
            os.close(descriptor)
        folder = os.open(self.folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)

    def _publish(self, staged: str, digest: str, size: int) -> None:
        """Gives what was written its name; of workers that write the same at once the first one's file stays.

        A snapshot may name it by then, and would have to be digested anew for another file of the same bytes.
        """
        if not _renamed(staged, self.path(digest)):
            if self.holds(digest, size):
                os.unlink(staged)
            else:
                os.rename(staged, self.path(digest))


def _renamed(staged: str, path: Path) -> bool:
    """Renames it where nothing has that name; False: something has, or the file system cannot tell.

    A hard link could do as much, but taking its other name away changes the file once more, maybe after somebody has
    digested it.
    """
    rename = getattr(ctypes.CDLL(None), "renameat2", None)
    return rename is not None and not rename(_HERE, os.fsencode(staged), _HERE, os.fsencode(path), _NO_REPLACE)


def digest_file(path: Path) -> str:
    """Digests a segment's file from the start (for admission and ``verify``)."""
    leaves = []
    with path.open("rb", buffering=0) as file:
        while leaf := file.read(LEAF):
            leaves.append(hashlib.sha256(leaf).digest())
    return combine(leaves)
