"""The figures of a run, from records made by hand, and the page drawn from them."""

from __future__ import annotations

import json
from html.parser import HTMLParser

import pytest

from dynamo_snapshot.local import measures
from dynamo_snapshot.local.etcd import Change, Key
from dynamo_snapshot.local.recorder import Record
from dynamo_snapshot.model import (
    Exit,
    Order,
    OrderKind,
    ReplicaPhase,
    ReplicaReport,
    Reported,
    Way,
)


def order(name: str, kind: OrderKind, at: float) -> Order:
    return Order(
        id=f"{kind}-{name}", kind=kind, replica_id=name, pool="decode", fence=1, issued_at=at, deadline=at + 60
    )


def report(name: str, port: int, self_test_at: float | None, exit_: Exit | None = None) -> ReplicaReport:
    return ReplicaReport(
        replica_id=name,
        pool="decode",
        incarnation=f"{name}-1",
        way=Way.RESTORE,
        phase=ReplicaPhase.EXITED if exit_ else ReplicaPhase.REGISTERED,
        since=0,
        rpc_port=port,
        pid=None if exit_ else 4000 + port,
        self_test_at=self_test_at,
        exit=exit_,
    )


def put(instance_id: int, port: int) -> Change:
    value = json.dumps({"transport": {"tcp": f"127.0.0.1:{port}/{instance_id:x}/dynamo/backend/generate"}}).encode()
    return Change(Key(f"v1/instances/dynamo/backend/generate/{instance_id:x}", value, instance_id, 1), deleted=False)


def gone(instance_id: int) -> Change:
    return Change(Key(f"v1/instances/dynamo/backend/generate/{instance_id:x}", b"", 0, 1), deleted=True)


@pytest.fixture
def record() -> Record:
    """Two restores; the first is killed at 20 and replaced by a third, the second is drained at 40."""
    record = Record(began_at=0.0)
    for made in (
        order("a", OrderKind.RESTORE, 10.0),
        order("b", OrderKind.RESTORE, 11.0),
        order("c", OrderKind.RESTORE, 20.1),
        order("b", OrderKind.DRAIN, 40.0),
    ):
        record.orders[made.id] = made
    for name, port, tested in (("a", 1, 10.4), ("b", 2, 11.5), ("c", 3, 20.8)):
        record.take_report(Reported(node="n", sequence=1, fence=1, at=0, replicas=(report(name, port, tested),)))
    record.take_change(put(0xA, 1), 10.5)
    record.take_change(put(0xB, 2), 11.6)
    record.take_change(gone(0xA), 20.05)
    record.take_change(put(0xC, 3), 20.9)
    record.take_change(gone(0xB), 40.01)
    ended = report("b", 2, 11.5, Exit(code=0, at=40.2))
    record.take_report(Reported(node="n", sequence=2, fence=1, at=0, replicas=(ended,)))
    return record


def test_a_start_is_measured_from_its_order_to_discovery(record: Record) -> None:
    seconds = [round(start.seconds, 3) for start in measures.starts(record, OrderKind.RESTORE)]
    assert seconds == [0.5, 0.6, 0.8]
    assert measures.distribution(seconds) == {"median": 0.6, "p95": 0.8, "all": [0.5, 0.6, 0.8]}
    assert len(measures.starts(record, OrderKind.RESTORE, since=15.0)) == 1


def test_the_replacement_is_the_first_start_ordered_after_the_kill(record: Record) -> None:
    found = measures.replacement(record, "a", 20.0)
    assert (found["out_of_discovery_s"], found["serving_s"], found["replica"]) == (0.05, 0.9, "c")


def test_only_an_orderly_end_counts_as_drained(record: Record) -> None:
    assert measures.drained(record, since=30.0) == ["b"]
    record.reports["b"] = report("b", 2, 11.5, Exit(code=-9, at=40.2))
    assert measures.drained(record, since=30.0) == []


def test_the_most_that_served_at_once_is_counted_from_discovery(record: Record) -> None:
    assert measures.most_serving(record) == 2
    assert record.serving() == ["c"]


@pytest.mark.parametrize("tested", [None, 11.7])
def test_a_worker_in_discovery_before_its_self_test_is_counted(record: Record, tested: float | None) -> None:
    assert measures.routed_before_serving(record) == []
    record.reports["b"] = report("b", 2, tested)
    assert [early["replica"] for early in measures.routed_before_serving(record)] == ["b"]


def test_an_instance_nobody_reported_is_named(record: Record) -> None:
    record.take_change(put(0xD, 9), 50.0)
    assert measures.unexplained_registrations(record) == [0xD]


def test_a_pid_is_kept_when_the_replica_has_gone(record: Record) -> None:
    assert record.reports["b"].pid == 4002


def test_a_percentile_is_a_value_that_was_measured() -> None:
    assert measures.percentile([3.0, 1.0, 2.0], 50) == 2.0
    assert measures.percentile(range(1, 101), 95) == 95
    assert measures.percentile([], 95) is None


def test_distinct_means_all_there_and_none_twice() -> None:
    assert measures.all_distinct(["1", "2"])
    assert not measures.all_distinct(["1", "1"])
    assert not measures.all_distinct(["1", None])


class _Page(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    handle_startendtag = handle_starttag


def test_the_page_is_self_contained_and_shows_every_replica(record: Record) -> None:
    from dynamo_snapshot.local.report import render

    result = {
        "what": "an engine <that is not there>",
        "began_at": 0.0,
        "ended_at": 60.0,
        "requests": {"sent": 10, "failed": 0, "migrated": 2},
        "restore": {"ordered_to_serving_s": {"median": 0.5}, "idle_ordered_to_serving_s": {"median": None}},
        "cold_start": {"ordered_to_serving_s": 9.1},
        "replacement": {"serving_s": 0.9},
        "scale_in": {"drained": 1},
        "left_behind": 0,
        "checks": [{"name": "requests", "value": 10, "bound": "at least 1000", "passed": False}],
        "orders": measures.order_rows(record),
        "replicas": measures.replica_rows(record),
        "decisions": [{"at": 9.0, "pool": "decode", "what": "target 1 -> 3", "reason": "queued & running"}],
        "counts": [{"at": 0.0, "target": 1, "serving": 1, "pending": 0}],
        "load": [{"at": 5.0, "sent_per_s": 3, "in_flight": 1}, {"at": 6.0, "sent_per_s": 5, "in_flight": 2}],
        "marks": [{"at": 20.0, "kind": "kill", "label": "kill"}],
        "environment": {"kernel": "6"},
    }
    text = render(result)
    page = _Page()
    page.feed(text)
    assert not [tag for tag, attributes in page.tags if "src" in attributes or (tag != "a" and "href" in attributes)]
    assert "an engine &lt;that is not there&gt;" in text
    assert "1 of 1 checks failed" in text
    assert all(f">{name}</text>" in text for name in ("a", "b", "c"))
    assert any(attributes.get("class") == "event kill" for tag, attributes in page.tags)
