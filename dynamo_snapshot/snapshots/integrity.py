"""Is a snapshot still what was published? In full by digest, and at once by what the kernel says of its files.

A file's digest is SHA-256 over the SHA-256 digests of its 16 MiB chunks, in order. SHA-256 because
processors have instructions for it (1.4 GB/s a core where BLAKE2b did 0.7, measured on the CI's kind
of machine); chunks because one file of pages holds nearly all the bytes, and only its parts can be
digested side by side.
"""

from __future__ import annotations

import hashlib
import os
import stat
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from dynamo_snapshot.errors import SnapshotError
from dynamo_snapshot.model import Reason, Value
from dynamo_snapshot.snapshots.files import files_below
from dynamo_snapshot.snapshots.manifest import FileEntry

ALGORITHM = "sha256/16MiB"
_CHUNK_BYTES = 16 << 20
_BUFFER_BYTES = 1 << 20
_MAX_THREADS = 8

Progress = Callable[[int], None]
"""Called with the bytes digested since the last call; raising stops the work."""


class FileSignature(Value, frozen=True):
    """What changes when anyone writes to a file, replaces it or touches it."""

    device: int
    inode: int
    size: int
    mtime_ns: int
    ctime_ns: int


class Admission(Value, frozen=True):
    """A node's note that it digested a snapshot in full and what its files looked like then."""

    snapshot_id: str
    at: float
    boot_id: str
    """Of the host: a reboot may number devices anew, which a full digest has to settle."""
    files: dict[str, FileSignature]
    """By path relative to the snapshot's folder, the manifest included."""


def boot_id() -> str:
    """Returns what identifies this boot of this host."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def sign(path: Path) -> FileSignature:
    """Returns the signature of a regular file; raises ``OSError``, or ``ValueError`` for anything else."""
    status = os.lstat(path)
    if not stat.S_ISREG(status.st_mode):
        raise ValueError(f"{path} is not a regular file")
    return FileSignature(
        device=status.st_dev,
        inode=status.st_ino,
        size=status.st_size,
        mtime_ns=status.st_mtime_ns,
        ctime_ns=status.st_ctime_ns,
    )


def sign_files(folder: Path, names: Iterable[str], snapshot_id: str) -> dict[str, FileSignature]:
    """Signs each named file; raises ``snapshot_corrupt`` naming one that is missing or no regular file."""
    return {name: _sign(folder, name, snapshot_id) for name in names}


def digest_files(folder: Path, sizes: Mapping[str, int], progress: Progress | None = None) -> tuple[FileEntry, ...]:
    """Digests ``folder``'s files, given as relative path and size in bytes, on at most 8 threads.

    Raises:
        SnapshotError: ``snapshot_corrupt`` naming a file that is missing or shorter than its size.
    """
    jobs = [(path, offset) for path, size in sizes.items() for offset in range(0, max(size, 1), _CHUNK_BYTES)]
    chunks: dict[str, bytearray] = {path: bytearray() for path in sizes}
    threads = min(_MAX_THREADS, os.cpu_count() or 1)
    with ThreadPoolExecutor(threads, thread_name_prefix="digest") as pool:
        results = pool.map(lambda job: _digest_chunk(folder, job[0], job[1], sizes[job[0]]), jobs)
        try:
            for (path, offset), digest in zip(jobs, results, strict=True):
                chunks[path] += digest
                if progress:
                    progress(min(_CHUNK_BYTES, sizes[path] - offset))
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise
    return tuple(
        FileEntry(path=path, size=sizes[path], digest=hashlib.sha256(chunks[path]).hexdigest()) for path in sizes
    )


def verify_files(
    folder: Path, entries: Iterable[FileEntry], snapshot_id: str, progress: Progress | None = None
) -> None:
    """Digests every file again and holds it against ``entries``.

    Raises:
        SnapshotError: ``snapshot_corrupt`` naming the first file that is missing, truncated, too long,
            unexpected or of other content.
    """
    expected = {entry.path: entry for entry in entries}
    for path, entry in expected.items():
        _check_size(folder, path, entry.size, snapshot_id)
    for path in sorted(set(files_below(folder)) - set(expected)):
        raise _refuse(Reason.SNAPSHOT_CORRUPT, snapshot_id, path, "is not in the manifest")
    for found in digest_files(folder, {path: entry.size for path, entry in expected.items()}, progress):
        if found.digest != expected[found.path].digest:
            raise _refuse(Reason.SNAPSHOT_CORRUPT, snapshot_id, found.path, "has other content than was published")


def check_unchanged(folder: Path, admission: Admission) -> None:
    """Compares every file with its signature at admission; reads no content.

    Raises:
        SnapshotError: ``snapshot_corrupt`` for a missing or truncated file, ``snapshot_changed`` for any
            other difference; the message names the file.
    """
    for path, then in admission.files.items():
        now = _check_size(folder, path, then.size, admission.snapshot_id)
        if now != then:
            fields = [name for name in now.__struct_fields__ if getattr(now, name) != getattr(then, name)]
            raise _refuse(
                Reason.SNAPSHOT_CHANGED,
                admission.snapshot_id,
                path,
                f"was changed since its admission ({', '.join(fields)})",
            )
    for path in sorted(set(files_below(folder)) - set(admission.files)):
        raise _refuse(Reason.SNAPSHOT_CHANGED, admission.snapshot_id, path, "was added since its admission")


def _digest_chunk(folder: Path, path: str, offset: int, size: int) -> bytes:
    digest = hashlib.sha256()
    left = min(_CHUNK_BYTES, size - offset)
    buffer = memoryview(bytearray(min(_BUFFER_BYTES, max(left, 1))))
    try:
        descriptor = os.open(folder / path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except FileNotFoundError as error:
        raise SnapshotError(Reason.SNAPSHOT_CORRUPT, f"{folder / path} is missing") from error
    try:
        while left > 0:
            count = os.preadv(descriptor, [buffer[: min(left, len(buffer))]], offset)
            if count == 0:
                raise SnapshotError(
                    Reason.SNAPSHOT_CORRUPT, f"{folder / path} is truncated: it ends at byte {offset} of {size}"
                )
            digest.update(buffer[:count])
            offset += count
            left -= count
    finally:
        os.close(descriptor)
    return digest.digest()


def _sign(folder: Path, path: str, snapshot_id: str) -> FileSignature:
    try:
        return sign(folder / path)
    except FileNotFoundError as error:
        raise _refuse(Reason.SNAPSHOT_CORRUPT, snapshot_id, path, "is missing") from error
    except (OSError, ValueError) as error:
        raise _refuse(Reason.SNAPSHOT_CORRUPT, snapshot_id, path, f"cannot be used: {error}") from error


def _check_size(folder: Path, path: str, size: int, snapshot_id: str) -> FileSignature:
    signature = _sign(folder, path, snapshot_id)
    if signature.size < size:
        raise _refuse(Reason.SNAPSHOT_CORRUPT, snapshot_id, path, f"is truncated: {signature.size} of {size} bytes")
    if signature.size > size:
        raise _refuse(
            Reason.SNAPSHOT_CORRUPT, snapshot_id, path, f"is too long: {signature.size} instead of {size} bytes"
        )
    return signature


def _refuse(reason: Reason, snapshot_id: str, path: str, what: str) -> SnapshotError:
    return SnapshotError(
        reason,
        f"snapshot {snapshot_id}: {path} {what}",
        f"`dynamo-snapshot snapshots verify {snapshot_id}` digests it again and admits it if its content is right; "
        "otherwise remove it: the next worker is captured anew."
        if reason is Reason.SNAPSHOT_CHANGED
        else f"Remove it with `dynamo-snapshot snapshots rm {snapshot_id}`: the next worker is captured anew.",
    )
