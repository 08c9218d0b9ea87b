"""A house's ``/dev/shm`` in a snapshot: CRIU stores the mappings, not the files behind them.

One archive and not a copy of the folder: CRIU wants back each file's mode and owner, and a published
file is read-only.
"""

from __future__ import annotations

import tarfile
from pathlib import Path

ARCHIVE = "shm.tar"
"""Beside CRIU's images; absent where there was nothing."""
_LINK_REMAP = "link_remap."


def save(shm: Path, images: Path) -> None:
    """Archives what lies in ``shm`` beside the images of the worker that uses it. Blocks."""
    if any(shm.iterdir()):
        with tarfile.open(images / ARCHIVE, "w") as archive:
            archive.add(shm, arcname=".")


def load(images: Path, shm: Path) -> None:
    """Puts back what :func:`save` archived. Blocks."""
    if (images / ARCHIVE).exists():
        with tarfile.open(images / ARCHIVE) as archive:
            archive.extractall(shm, numeric_owner=True, filter="fully_trusted")


def remove_links(shm: Path) -> None:
    """Removes the names that CRIU gave to unlinked files for the image; for the running source they are litter."""
    for path in shm.glob(f"{_LINK_REMAP}*"):
        path.unlink(missing_ok=True)
