"""The file-system store: a snapshot is there whole or not at all, and never goes while it is used.

Every method blocks on the file system; those that digest block for seconds. Callers with an event
loop run them in a thread. Any number of processes may use one store at once.
"""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import msgspec

from dynamo_snapshot.durable import replace_synced, sync_path
from dynamo_snapshot.errors import SnapshotError
from dynamo_snapshot.model import Reason, SnapshotSummary, decode, encode
from dynamo_snapshot.snapshots import integrity
from dynamo_snapshot.snapshots.integrity import Admission, Progress
from dynamo_snapshot.snapshots.layout import Layout, missing
from dynamo_snapshot.snapshots.locks import exclusive, shared, try_exclusive
from dynamo_snapshot.snapshots.manifest import IMAGES, MANIFEST, Manifest, decode_manifest
from dynamo_snapshot.snapshots.segments import Segments
from dynamo_snapshot.snapshots.staging import Staging


def pool_of(snapshot_id: str) -> str:
    """Returns the pool that a snapshot's id names; the whole id where it is not one of :meth:`SnapshotStore.stage`."""
    return snapshot_id.rsplit("-", 3)[0]


class SnapshotStore:
    """The snapshots below one folder.

    Args:
        root: the store's folder; made on first staging.
        clock: wall-clock seconds since the epoch.
    """

    def __init__(self, root: Path, *, clock: Callable[[], float] = time.time) -> None:
        self._layout = Layout(root)
        self._clock = clock
        self.segments = Segments(self._layout)
        """The weight segments that the snapshots name."""

    def __repr__(self) -> str:
        return f"<SnapshotStore {self._layout.root} {len(self._layout.ids())} published>"

    @property
    def root(self) -> Path:
        return self._layout.root

    # making

    def stage(self, pool: str) -> Staging:
        """Begins a snapshot of ``pool``: an empty folder that :meth:`Staging.publish` makes selectable."""
        self._layout.create()
        stamp = time.strftime("%Y%m%d-%H%M%S", time.gmtime(self._clock()))
        snapshot_id = f"{pool}-{stamp}-{os.urandom(3).hex()}"
        # Under the store's lock, so that no sweep sees the folder before its lock is held.
        with exclusive(self._layout.store_lock):
            lock = try_exclusive(self._layout.staging_lock(snapshot_id))
            if lock is None:
                raise SnapshotError(Reason.INTERNAL_ERROR, f"the staging of {snapshot_id} is held by someone else")
            try:
                (self._layout.staging / snapshot_id / IMAGES).mkdir(mode=0o700, parents=True)
            except OSError:
                self._layout.staging_lock(snapshot_id).unlink(missing_ok=True)
                lock.release()
                raise
        return Staging(snapshot_id, self._layout, lock, self._clock)

    # reading

    def images(self, snapshot_id: str) -> Path:
        """Returns the folder of its images, to be read only."""
        return self._layout.published(snapshot_id) / IMAGES

    def manifest(self, snapshot_id: str) -> Manifest:
        """Raises ``snapshot_missing``, ``snapshot_incompatible`` (a newer schema) or ``snapshot_corrupt``."""
        folder = self._layout.published(snapshot_id)
        try:
            data = (folder / MANIFEST).read_bytes()
        except FileNotFoundError as error:
            if not folder.is_dir():
                raise missing(snapshot_id, self.root) from error
            raise SnapshotError(
                Reason.SNAPSHOT_CORRUPT,
                f"snapshot {snapshot_id}: {MANIFEST} is missing",
                f"Remove it with `dynamo-snapshot snapshots rm {snapshot_id}`.",
            ) from error
        return decode_manifest(data, snapshot_id)

    # trusting

    def verify(self, snapshot_id: str, progress: Progress | None = None) -> Manifest:
        """Digests every file again; raises ``snapshot_corrupt`` naming the first that is not as published."""
        with self.use(snapshot_id):
            manifest = self.manifest(snapshot_id)
            if manifest.digest_algorithm != integrity.ALGORITHM:
                raise SnapshotError(
                    Reason.SNAPSHOT_INCOMPATIBLE,
                    f"snapshot {snapshot_id} is digested with {manifest.digest_algorithm}, "
                    f"this version knows {integrity.ALGORITHM}",
                    "Capture again with this version.",
                )
            integrity.verify_files(self.images(snapshot_id), manifest.files, snapshot_id, progress)
            self.segments.verify(manifest.capture.weights, progress)
            return manifest

    def admit(self, snapshot_id: str, progress: Progress | None = None) -> Manifest:
        """Verifies in full and notes what the files look like, for :meth:`check_unchanged`."""
        with self.use(snapshot_id):
            folder = self._layout.published(snapshot_id)
            # Signed before the digest: a change during it shows at the next check.
            names = [MANIFEST, *(f"{IMAGES}/{entry.path}" for entry in self.manifest(snapshot_id).files)]
            files = integrity.sign_files(folder, names, snapshot_id)
            manifest = self.verify(snapshot_id, progress)
            self._layout.create()
            admission = Admission(snapshot_id=snapshot_id, at=self._clock(), boot_id=integrity.boot_id(), files=files)
            with exclusive(self._layout.store_lock):  # so that no sweep takes the temporary file
                replace_synced(self._layout.admission(snapshot_id), encode(admission))
            return manifest

    def check_unchanged(self, snapshot_id: str) -> Manifest:
        """Compares every file with its admission, in milliseconds, and returns the manifest.

        Raises:
            SnapshotError: ``snapshot_missing``; ``snapshot_corrupt``, ``weights_corrupt`` or ``snapshot_changed``
                naming the file; ``snapshot_changed`` too where this node never admitted it.
        """
        manifest = self.manifest(snapshot_id)
        admission = self._admission(snapshot_id)
        if admission is None:
            raise SnapshotError(
                Reason.SNAPSHOT_CHANGED,
                f"snapshot {snapshot_id} has not been admitted by this node",
                f"`dynamo-snapshot snapshots verify {snapshot_id}` digests and admits it.",
            )
        integrity.check_unchanged(self._layout.published(snapshot_id), admission)
        self.segments.check_unchanged(manifest.capture.weights)
        return manifest

    # using and removing

    @contextmanager
    def use(self, snapshot_id: str) -> Iterator[Path]:
        """Keeps it from being removed, by any process; yields its images' folder. Ends with the process, too."""
        folder = self._layout.published(snapshot_id)
        if not folder.is_dir():
            raise missing(snapshot_id, self.root)
        self._layout.create()
        lock = self._layout.use_lock(snapshot_id)
        with shared(lock):
            if not folder.is_dir():  # removed meanwhile, and its id never comes back: nor may our lock file stay
                lock.unlink(missing_ok=True)
                raise missing(snapshot_id, self.root)
            yield folder / IMAGES

    def in_use(self, snapshot_id: str) -> bool:
        """Whether anyone uses it at this moment, in any process of this node."""
        path = self._layout.use_lock(snapshot_id)
        if not path.exists():
            return False
        # Under the store's lock, as every try for the exclusive one: two of them would take each other for users.
        with exclusive(self._layout.store_lock):
            if not path.exists():
                return False
            lock = try_exclusive(path)
            if lock:
                lock.release()
            return lock is None

    def remove(self, snapshot_id: str) -> None:
        """Takes it out of sight with one rename, then deletes it.

        Raises:
            SnapshotError: ``snapshot_missing``, or ``snapshot_in_use`` while any process uses it.
        """
        folder = self._layout.published(snapshot_id)
        if not folder.is_dir():
            raise missing(snapshot_id, self.root)
        self._layout.create()
        path = self._layout.use_lock(snapshot_id)
        removed = self._layout.removed / snapshot_id
        with exclusive(self._layout.store_lock):
            lock = try_exclusive(path)
            if lock is None:
                raise SnapshotError(
                    Reason.SNAPSHOT_IN_USE,
                    f"snapshot {snapshot_id} is in use",
                    "Try again once the restore or the verification that uses it is over.",
                )
            try:
                folder.rename(removed)
            except FileNotFoundError as error:
                raise missing(snapshot_id, self.root) from error
            finally:
                # Gone by our rename or by another's: either way nobody can use it any more.
                if not folder.is_dir():
                    path.unlink(missing_ok=True)
                lock.release()
        sync_path(self.root)
        self._layout.admission(snapshot_id).unlink(missing_ok=True)
        shutil.rmtree(removed, ignore_errors=True)  # what is left, a sweep takes

    def collect_segments(self) -> list[str]:
        """Removes weight segments that no snapshot names, and has not named for a while; returns their names.

        Does nothing while a capture is staged, or while a manifest cannot be read: it may name any of them.
        The caller knows of no worker that has written segments and is yet to be captured.
        """
        if not self._layout.segments.is_dir():
            return []
        with exclusive(self._layout.store_lock):
            if any(path.is_dir() for path in self._layout.staging.iterdir()):
                return []
            try:
                manifests = [self.manifest(snapshot_id) for snapshot_id in self._layout.ids()]
            except SnapshotError:
                return []
            named = {segment.digest for manifest in manifests for segment in manifest.capture.weights}
            return self.segments.collect(named, self._clock())

    def sweep(self) -> list[str]:
        """Deletes what a crash left: stagings whose process is gone, half-deleted snapshots, orphaned notes.

        Returns what was deleted, relative to the root, for the log.
        """
        if not self.root.is_dir():
            return []
        self._layout.create()
        layout = self._layout
        swept = list(layout.removed.iterdir())
        with exclusive(layout.store_lock):
            staged = {path.name.removesuffix(".lock") for path in layout.staging.iterdir()}
            for snapshot_id in sorted(staged):
                lock = try_exclusive(layout.staging_lock(snapshot_id))
                if lock is None:
                    continue
                if (layout.staging / snapshot_id).exists():
                    swept.append((layout.staging / snapshot_id).rename(layout.removed / snapshot_id))
                layout.staging_lock(snapshot_id).unlink()
                lock.release()
            published = set(layout.ids())
            notes = [*layout.admitted.iterdir(), *layout.in_use.iterdir()]
            orphans = [path for path in notes if path.stem not in published]
            for path in orphans:
                path.unlink(missing_ok=True)
        for path in swept:
            shutil.rmtree(path, ignore_errors=True)
        return [str(path.relative_to(self.root)) for path in (*swept, *orphans)]

    def _admission(self, snapshot_id: str) -> Admission | None:
        try:
            return decode(self._layout.admission(snapshot_id).read_bytes(), Admission)
        except (FileNotFoundError, msgspec.MsgspecError):
            return None

    def _summarize(self, snapshot_id: str) -> SnapshotSummary:
        manifest = self.manifest(snapshot_id)
        admission = self._admission(snapshot_id)
        admitted, reason = admission is not None, None
        if admission is not None:
            try:
                integrity.check_unchanged(self._layout.published(snapshot_id), admission)
                self.segments.check_unchanged(manifest.capture.weights)
            except SnapshotError as error:
                admitted = False
                # Across a reboot a difference means little: it is to be digested again, like one from elsewhere.
                rebooted = error.reason is Reason.SNAPSHOT_CHANGED and admission.boot_id != integrity.boot_id()
                reason = None if rebooted else error.reason.value
        return SnapshotSummary(
            id=snapshot_id,
            compatibility_key=manifest.compatibility_key,
            size_bytes=manifest.size_bytes,
            created_at=manifest.created_at,
            admitted=admitted,
            reason=reason,
        )

    def _unreadable(self, snapshot_id: str, error: SnapshotError) -> SnapshotSummary:
        folder = self._layout.published(snapshot_id)
        return SnapshotSummary(
            id=snapshot_id,
            compatibility_key="",
            size_bytes=sum(path.lstat().st_size for path in folder.rglob("*") if path.is_file()),
            created_at=folder.stat().st_mtime,
            admitted=False,
            reason=error.reason.value,
        )

    # last, as its name hides the builtin from what follows
    def list(self) -> list[SnapshotSummary]:
        """Returns all that is published, the newest first; what may not be used says why.

        Neither admitted nor with a reason: this node has yet to digest it.
        """
        summaries = []
        for snapshot_id in self._layout.ids():
            with suppress(FileNotFoundError):  # removed since we looked
                try:
                    summary = self._summarize(snapshot_id)
                except SnapshotError as error:
                    summary = self._unreadable(snapshot_id, error)
                if self._layout.published(snapshot_id).is_dir():  # else what it lacks was removed meanwhile
                    summaries.append(summary)
        return sorted(summaries, key=lambda summary: (summary.created_at, summary.id), reverse=True)
