from __future__ import annotations

import asyncio
import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dynamo_snapshot.agent.journal import (
    KEEP_OUTCOMES,
    Begun,
    Committed,
    Ended,
    Entry,
    FenceSeen,
    Journal,
    JournalState,
    ReplicaGone,
    ReplicaNoted,
    ReplicaRecord,
)
from dynamo_snapshot.errors import SnapshotError
from dynamo_snapshot.model import Order, OrderKind, OrderStatus, Outcome, Reason, Way, WorkerSpec

IDS = st.sampled_from(["a", "b", "c"])


def order(order_id: str) -> Order:
    return Order(id=order_id, kind=OrderKind.RESTORE, replica_id="r", pool="p", fence=1, issued_at=1, deadline=2)


def outcome(order_id: str, status: OrderStatus = OrderStatus.DONE) -> Outcome:
    return Outcome(order_id=order_id, status=status, started_at=1, finished_at=2)


def record(replica_id: str, served: bool = False) -> ReplicaRecord:
    spec = WorkerSpec(command=("true",))
    return ReplicaRecord(
        replica_id=replica_id, pool="p", way=Way.RESTORE, incarnation="i", rpc_port=1, spec=spec, order_id="o",
        ordered_at=0.0, served=served,
    )  # fmt: skip


ENTRIES = st.lists(
    st.one_of(
        st.builds(FenceSeen, fence=st.integers(0, 9)),
        st.builds(Begun, order=IDS.map(order)),
        st.builds(Committed, order_id=IDS, phase=st.just("release")),
        st.builds(Ended, outcome=st.builds(outcome, IDS, st.sampled_from(OrderStatus))),
        st.builds(ReplicaNoted, record=st.builds(record, IDS, st.booleans())),
        st.builds(ReplicaGone, replica_id=IDS),
    ),
    max_size=30,
)


def content(state: JournalState) -> tuple[object, ...]:
    return state.fence, state.open, state.committed, state.outcomes, state.replicas


def sum_of(entries: list[Entry]) -> JournalState:
    state = JournalState()
    for entry in entries:
        state.apply(entry)
    return state


@given(ENTRIES)
def test_the_summary_of_a_journal_has_the_same_sum(entries: list[Entry]) -> None:
    state = sum_of(entries)
    assert content(sum_of(state.entries())) == content(state)


@given(ENTRIES)
def test_an_order_ends_once_and_the_fence_never_falls(entries: list[Entry]) -> None:
    state = JournalState()
    first: dict[str, Outcome] = {}
    highest = 0
    for entry in entries:
        state.apply(entry)
        if isinstance(entry, Ended):
            first.setdefault(entry.outcome.order_id, entry.outcome)
        if isinstance(entry, FenceSeen):
            highest = max(highest, entry.fence)
        assert state.outcomes == first
        assert state.fence == highest


@settings(max_examples=25, deadline=None)
@given(entries=ENTRIES, cut=st.integers(0, 40))
def test_a_journal_cut_anywhere_in_its_last_line_is_read_up_to_it(
    tmp_path_factory: pytest.TempPathFactory, entries: list[Entry], cut: int
) -> None:
    path = tmp_path_factory.mktemp("journal") / "journal"
    journal = Journal(path)
    for entry in entries:
        journal.append(entry)
    before = content(journal.state)
    journal.close()
    with path.open("ab") as file:
        file.write(b'{"type":"fence","fence":99}'[:cut] if cut < 26 else b"")
    assert content(Journal(path).state) == before


def test_a_line_that_is_no_entry_is_refused_with_its_place(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    path.write_text('{"type":"fence","fence":3}\nnonsense\n{"type":"fence","fence":4}\n')
    with pytest.raises(SnapshotError, match=r"journal:2: not a journal entry") as refused:
        Journal(path)
    assert refused.value.reason is Reason.STATE_CORRUPT


def test_it_is_rewritten_when_it_has_grown(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "journal")
    for number in range(6000):
        journal.append(FenceSeen(fence=number))
    assert len((tmp_path / "journal").read_bytes().splitlines()) < 2000
    assert Journal(tmp_path / "journal").state.fence == 5999


def test_only_the_newest_outcomes_are_kept() -> None:
    state = sum_of([Ended(outcome=outcome(str(number))) for number in range(KEEP_OUTCOMES + 5)])
    assert next(iter(state.outcomes)) == "5"
    assert len(state.outcomes) == KEEP_OUTCOMES


async def test_one_sync_serves_all_who_wait(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []
    monkeypatch.setattr(os, "fdatasync", calls.append)
    journal = Journal(tmp_path / "journal")

    async def one(number: int) -> None:
        journal.append(FenceSeen(fence=number))
        await journal.synced()

    await asyncio.gather(*(one(number) for number in range(50)))
    assert 1 <= len(calls) <= 2
    await journal.commit("o", "release")
    assert len(calls) <= 3
    assert journal.state.committed == {"o": "release"}


@pytest.fixture
def full_disk(monkeypatch: pytest.MonkeyPatch) -> Callable[[bool], None]:
    """Says whether the disk is full: a write then gets a few bytes out before it fails, as ext4's do."""
    write, fsync = os.write, os.fsync
    full = False
    begun: set[int] = set()

    def partly(descriptor: int, data: bytes) -> int:
        if not full:
            return write(descriptor, data)
        if descriptor in begun:
            begun.clear()
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        begun.add(descriptor)
        return write(descriptor, data[:5])

    def refused(descriptor: int) -> None:
        if full:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        fsync(descriptor)

    monkeypatch.setattr(os, "write", partly)
    monkeypatch.setattr(os, "fsync", refused)

    def say(now: bool) -> None:
        nonlocal full
        full = now

    return say


def test_a_full_disk_refuses_what_is_to_be_begun_and_leaves_a_readable_file(
    tmp_path: Path, full_disk: Callable[[bool], None]
) -> None:
    journal = Journal(tmp_path / "journal")
    journal.append(FenceSeen(fence=3))
    full_disk(True)
    with pytest.raises(SnapshotError) as refused:
        journal.append(Begun(order=order("a")))
    assert refused.value.reason is Reason.DISK_FULL
    assert journal.state.open == {}
    full_disk(False)
    journal.append(Begun(order=order("b")))
    assert content(Journal(tmp_path / "journal").state) == content(journal.state)


@pytest.mark.parametrize(
    ("code", "reason"),
    [(errno.EIO, Reason.DISK_FAILED), (errno.EACCES, Reason.NOT_PRIVILEGED), (errno.EDQUOT, Reason.DISK_FULL)],
)
def test_a_disk_that_refuses_is_no_fault_of_this_program(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int, reason: Reason
) -> None:
    journal = Journal(tmp_path / "journal")

    def refuse(*arguments: object) -> NoReturn:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, "write", refuse)
    with pytest.raises(SnapshotError) as refused:
        journal.append(FenceSeen(fence=1))
    assert refused.value.reason is reason
    assert refused.value.remedy
    monkeypatch.setattr(Path, "read_bytes", refuse)
    with pytest.raises(SnapshotError, match="cannot be read"):
        Journal(tmp_path / "journal")


def test_what_has_happened_outlasts_a_full_disk(tmp_path: Path, full_disk: Callable[[bool], None]) -> None:
    journal = Journal(tmp_path / "journal")
    journal.append(Begun(order=order("a")))
    full_disk(True)
    journal.keep(Ended(outcome=outcome("a")))
    assert list(journal.state.outcomes) == ["a"]
    with pytest.raises(SnapshotError):
        journal.append(Begun(order=order("b")))
    full_disk(False)
    journal.append(Begun(order=order("c")))
    assert content(Journal(tmp_path / "journal").state) == content(journal.state)
    assert list(journal.state.open) == ["c"]


def test_a_rewrite_that_fails_leaves_the_file_in_use(tmp_path: Path, full_disk: Callable[[bool], None]) -> None:
    journal = Journal(tmp_path / "journal")
    for number in range(5000):
        journal.append(FenceSeen(fence=number))
    full_disk(True)
    for number in range(3):
        with pytest.raises(SnapshotError):
            journal.append(FenceSeen(fence=9000 + number))
    full_disk(False)
    journal.append(FenceSeen(fence=9009))
    assert Journal(tmp_path / "journal").state.fence == 9009
    assert [path.name for path in tmp_path.iterdir()] == ["journal"]
