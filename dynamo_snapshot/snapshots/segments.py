"""Weight segments at rest: device memory under the digest of its bytes, one copy for all snapshots that hold it.

Workers write them (``worker_hooks.weights``); this side digests each once before a snapshot that names
it is published, looks at it before a restore, and removes it when no snapshot names it any more. The
digest is the one of :mod:`dynamo_snapshot.snapshots.integrity`.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from pathlib import Path

import msgspec

from dynamo_snapshot.durable import replace_synced
from dynamo_snapshot.errors import SnapshotError
from dynamo_snapshot.model import Reason, Value, decode, encode
from dynamo_snapshot.snapshots.integrity import FileSignature, Progress, digest_files, sign
from dynamo_snapshot.snapshots.layout import Layout
from dynamo_snapshot.snapshots.manifest import WeightSegment

UNNAMED_FOR_S = 3600.0
"""A segment that no snapshot names stays this long after it was written: a capture may be about to name it."""


class _Note(Value, frozen=True):
    """What a segment's file looked like when this node digested it."""

    file: FileSignature


class Segments:
    """The segments of one store. Methods block; those that digest, for a second per some GiB."""

    def __init__(self, layout: Layout) -> None:
        self._layout = layout

    @property
    def folder(self) -> Path:
        return self._layout.segments

    def require(self, segments: Iterable[WeightSegment]) -> None:
        """Raises ``weights_corrupt`` for one that is missing or has another size."""
        for segment in _distinct(segments):
            self._sign(segment)

    def admit(self, segments: Iterable[WeightSegment], progress: Progress | None = None) -> None:
        """Digests what this node has not digested yet, or what changed since.

        Raises:
            SnapshotError: ``weights_corrupt`` naming the first that is missing or not what its name says.
        """
        for segment in _distinct(segments):
            if self._note(segment.digest) != _Note(file=self._sign(segment)):
                self._digest(segment, progress)

    def verify(self, segments: Iterable[WeightSegment], progress: Progress | None = None) -> None:
        """Digests every one again; raises as :meth:`admit`."""
        for segment in _distinct(segments):
            self._digest(segment, progress)

    def check_unchanged(self, segments: Iterable[WeightSegment]) -> None:
        """Compares every file with what it was when it was digested; reads no content.

        Raises:
            SnapshotError: ``weights_corrupt`` for one that is missing or has another size, ``snapshot_changed``
                for any other difference.
        """
        for segment in _distinct(segments):
            if self._note(segment.digest) != _Note(file=self._sign(segment)):
                raise SnapshotError(
                    Reason.SNAPSHOT_CHANGED,
                    f"weight segment {segment.digest} was changed since this node digested it",
                    "`dynamo-snapshot snapshots verify --all` digests it again and admits it if its content is right.",
                )

    def collect(self, named: Collection[str], now: float) -> list[str]:
        """Removes the segments, and what an ended worker left half-written, that ``named`` does not have.

        Args:
            named: digests that some snapshot, or a worker about to be captured, relies on.
            now: wall-clock seconds; what was written in the last :data:`UNNAMED_FOR_S` stays.

        Returns:
            The names of the files that were removed.
        """
        removed = []
        for path in sorted(self.folder.iterdir()) if self.folder.is_dir() else []:
            if path.name not in named and now - path.stat().st_mtime > UNNAMED_FOR_S:
                path.unlink()
                (self._layout.segment_notes / path.name).unlink(missing_ok=True)
                removed.append(path.name)
        return removed

    def _digest(self, segment: WeightSegment, progress: Progress | None) -> None:
        before = self._sign(segment)  # signed before the digest: a change during it shows at the next check
        (found,) = digest_files(self.folder, {segment.digest: segment.size}, progress)
        if found.digest != segment.digest:
            raise _corrupt(segment, f"holds bytes whose digest is {found.digest}")
        self._layout.create()
        replace_synced(self._layout.segment_notes / segment.digest, encode(_Note(file=before)))

    def _note(self, digest: str) -> _Note | None:
        try:
            return decode((self._layout.segment_notes / digest).read_bytes(), _Note)
        except (FileNotFoundError, msgspec.MsgspecError):
            return None

    def _sign(self, segment: WeightSegment) -> FileSignature:
        try:
            signature = sign(self.folder / segment.digest)
        except FileNotFoundError as error:
            raise _corrupt(segment, "is missing") from error
        except (OSError, ValueError) as error:
            raise _corrupt(segment, f"cannot be used: {error}") from error
        if signature.size != segment.size:
            raise _corrupt(segment, f"has {signature.size} bytes instead of {segment.size}")
        return signature


def _distinct(segments: Iterable[WeightSegment]) -> list[WeightSegment]:
    return list({segment.digest: segment for segment in segments}.values())


def _corrupt(segment: WeightSegment, what: str) -> SnapshotError:
    return SnapshotError(
        Reason.WEIGHTS_CORRUPT,
        f"weight segment {segment.digest} {what}",
        "Remove the snapshots that use it; the next cold start writes it anew.",
    )
