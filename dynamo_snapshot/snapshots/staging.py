"""A capture on its way to becoming a snapshot: nobody can select it until one rename publishes it."""

from __future__ import annotations

import errno
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType

from dynamo_snapshot.durable import replace_synced, sync_path, sync_tree, write_synced
from dynamo_snapshot.errors import SnapshotError
from dynamo_snapshot.model import Reason, encode
from dynamo_snapshot.snapshots.compatibility import compatibility_key
from dynamo_snapshot.snapshots.files import files_below
from dynamo_snapshot.snapshots.integrity import (
    ALGORITHM,
    Admission,
    FileSignature,
    Progress,
    boot_id,
    digest_files,
    sign,
)
from dynamo_snapshot.snapshots.layout import Layout
from dynamo_snapshot.snapshots.locks import Lock, exclusive
from dynamo_snapshot.snapshots.manifest import IMAGES, MANIFEST, SCHEMA_VERSION, Capture, Manifest, encode_manifest
from dynamo_snapshot.snapshots.segments import Segments


class Staging:
    """A staged snapshot, its process's alone. Made by :meth:`SnapshotStore.stage`.

    Used as a context manager it discards itself unless it was published.
    """

    def __init__(self, snapshot_id: str, layout: Layout, lock: Lock, clock: Callable[[], float]) -> None:
        self.id = snapshot_id
        self._layout = layout
        self._lock = lock
        self._clock = clock
        self._folder = layout.staging / snapshot_id
        self._synced = False

    def __repr__(self) -> str:
        return f"<Staging {self.id}{' synced' if self._synced else ''}>"

    @property
    def path(self) -> Path:
        """The folder for CRIU's images and whatever else the snapshot consists of."""
        return self._folder / IMAGES

    def sync(self) -> None:
        """Makes the files read-only and flushes them and their folders to the device.

        Once it returns the source may be released: nothing more is needed of it.

        Raises:
            SnapshotError: ``snapshot_corrupt`` for anything but plain files and folders, ``disk_full``.
        """
        with _disk_full_named(self._folder):
            for path in files_below(self.path):
                _signature(self.path, path)
                (self.path / path).chmod(0o400)
            sync_tree(self._folder)
        self._synced = True

    def publish(self, capture: Capture, progress: Progress | None = None) -> Manifest:
        """Digests every file, writes the manifest and publishes all with one rename; blocks for seconds.

        Weight segments that this node has not digested yet are digested too.

        The digest is in full, so this node's admission is recorded too.

        Raises:
            SnapshotError: ``snapshot_corrupt`` when a file changes meanwhile, ``weights_corrupt``, ``disk_full``.
                Nothing is published then, and the staging still is to be discarded.
        """
        if not self._synced:
            self.sync()
        with _disk_full_named(self._folder):
            Segments(self._layout).admit(capture.weights, progress)
            before = {path: _signature(self.path, path) for path in sorted(files_below(self.path))}
            manifest = Manifest(
                schema_version=SCHEMA_VERSION,
                id=self.id,
                created_at=self._clock(),
                compatibility_key=compatibility_key(capture.compatibility),
                digest_algorithm=ALGORITHM,
                capture=capture,
                files=digest_files(self.path, {path: signature.size for path, signature in before.items()}, progress),
            )
            for path, signature in before.items():
                if _signature(self.path, path) != signature:
                    raise SnapshotError(
                        Reason.SNAPSHOT_CORRUPT,
                        f"{self.path / path} was changed while it was digested",
                        "Something still writes to the images; nothing was published.",
                    )
            manifest_path = self._folder / MANIFEST
            write_synced(manifest_path, encode_manifest(manifest))
            manifest_path.chmod(0o400)
            sync_path(self._folder)
            admission = Admission(
                snapshot_id=self.id,
                at=manifest.created_at,
                boot_id=boot_id(),
                files={MANIFEST: sign(manifest_path)} | {f"{IMAGES}/{path}": s for path, s in before.items()},
            )
            with exclusive(self._layout.store_lock):
                # Noted first: whatever fails from here on fails before anything is selectable.
                replace_synced(self._layout.admission(self.id), encode(admission))
                self._folder.rename(self._layout.published(self.id))
        sync_path(self._layout.root)
        sync_path(self._layout.staging)
        self._release()
        return manifest

    def discard(self) -> None:
        """Removes all that was staged; does nothing once it was published."""
        try:
            if self._folder.exists():
                shutil.rmtree(self._folder)
                self._layout.admission(self.id).unlink(missing_ok=True)
        finally:
            self._release()  # what could not be removed, a sweep takes, which it does not while it is locked

    def _release(self) -> None:
        self._layout.staging_lock(self.id).unlink(missing_ok=True)
        self._lock.release()

    def __enter__(self) -> Staging:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.discard()


def _signature(folder: Path, path: str) -> FileSignature:
    try:
        return sign(folder / path)
    except ValueError as error:
        raise SnapshotError(Reason.SNAPSHOT_CORRUPT, str(error), "A snapshot consists of plain files.") from error


@contextmanager
def _disk_full_named(folder: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        raise SnapshotError(
            Reason.DISK_FULL, f"no space left for {folder}", "Free space there, or lower `keep` or `keep_bytes`."
        ) from error
