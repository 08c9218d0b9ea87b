"""Where a file-system store keeps what.

::

    <root>/<id>/manifest.json      a published snapshot: there as a whole or not at all
    <root>/<id>/images/            CRIU's images
    <root>/.staging/<id>/          a capture under way, the same shape; <id>.lock is held by its process
    <root>/.removed/<id>/          taken out of sight, being deleted
    <root>/.segments/<digest>      the bytes of a weight segment, shared by the snapshots that name it
    <root>/.node/segments/         this node's note of each segment that it digested
    <root>/.node/admitted/         this node's admission of each snapshot
    <root>/.node/in-use/           a lock file for each snapshot, shared by its users
    <root>/.node/store.lock        held for the moment in which names change
"""

from __future__ import annotations

import re
from pathlib import Path

from dynamo_snapshot.errors import SnapshotError
from dynamo_snapshot.model import Reason

_ID = re.compile(r"[a-z0-9][a-z0-9-]{0,104}-[0-9]{8}-[0-9]{6}-[0-9a-f]{6}")
"""As :meth:`SnapshotStore.stage` makes them. Any other folder is somebody else's: neither listed nor removed."""


class Layout:
    """The paths of one store."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.staging = root / ".staging"
        self.removed = root / ".removed"
        self.segments = root / ".segments"
        self.segment_notes = root / ".node" / "segments"
        self.admitted = root / ".node" / "admitted"
        self.in_use = root / ".node" / "in-use"
        self.store_lock = root / ".node" / "store.lock"

    def create(self) -> None:
        """Makes what is missing. Images hold a process's memory, so only the owner may read."""
        folders = (self.root, self.staging, self.removed, self.segments)
        for folder in (*folders, self.segment_notes, self.admitted, self.in_use):
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)

    def published(self, snapshot_id: str) -> Path:
        """Returns the folder of a published snapshot; raises ``snapshot_missing`` for what cannot be an id."""
        if not _ID.fullmatch(snapshot_id):
            raise missing(snapshot_id, self.root)
        return self.root / snapshot_id

    def admission(self, snapshot_id: str) -> Path:
        return self.admitted / f"{snapshot_id}.json"

    def use_lock(self, snapshot_id: str) -> Path:
        return self.in_use / f"{snapshot_id}.lock"

    def staging_lock(self, snapshot_id: str) -> Path:
        return self.staging / f"{snapshot_id}.lock"

    def ids(self) -> list[str]:
        """The ids of all that is published, sorted; empty where there is no store."""
        try:
            return sorted(path.name for path in self.root.iterdir() if _ID.fullmatch(path.name) and path.is_dir())
        except FileNotFoundError:
            return []


def missing(snapshot_id: str, root: Path) -> SnapshotError:
    return SnapshotError(
        Reason.SNAPSHOT_MISSING,
        f"there is no snapshot {snapshot_id!r} in {root}",
        "`dynamo-snapshot snapshots ls` lists what is there.",
    )
