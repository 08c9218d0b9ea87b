"""Dropping zero pages changes no byte that a restore would show, on images made up of anything."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dynamo_snapshot.agent.criu.images import MM_MAGIC, PAGE, PAGEMAP_MAGIC, read_image, schema, write_image
from dynamo_snapshot.agent.criu.zero_pages import SHORTEST_GAP, Droppable, drop_zero_pages, kept_runs
from dynamo_snapshot.errors import SnapshotError
from dynamo_snapshot.model import Reason

CRIU = Path(sys.prefix) / "share" / "dynamo-snapshot" / "criu" / "criu"
PRESENT, IN_PARENT, LAZY = 4, 1, 2
ANON_PRIVATE, FILE_PRIVATE, ANON_SHARED, FILE_SHARED, MEMFD, AIO = 1 << 9, 1 << 6, 1 << 8, 1 << 7, 1 << 14, 1 << 13
HUGETLB = 0x40000

Contents = dict[int, bytes]


def pagemap(folder: Path, name: str, pages_id: int, entries: list[tuple[int, list[int], int]]) -> None:
    """Writes a page map and its pages; an entry is (address, a byte for each page, flags)."""
    pb = schema("pagemap", CRIU)
    messages = [pb.pagemap_head(pages_id=pages_id)]
    data = b""
    for address, fill, flags in entries:
        messages.append(pb.pagemap_entry(vaddr=address, nr_pages=len(fill), compat_nr_pages=len(fill), flags=flags))
        if flags & PRESENT:
            data += b"".join(bytes(PAGE - 1) + bytes([byte]) for byte in fill)
    write_image(folder / f"pagemap-{name}.img", PAGEMAP_MAGIC, messages)
    (folder / f"pages-{pages_id}.img").write_bytes(data)


def memory_map(folder: Path, pid: int, vmas: list[tuple[int, int, int, int, int]]) -> None:
    """Writes a process's mappings; each is (start, end, status, flags, shmid)."""
    pb = schema("mm", CRIU)
    mm = pb.mm_entry(**{field.name: 0 for field in pb.mm_entry.DESCRIPTOR.fields[:12]})
    for start, end, status, flags, shmid in vmas:
        mm.vmas.add(start=start, end=end, status=status, flags=flags, shmid=shmid, pgoff=0, prot=3, fd=-1)
    write_image(folder / f"mm-{pid}.img", MM_MAGIC, [mm])


def contents(folder: Path, name: str) -> tuple[Contents, list[tuple[int, int, int]]]:
    """The stored pages by address, and every entry as (address, pages, flags)."""
    pb = schema("pagemap", CRIU)
    messages = read_image(folder / f"pagemap-{name}.img", PAGEMAP_MAGIC)
    head = pb.pagemap_head.FromString(next(messages))
    data = (folder / f"pages-{head.pages_id}.img").read_bytes()
    pages: Contents = {}
    entries = []
    at = 0
    for message in messages:
        entry = pb.pagemap_entry.FromString(message)
        assert entry.compat_nr_pages == entry.nr_pages
        entries.append((entry.vaddr, entry.nr_pages, entry.flags))
        if entry.flags & PRESENT:
            for page in range(entry.nr_pages):
                pages[entry.vaddr + page * PAGE] = data[at : at + PAGE]
                at += PAGE
    assert at == len(data)
    return pages, entries


BASE = 0x7F0000000000
fills = st.lists(st.sampled_from([0, 0, 0, 0, 1, 7]), min_size=1, max_size=40)
runs = st.tuples(st.integers(0, 3), fills, st.sampled_from([PRESENT, PRESENT | LAZY, IN_PARENT]))


@settings(deadline=None, max_examples=150)
@given(st.lists(runs, max_size=8), st.lists(st.tuples(st.integers(0, 60), st.integers(1, 60)), max_size=4))
def test_what_is_restored_stays_the_same(
    tmp_path_factory: pytest.TempPathFactory,
    layout: list[tuple[int, list[int], int]],
    anonymous: list[tuple[int, int]],
) -> None:
    folder = tmp_path_factory.mktemp("images")
    entries = []
    address = BASE
    for gap, fill, flags in layout:
        address += gap * PAGE
        entries.append((address, fill, flags))
        address += len(fill) * PAGE
    vmas, end = [], BASE
    for skip, size in anonymous:
        start = end + skip * PAGE
        end = start + size * PAGE
        vmas.append((start, end, 1 | ANON_PRIVATE, 0x22, 0))
    pagemap(folder, "42", 3, entries)
    memory_map(folder, 42, vmas)
    before, entries_before = contents(folder, "42")

    result = drop_zero_pages(folder, CRIU, threads=2)

    after, entries_after = contents(folder, "42")
    assert all(before[at] == page for at, page in after.items())
    for at in before.keys() - after.keys():
        assert not any(before[at])
        assert any(start <= at < stop for start, stop, *_ in vmas)
    assert [e for e in entries_before if not e[2] & PRESENT] == [e for e in entries_after if not e[2] & PRESENT]
    assert entries_after == sorted(entries_after)
    assert (result.bytes_before, result.bytes_after) == (len(before) * PAGE, len(after) * PAGE)
    assert (result.entries_before, result.entries_after) == (len(entries_before), len(entries_after))
    assert not list(folder.glob("*.new"))


@pytest.mark.parametrize(
    ("status", "flags", "dropped"),
    [
        (ANON_PRIVATE, 0x22, True),
        (ANON_PRIVATE | 1 << 5, 0x22, True),
        (FILE_PRIVATE, 0x02, False),
        (FILE_SHARED, 0x01, False),
        (ANON_PRIVATE | AIO, 0x22, False),
        (ANON_PRIVATE, 0x22 | HUGETLB, False),
    ],
    ids=["anonymous", "heap", "private file", "shared file", "aio ring", "huge pages"],
)
def test_only_private_anonymous_mappings_lose_pages(tmp_path: Path, status: int, flags: int, dropped: bool) -> None:
    pagemap(tmp_path, "42", 1, [(BASE, [0] * 32, PRESENT)])
    memory_map(tmp_path, 42, [(BASE, BASE + 32 * PAGE, 1 | status, flags, 0)])
    assert (drop_zero_pages(tmp_path, CRIU).bytes_after == 0) is dropped


@pytest.mark.parametrize(
    ("status", "dropped"),
    [(ANON_SHARED, True), (FILE_SHARED | MEMFD, False), (ANON_SHARED | 1 << 10, False)],
    ids=["anonymous", "memfd", "System V"],
)
def test_only_shared_anonymous_memory_loses_pages(tmp_path: Path, status: int, dropped: bool) -> None:
    pagemap(tmp_path, "shmem-77", 1, [(0, [0] * 32, PRESENT)])
    memory_map(tmp_path, 42, [(BASE, BASE + 32 * PAGE, 1 | status, 0x21, 77)])
    assert (drop_zero_pages(tmp_path, CRIU).bytes_after == 0) is dropped


def test_memory_that_no_mapping_explains_is_left_alone(tmp_path: Path) -> None:
    pagemap(tmp_path, "shmem-5", 1, [(0, [0] * 32, PRESENT)])
    pagemap(tmp_path, "9", 2, [(BASE, [0] * 32, PRESENT)])
    assert drop_zero_pages(tmp_path, CRIU).bytes_after == 64 * PAGE


def test_short_gaps_stay_and_edges_go() -> None:
    keep = np.array([0, 0, 1, 0, 0, 1, 0], dtype=np.bool_)
    first, length = kept_runs(np.zeros(7, dtype=np.int64), keep, SHORTEST_GAP)
    assert (first.tolist(), length.tolist()) == ([2], [4])
    first, length = kept_runs(np.zeros(7, dtype=np.int64), keep, shortest_gap=2)
    assert (first.tolist(), length.tolist()) == ([2, 5], [1, 1])


def test_a_gap_between_two_entries_is_not_filled() -> None:
    first, length = kept_runs(np.array([0, 0, 1, 1]), np.array([1, 0, 0, 1], dtype=np.bool_))
    assert (first.tolist(), length.tolist()) == ([0, 3], [1, 1])


def test_ranges_cover_their_start_and_not_their_end() -> None:
    covered = Droppable.of([(8, 16), (24, 32)]).covers(np.array([0, 8, 15, 16, 24, 32]))
    assert covered.tolist() == [False, True, True, False, True, False]


def test_pages_that_do_not_belong_to_the_map_are_refused(tmp_path: Path) -> None:
    pagemap(tmp_path, "42", 1, [(BASE, [0] * 4, PRESENT)])
    memory_map(tmp_path, 42, [(BASE, BASE + 4 * PAGE, 1 | ANON_PRIVATE, 0x22, 0)])
    with (tmp_path / "pages-1.img").open("ab") as pages:
        pages.write(b"x")
    with pytest.raises(SnapshotError, match="accounts for 16384") as refused:
        drop_zero_pages(tmp_path, CRIU)
    assert refused.value.reason is Reason.SNAPSHOT_CORRUPT


@pytest.mark.parametrize("cut", [3, 10, 15])
def test_a_truncated_image_is_refused(tmp_path: Path, cut: int) -> None:
    pagemap(tmp_path, "42", 1, [(BASE, [1], PRESENT)])
    path = tmp_path / "pagemap-42.img"
    path.write_bytes(path.read_bytes()[:cut])
    with pytest.raises(SnapshotError) as refused:
        list(read_image(path, PAGEMAP_MAGIC))
    assert refused.value.reason is Reason.SNAPSHOT_CORRUPT
