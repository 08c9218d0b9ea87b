"""Retention by number, age and size."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from dynamo_snapshot.snapshots.retention import Candidate, RetentionPolicy, to_remove

NOW = 1_000_000.0


def candidate(
    name: str, age: float, *, key: str = "k", size: int = 10, in_use: bool = False, usable: bool = True
) -> Candidate:
    return Candidate(
        id=name, compatibility_key=key, size_bytes=size, created_at=NOW - age, in_use=in_use, usable=usable
    )


def removed(candidates: list[Candidate], policy: RetentionPolicy, keys: tuple[str, ...] = ("k",)) -> list[str]:
    return [removal.id for removal in to_remove(candidates, policy, keys, NOW)]


def test_by_number_the_oldest_go() -> None:
    assert removed([candidate("new", 1), candidate("old", 3), candidate("mid", 2)], RetentionPolicy(keep=2)) == ["old"]


def test_by_age_and_by_size() -> None:
    candidates = [candidate("new", 1), candidate("mid", 20), candidate("old", 30)]
    assert removed(candidates, RetentionPolicy(keep=9, keep_for_s=25)) == ["old"]
    assert removed(candidates, RetentionPolicy(keep=9, keep_bytes=15)) == ["old", "mid"]


def test_unusable_go_before_older_usable() -> None:
    candidates = [candidate("new", 1), candidate("broken", 2, usable=False), candidate("old", 3)]
    assert removed(candidates, RetentionPolicy(keep=2)) == ["broken"]


def test_used_and_newest_of_a_current_key_stay_whatever_the_policy() -> None:
    candidates = [
        candidate("used", 90, key="past", in_use=True),
        candidate("only", 80),
        candidate("past", 1, key="past"),
    ]
    policy = RetentionPolicy(keep=1, keep_for_s=0.5, keep_bytes=1)
    assert removed(candidates, policy) == ["past"]


def test_removal_says_why() -> None:
    [removal] = to_remove([candidate("a", 1), candidate("b", 2)], RetentionPolicy(keep=1), ("k",), NOW)
    assert removal.why == "2 are there, 1 are kept"


KEYS = ["current", "other", "past"]
CANDIDATES = st.lists(
    st.builds(
        Candidate,
        id=st.uuids().map(str),
        compatibility_key=st.sampled_from(KEYS),
        size_bytes=st.integers(0, 1000),
        created_at=st.floats(NOW - 1000, NOW + 10),
        in_use=st.booleans(),
        usable=st.booleans(),
    ),
    unique_by=lambda c: c.id,
    max_size=12,
)
POLICIES = st.builds(
    RetentionPolicy,
    keep=st.integers(1, 6),
    keep_for_s=st.none() | st.floats(1, 1000),
    keep_bytes=st.none() | st.integers(1, 5000),
)


@given(CANDIDATES, POLICIES)
def test_what_stays_is_protected_or_within_every_limit(candidates: list[Candidate], policy: RetentionPolicy) -> None:
    keys = ("current", "other")
    gone = {removal.id for removal in to_remove(candidates, policy, keys, NOW)}
    stay = [c for c in candidates if c.id not in gone]
    protected = [c for c in candidates if c.in_use]
    for key in keys:
        usable = [c for c in candidates if c.usable and c.compatibility_key == key]
        protected += sorted(usable, key=lambda c: (c.created_at, c.id))[-1:]
    assert all(c in stay for c in protected)
    free = [c for c in stay if c not in protected]
    assert not free or len(stay) <= policy.keep
    assert policy.keep_for_s is None or all(NOW - c.created_at <= policy.keep_for_s for c in free)
    assert policy.keep_bytes is None or not free or sum(c.size_bytes for c in stay) <= policy.keep_bytes
    assert to_remove(stay, policy, keys, NOW) == ()


@given(CANDIDATES)
def test_without_need_nothing_goes(candidates: list[Candidate]) -> None:
    assert to_remove(candidates, RetentionPolicy(keep=max(1, len(candidates))), (), NOW) == ()
