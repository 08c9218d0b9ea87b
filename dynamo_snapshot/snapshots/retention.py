"""Which snapshots of a pool to remove. Pure: the caller knows what is there, what is used and what time it is.

Never removed are a snapshot in use and the newest usable one of a key that workers are wanted with
now, whatever number, age and size say. Snapshots that may not be used go first.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

from dynamo_snapshot.model import Value


class RetentionPolicy(Value, frozen=True):
    keep: int
    """How many to keep at most."""
    keep_for_s: float | None = None
    keep_bytes: int | None = None


class Candidate(Value, frozen=True):
    id: str
    compatibility_key: str
    size_bytes: int
    created_at: float
    in_use: bool
    usable: bool


class Removal(Value, frozen=True):
    id: str
    why: str


def to_remove(
    candidates: Iterable[Candidate], policy: RetentionPolicy, current_keys: Collection[str], now: float
) -> tuple[Removal, ...]:
    """Returns what to remove, the least valuable first, each with the rule that says so.

    Args:
        candidates: the snapshots of one pool.
        policy: the pool's.
        current_keys: the compatibility keys that a cold start would have now.
        now: wall-clock seconds since the epoch.
    """
    ranked = sorted(candidates, key=lambda c: (c.usable, c.created_at, c.id), reverse=True)
    protected = {candidate.id for candidate in ranked if candidate.in_use}
    for key in current_keys:
        newest = next(
            (candidate for candidate in ranked if candidate.usable and candidate.compatibility_key == key), None
        )
        if newest:
            protected.add(newest.id)

    removals: dict[str, Removal] = {}

    def remove(candidate: Candidate, why: str) -> None:
        removals[candidate.id] = Removal(id=candidate.id, why=why)

    count, size = len(ranked), sum(candidate.size_bytes for candidate in ranked)
    for candidate in reversed(ranked):
        if candidate.id in protected:
            continue
        age = now - candidate.created_at
        if count > policy.keep:
            remove(candidate, f"{count} are there, {policy.keep} are kept")
        elif policy.keep_for_s is not None and age > policy.keep_for_s:
            remove(candidate, f"it is {age:.0f} s old, {policy.keep_for_s:.0f} s is the limit")
        elif policy.keep_bytes is not None and size > policy.keep_bytes:
            remove(candidate, f"all take {size} bytes, {policy.keep_bytes} are allowed")
        else:
            continue
        count -= 1
        size -= candidate.size_bytes
    return tuple(removals.values())
