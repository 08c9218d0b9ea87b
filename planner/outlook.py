"""How many replicas a moment of the near future needs, as a distribution over what may come.

A request meets its objective when what is ahead of it on its replica fits into the time that its own prefill
leaves of the objective (``slack_s``). So the arrivals of the last seconds of a window of ``window_s`` from
now are in time if, for each moment *u* of it, what arrives after *u* fits into what the replicas that are
there can work off until then, and their slack. That gives each possible future the size it needs, and the
misses of any size are the arrivals of the futures that need more.

Where slots bind as well (:class:`Turnover`), the same holds for the time that requests occupy them, except that
what comes finds free slots first: a stretch that is no longer than a request stays asks for nothing.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

from planner.history import BIN_S, Alike, History
from planner.waiting import Waiting

MOST_FUTURES = 96
"""So many with demand in them are worked out; of more, every second or third."""


class Future(NamedTuple):
    """What may come: ``needs`` replicas (a fraction counts as not enough), for ``requests`` a second."""

    needs: float
    requests: float
    weight: float


@dataclass(frozen=True)
class Backlogs:
    """Seconds of prefill that wait on each ready replica that tells of it, the least first, and their sums."""

    seconds: tuple[float, ...]
    sums: tuple[float, ...]

    @classmethod
    def of(cls, seconds: Iterable[float]) -> Backlogs:
        ordered = tuple(sorted(seconds))
        return cls(ordered, tuple(accumulate(ordered, initial=0.0)))

    @property
    def total(self) -> float:
        return self.sums[-1]

    def free(self, within_s: float) -> float:
        """Mean seconds of ``within_s`` that a replica has left for others; all of it where none tells."""
        if not self.seconds:
            return within_s
        shorter = bisect_left(self.seconds, within_s)
        return (shorter * within_s - self.sums[shorter]) / len(self.seconds)


@dataclass(frozen=True)
class Turnover:
    """How fast slots become free."""

    request_s: float
    """Replica-seconds that one request takes: how long it stays, divided by the slots of a replica."""
    residence_s: float
    taken: Backlogs
    """Replica-seconds of the requests that each ready replica has, those that run included."""


@dataclass(frozen=True)
class Capacity:
    """What is there and on its way; seconds from now."""

    ready: int
    backlogs: Backlogs
    arrivals: Sequence[float]
    """When each replica on its way will serve, soonest first."""
    lead_s: float
    """When one that is ordered now will."""
    share: float
    """Of a replica's time, what can go into prefill, 0 to 1."""
    slack_s: float
    turnover: Turnover | None = None
    """None: prefill alone binds."""


class _Room(NamedTuple):
    """Seconds of prefill that fit between one moment and the window's end, by size."""

    per_ready: float
    ready: int
    on_way: tuple[float, ...]
    """Cumulative, of the replicas on their way."""
    per_new: float

    def size(self, work_s: float) -> float:
        """The size, as a fraction, into which ``work_s`` fits."""
        of_ready = self.per_ready * self.ready
        if work_s <= of_ready:
            return work_s / self.per_ready if self.per_ready > 0 else 0.0
        rest = work_s - of_ready
        size = float(self.ready)
        before = 0.0
        for together in self.on_way:
            if rest <= together:
                return size + (rest - before) / (together - before) if together > before else size
            before = together
            size += 1
        return size + (rest - before) / self.per_new


def futures(
    history: History,
    alike: Sequence[Alike],
    capacity: Capacity,
    window_s: float,
    tick_s: float,
    per_token: float,
) -> list[Future]:
    """What followed moments like this one, each with the size that the end of the window needs.

    Args:
        alike: moments with enough behind them.
        window_s: from now to the end of the arrivals that count.
        tick_s: how long before that they begin.
        per_token: seconds of prefill a token takes.
    """
    bins = bins_of(window_s)
    last = min(bins, max(1, round(tick_s / BIN_S)))
    starts = sorted({0, bins // 4, bins // 2, (3 * bins) // 4, max(0, bins - 3), max(0, bins - 2)})
    # What comes in the last bins is in time up to the middle of them, or not.
    end_s = (bins - last / 2) * BIN_S
    rooms = [(start, _room(capacity, start * BIN_S, end_s)) for start in starts if start * BIN_S < end_s]
    turnover = capacity.turnover
    slot_rooms = [] if turnover is None else _slot_rooms(capacity, turnover, starts, end_s)
    tokens, requests = history.tokens, history.requests
    before = bins - last
    busy = [one for one in alike if requests[one[0] + bins] > requests[one[0] + before]]
    silent = 0.0
    if len(busy) < len(alike):
        silent = sum([weight for index, weight in alike if requests[index + bins] <= requests[index + before]])
    stride = len(busy) // MOST_FUTURES + 1
    result = [Future(0.0, 0.0, silent)]
    for index, weight in busy[::stride]:
        coming = (requests[index + bins] - requests[index + before]) / (last * BIN_S)
        end = tokens[index + bins]
        end -= (end - tokens[index + bins - last]) / 2
        needs = 0.0
        for start, room in rooms:
            size = room.size((end - tokens[index + start]) * per_token)
            if size > needs:
                needs = size
        if turnover is not None:
            end = requests[index + bins] - coming * last * BIN_S / 2
            for start, room in slot_rooms:
                needs = max(needs, room.size((end - requests[index + start]) * turnover.request_s))
        result.append(Future(needs, coming, weight * stride))
    return result


def bins_of(window_s: float) -> int:
    """How many bins of the record a window spans."""
    return max(1, round(window_s / BIN_S))


def supposed(
    work: Sequence[tuple[float, float, float]], capacity: Capacity, window_s: float, tick_s: float
) -> list[Future]:
    """Futures that nothing was recorded of: (seconds of prefill a second, requests a second, weight) each."""
    end_s = window_s - tick_s / 2
    room, turnover = _room(capacity, 0.0, end_s), capacity.turnover
    if turnover is None:
        return [Future(room.size(rate * end_s), coming, weight) for rate, coming, weight in work]
    (_, slot_room), *_ = _slot_rooms(capacity, turnover, (0,), end_s)
    sizes = [
        max(room.size(rate * end_s), slot_room.size(coming * end_s * turnover.request_s)) for rate, coming, _ in work
    ]
    return [Future(size, coming, weight) for size, (_, coming, weight) in zip(sizes, work, strict=True)]


def _room(capacity: Capacity, start_s: float, end_s: float) -> _Room:
    return _fit(capacity, capacity.backlogs, start_s, end_s, 0.0)


def _slot_rooms(capacity: Capacity, turnover: Turnover, starts: Iterable[int], end_s: float) -> list[tuple[int, _Room]]:
    """Stretches that end now or are long enough for what came before them to have gone."""
    longest = end_s - turnover.residence_s
    return [
        (start, _fit(capacity, turnover.taken, start * BIN_S, end_s, turnover.residence_s))
        for start in starts
        if start == 0 or start * BIN_S <= longest
    ]


def _fit(capacity: Capacity, backlogs: Backlogs, start_s: float, end_s: float, empty_s: float) -> _Room:
    """What fits in between; ``empty_s`` is how much more an empty replica takes at once."""
    slack, share = capacity.slack_s, capacity.share
    full = end_s - start_s + slack
    per_ready = backlogs.free((full + empty_s) * share) if start_s == 0 else full * share
    on_way, together = [], 0.0
    for arrival in capacity.arrivals:
        there = end_s - max(start_s, arrival)
        more = empty_s if arrival > start_s else 0.0
        together += max(0.0, (there + slack + more) * share if there > 0 else 0.0)
        on_way.append(together)
    there = max(BIN_S / 2, end_s - max(start_s, capacity.lead_s))
    more = empty_s if capacity.lead_s > start_s else 0.0
    return _Room(per_ready, capacity.ready, tuple(on_way), (there + slack + more) * share)


def flood(decoding: float, rate: float, prefill_s: float, slack_s: float, new: int) -> float:
    """Requests that miss their objective on each of ``new`` replicas because all that come go there at first.

    Routers that balance by requests in flight send what comes to the new replicas until each has its share.

    Args:
        decoding: requests in flight on each replica once they are even.
        rate: requests a second.
        prefill_s: of one request.
    """
    behind_s = prefill_s - new / rate if rate > 0 else 0.0
    return max(0.0, decoding - slack_s / behind_s) if behind_s > 0 else 0.0


class Choice(NamedTuple):
    """A size with what it is predicted to cost: replica-seconds a second, misses included."""

    replicas: int
    misses: float
    """Requests a second that would miss their objective."""
    cost: float


def misses_by_size(
    possible: Sequence[Future], lowest: int, highest: int, waiting: Waiting | None = None
) -> list[tuple[int, float]]:
    """(size, requests a second that would miss), the smallest first: sizes that futures ask for, up to twice that.

    Args:
        waiting: what misses besides, at any size; None: nothing.
    """
    total = sum([future.weight for future in possible]) or 1.0
    by_size: dict[int, float] = {}
    misses = 0.0
    for needs, coming, weight in possible:
        if needs > lowest and coming > 0:
            size = min(highest + 1, math.ceil(needs - 1e-9))
            by_size[size] = by_size.get(size, 0.0) + coming * weight / total
            misses += coming * weight / total
    most = min(highest, max(2 * lowest, 2 * max(by_size, default=lowest)))
    asked = sorted(by_size)
    passed = 0
    next_asked = asked[0] if asked else math.inf
    result = []
    size = lowest
    while size <= most:
        while next_asked <= size:
            misses -= by_size[asked[passed]]
            passed += 1
            next_asked = asked[passed] if passed < len(asked) else math.inf
        result.append((size, (misses if misses > 0 else 0.0) + (waiting.misses(size) if waiting else 0.0)))
        size += 1 + size // 16
    return result


def priced(
    by_size: Iterable[tuple[int, float]], miss_replica_s: float, start_cost: Callable[[int], float]
) -> list[Choice]:
    """What these sizes would cost, in replicas.

    Args:
        miss_replica_s: seconds of one replica that a miss is worth.
        start_cost: of going to a size, spread over the time for which it will be kept.
    """
    return [Choice(size, misses, size + start_cost(size) + miss_replica_s * misses) for size, misses in by_size]


def cheapest_there(by_size: Iterable[tuple[int, float]], miss_replica_s: float) -> int:
    """The smallest size of those that cost least where nothing has to be started for them."""
    return min([(size + miss_replica_s * misses, size) for size, misses in by_size])[1]


def cheapest(choices: Sequence[Choice]) -> Choice:
    """The smallest of those that cost least."""
    return min(choices, key=lambda choice: (choice.cost, choice.replicas))
