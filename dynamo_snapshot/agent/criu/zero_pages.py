"""All-zero pages are taken out of a CRIU image between dump and digest.

Most of what CRIU stores for a CUDA process is zeros: the driver's host copy of GPU memory, pinned
buffers. A page that stands in no image comes back as untouched memory, and untouched *anonymous*
memory reads as zero, so dropping such pages changes nothing but the time. That holds for private
anonymous mappings and for shared anonymous memory only: an untouched page of a private file mapping
shows the file. CRIU itself drops what a forked child would inherit from its parent at such an
address (``restore_priv_vma_content`` in its ``mem.c``), so the rule holds for children as well.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dynamo_snapshot.agent.criu.images import MM_MAGIC, PAGE, PAGEMAP_MAGIC, read_image, schema, write_image
from dynamo_snapshot.errors import SnapshotError
from dynamo_snapshot.model import Reason

Pages = NDArray[np.int64]
Mask = NDArray[np.bool_]

SHORTEST_GAP = 8
"""Zero runs inside an entry that are shorter stay: each entry costs CRIU a read of its own."""

# CRIU's include/image.h: what a mapping is, and Linux's mmap flags.
_ANON_PRIVATE, _ANON_SHARED = 1 << 9, 1 << 8
_SPECIAL = sum(1 << bit for bit in (2, 3, 10, 11, 12, 13, 14, 15, 16, 17))
"""vsyscall, vdso, System V, socket, vvar, aio ring, memfd, shadow stack, guard, uprobes."""
_MAP_HUGETLB = 0x40000
_IN_PARENT, _PRESENT = 1 << 0, 1 << 2

_SCAN_PAGES = 4096
_COPY_PAGES = 16384
_SHARED_PREFIX = "pagemap-shmem-"


@dataclass(frozen=True, slots=True)
class ZeroPages:
    """What :func:`drop_zero_pages` did to one image folder."""

    bytes_before: int
    """Page data, before and after."""
    bytes_after: int
    entries_before: int
    """Runs of pages that CRIU reads one by one."""
    entries_after: int


@dataclass(frozen=True, slots=True)
class Droppable:
    """Where zero pages may be dropped: sorted, disjoint address ranges, in bytes."""

    starts: Pages
    ends: Pages

    @classmethod
    def of(cls, ranges: list[tuple[int, int]]) -> Droppable:
        ordered = np.array(sorted(ranges), dtype=np.int64).reshape(-1, 2)
        return cls(ordered[:, 0], ordered[:, 1])

    def covers(self, addresses: Pages) -> Mask:
        """For each page address: does it lie in one of the ranges?"""
        if not len(self.starts):
            return np.zeros(len(addresses), dtype=np.bool_)
        index = np.searchsorted(self.starts, addresses, side="right") - 1
        return (index >= 0) & (addresses < self.ends[np.maximum(index, 0)])


def drop_zero_pages(images: Path, criu: Path | None = None, threads: int | None = None) -> ZeroPages:
    """Rewrites the page files in ``images`` without the zero pages that may be dropped.

    To be called on a staged dump, before it is digested: files are replaced one by one.

    Args:
        images: CRIU's image folder.
        criu: the criu that wrote it (see :func:`dynamo_snapshot.agent.criu.images.schema`).
        threads: for scanning and copying; by default one a core, at most 8.

    Raises:
        SnapshotError: ``snapshot_corrupt`` when page map and page data do not belong together.
    """
    mappings = _Mappings(images, criu)
    total = ZeroPages(0, 0, 0, 0)
    with ThreadPoolExecutor(threads or min(8, os.cpu_count() or 1)) as pool:
        for path in sorted(images.glob("pagemap-*.img")):
            done = _rewrite(path, mappings.droppable(path.stem), criu, pool)
            total = ZeroPages(
                total.bytes_before + done.bytes_before,
                total.bytes_after + done.bytes_after,
                total.entries_before + done.entries_before,
                total.entries_after + done.entries_after,
            )
    return total


def kept_runs(owner: Pages, keep: Mask, shortest_gap: int = SHORTEST_GAP) -> tuple[Pages, Pages]:
    """Returns (first page, number of pages) of each run to keep; a run lies within one entry.

    Args:
        owner: for each page in the file, the index of the entry it belongs to, ascending.
        keep: for each page, whether it must stay.
        shortest_gap: a shorter gap between two kept runs of one entry is kept too.
    """
    first, length, kept = _runs(owner, keep)
    if not len(first):
        return first, length
    of = owner[first]
    inner = np.zeros(len(first), dtype=np.bool_)
    # Runs of one entry alternate, so a dropped run with neighbours of its entry stands between kept ones.
    inner[1:-1] = (of[1:-1] == of[:-2]) & (of[1:-1] == of[2:])
    filled = kept | (inner & (length < shortest_gap))
    first, length, kept = _runs(owner, np.repeat(filled, length))
    return first[kept], length[kept]


def _runs(owner: Pages, keep: Mask) -> tuple[Pages, Pages, Mask]:
    """Maximal runs of pages with one owner and one verdict: (first page, pages, verdict)."""
    if not len(owner):
        empty = np.zeros(0, dtype=np.int64)
        return empty, empty, np.zeros(0, dtype=np.bool_)
    change = np.flatnonzero((owner[1:] != owner[:-1]) | (keep[1:] != keep[:-1])) + 1
    first = np.concatenate(([0], change)).astype(np.int64)
    length = np.diff(np.append(first, len(owner)))
    return first, length, keep[first]


class _Mappings:
    """What the dumped processes' memory maps say of each page map."""

    def __init__(self, images: Path, criu: Path | None) -> None:
        self._private: dict[str, Droppable] = {}
        shared: set[int] = set()
        other: set[int] = set()
        kind = schema("mm", criu).mm_entry
        for path in images.glob("mm-*.img"):
            private = []
            for message in read_image(path, MM_MAGIC):
                for vma in kind.FromString(message).vmas:
                    plain = not vma.status & _SPECIAL and not vma.flags & _MAP_HUGETLB
                    if vma.status & _ANON_PRIVATE and plain:
                        private.append((vma.start, vma.end))
                    elif vma.shmid:
                        (shared if vma.status & _ANON_SHARED and plain else other).add(vma.shmid)
            self._private[path.stem.removeprefix("mm-")] = Droppable.of(private)
        self._shared = shared - other

    def droppable(self, pagemap: str) -> Droppable:
        """Where pages of the image named ``pagemap`` may go: nowhere for what is not known."""
        if pagemap.startswith(_SHARED_PREFIX):
            whole = [(0, np.iinfo(np.int64).max)]
            return Droppable.of(whole if int(pagemap.removeprefix(_SHARED_PREFIX)) in self._shared else [])
        return self._private.get(pagemap.removeprefix("pagemap-"), Droppable.of([]))


def _rewrite(path: Path, droppable: Droppable, criu: Path | None, pool: ThreadPoolExecutor) -> ZeroPages:
    pb = schema("pagemap", criu)
    messages = read_image(path, PAGEMAP_MAGIC)
    head = pb.pagemap_head.FromString(next(messages))
    entries = [pb.pagemap_entry.FromString(message) for message in messages]
    pages_file = path.with_name(f"pages-{head.pages_id}.img")
    stored = np.array([_page_count(entry) if _is_present(entry) else 0 for entry in entries], dtype=np.int64)
    size = pages_file.stat().st_size if pages_file.exists() else 0
    if size != int(stored.sum()) * PAGE:
        raise SnapshotError(
            Reason.SNAPSHOT_CORRUPT,
            f"{pages_file} has {size} bytes, but {path.name} accounts for {int(stored.sum()) * PAGE}",
            "Capture again; nothing but CRIU may write into an image folder during a dump.",
        )
    if not size:
        return ZeroPages(0, 0, len(entries), len(entries))

    owner = np.repeat(np.arange(len(entries), dtype=np.int64), stored)
    offset = np.cumsum(stored) - stored
    within = np.arange(len(owner), dtype=np.int64) - offset[owner]
    # Reading through int64 keeps user addresses (47 or 56 bits) as they are; vsyscall is no user address.
    base = np.array([min(entry.vaddr, np.iinfo(np.int64).max) for entry in entries], dtype=np.int64)
    address = base[owner] + within * PAGE
    first, length = kept_runs(owner, ~(droppable.covers(address) & _zero_mask(pages_file, pool)))
    if int(length.sum()) * PAGE == size:
        return ZeroPages(size, size, len(entries), len(entries))

    pieces: dict[int, list[tuple[int, int]]] = {}
    for run, pages in zip(first.tolist(), length.tolist(), strict=True):
        pieces.setdefault(int(owner[run]), []).append((int(within[run]), pages))
    rewritten = list(_split(entries, pieces))
    new_pages, new_map = pages_file.with_suffix(".new"), path.with_suffix(".new")
    _copy_runs(pages_file, new_pages, first, length, pool)
    write_image(new_map, PAGEMAP_MAGIC, [head, *rewritten])
    new_pages.rename(pages_file)
    new_map.rename(path)
    return ZeroPages(size, int(length.sum()) * PAGE, len(entries), len(rewritten))


def _split(entries: list[Any], pieces: dict[int, list[tuple[int, int]]]) -> Iterator[Any]:
    for index, entry in enumerate(entries):
        if not _is_present(entry):
            yield entry
            continue
        for skipped, pages in pieces.get(index, ()):
            part = type(entry)()
            part.CopyFrom(entry)
            part.vaddr = entry.vaddr + skipped * PAGE
            if entry.HasField("nr_pages"):
                part.nr_pages = pages
            if entry.HasField("compat_nr_pages"):
                part.compat_nr_pages = pages
            yield part


def _page_count(entry: Any) -> int:
    return int(entry.nr_pages if entry.HasField("nr_pages") else entry.compat_nr_pages)


def _is_present(entry: Any) -> bool:
    if entry.HasField("flags"):
        return bool(entry.flags & _PRESENT) and not entry.flags & _IN_PARENT
    return not entry.in_parent


def _zero_mask(path: Path, pool: ThreadPoolExecutor) -> Mask:
    words = np.memmap(path, dtype=np.uint64, mode="r").reshape(-1, PAGE // 8)
    zero = np.empty(len(words), dtype=np.bool_)

    def scan(at: int) -> None:
        np.equal(np.bitwise_or.reduce(words[at : at + _SCAN_PAGES], axis=1), 0, out=zero[at : at + _SCAN_PAGES])

    list(pool.map(scan, range(0, len(words), _SCAN_PAGES)))
    return zero


def _copy_runs(source: Path, target: Path, first: Pages, length: Pages, pool: ThreadPoolExecutor) -> None:
    """Copies the runs of pages, one after the other, to a new file: the kernel moves the bytes."""
    begins = np.append(True, first[1:] != first[:-1] + length[:-1]).nonzero()[0] if len(first) else first
    joined = np.add.reduceat(length, begins) if len(first) else length
    to = np.cumsum(joined) - joined
    with source.open("rb") as reader, target.open("wb") as writer:
        writer.truncate(int(joined.sum()) * PAGE)

        def copy(share: NDArray[np.int64]) -> None:
            for read_at, left, write_at in share.tolist():
                while left:
                    moved = os.copy_file_range(reader.fileno(), writer.fileno(), left, read_at, write_at)
                    if not moved:
                        raise SnapshotError(Reason.SNAPSHOT_CORRUPT, f"{source} became shorter while it was copied")
                    read_at, left, write_at = read_at + moved, left - moved, write_at + moved

        runs = np.stack((first[begins], joined, to), axis=1) * PAGE
        share_of = to // _COPY_PAGES
        list(pool.map(copy, np.split(runs, np.flatnonzero(np.diff(share_of)) + 1)))
