"""What demand was like, second by second, and which moments of it resemble this one.

The forecast is the record itself: what followed moments like the present one (as busy over two seconds, ten
and sixty, as long silent) is what may follow now. A smooth load is followed by much the same, so it gets
little headroom; a bursty one gets what its own bursts need, and a slow start is judged by longer futures.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import islice
from typing import NamedTuple

BIN_S = 1.0
KEPT_BINS = 1800
BURST_BINS = 180
SHORT, MIDDLE, LONG = 2, 10, 60
"""Bins over which a moment's demand is averaged."""
ROUGH = 5.0
"""Moments alike in the last ten seconds alone weigh together as much as this many that are alike in all."""
NARROW_SHORT, NARROW_MIDDLE, NARROW_LONG = 8.0, 11.0, 6.0
"""How much a replica's worth of demand over each of these counts as a distance."""
REACH = 9.0
"""Squared distance beyond which moments are not alike."""


class Moment(NamedTuple):
    """What a forecast is conditioned on: prompt tokens a second, as roots, which makes noise alike at any level."""

    short: float
    middle: float
    long: float
    silence: float
    """Binary logarithm of 1 + seconds without demand."""


Alike = tuple[int, float]
"""A moment in the record: the index of the bin after it, and how much it counts."""


@dataclass(frozen=True)
class History:
    """Bins of one second, oldest first. Sums are cumulative, so that any stretch is one subtraction."""

    tokens: tuple[float, ...] = (0.0,)
    requests: tuple[float, ...] = (0.0,)
    moments: tuple[Moment, ...] = ()
    """At the end of each bin."""
    open_s: float = 0.0
    """How much of the newest, unfinished bin is there, with what came in it."""
    open_tokens: float = 0.0
    open_requests: float = 0.0
    silent_s: float = 0.0

    @property
    def bins(self) -> int:
        return len(self.moments)

    def add(self, elapsed_s: float, tokens: float, requests: float) -> History:
        """Returns the record with what came in the last ``elapsed_s`` seconds, spread evenly over them."""
        sums, counts, moments = list(self.tokens), list(self.requests), list(self.moments)
        open_s, open_tokens, open_requests = self.open_s, self.open_tokens, self.open_requests
        silent_s = 0.0 if tokens > 0 else self.silent_s + elapsed_s
        left = min(elapsed_s, KEPT_BINS * BIN_S)
        token_rate, request_rate = tokens / elapsed_s, requests / elapsed_s
        while left > 0:
            part = min(left, BIN_S - open_s)
            open_s += part
            open_tokens += token_rate * part
            open_requests += request_rate * part
            left -= part
            if open_s >= BIN_S - 1e-9:
                sums.append(sums[-1] + open_tokens)
                counts.append(counts[-1] + open_requests)
                moments.append(_moment(sums, silent_s, 0.0, 0.0))
                open_s = open_tokens = open_requests = 0.0
        excess = len(moments) - KEPT_BINS
        if excess > 0:
            del sums[:excess], counts[:excess], moments[:excess]
        return History(tuple(sums), tuple(counts), tuple(moments), open_s, open_tokens, open_requests, silent_s)

    @property
    def now(self) -> Moment:
        """This moment, with what the unfinished bin holds."""
        return _moment(self.tokens, self.silent_s, self.open_s, self.open_tokens)

    def bursts(self) -> float:
        """Variance of the requests of a second divided by their mean, within tens of seconds of the last minutes."""
        counts = self.requests
        total = spread = 0.0
        last = len(counts) - 1
        for end in range(last, max(MIDDLE, last - BURST_BINS) - 1, -MIDDLE):
            came = [counts[at] - counts[at - SHORT] for at in range(end - MIDDLE + SHORT, end + 1, SHORT)]
            mean = sum(came) / len(came)
            total += mean
            spread += sum((one - mean) ** 2 for one in came) / (len(came) - 1)
        return max(1.0, spread / total) if total > 0 else 1.0

    def alike(self, now: Moment, bins: int, scale: float, most: int = KEPT_BINS) -> list[Alike]:
        """Moments that resemble ``now`` and are followed by at least ``bins`` bins.

        Args:
            scale: replicas that one token a second needs: distances are in replicas' worth of demand.
            most: so many are looked at more closely; of more, every second or third counts for the others.
        """
        short, middle, long, silence = now
        of_short, of_middle, of_long = scale * NARROW_SHORT, scale * NARROW_MIDDLE, scale * NARROW_LONG
        reach, exp, moments = REACH, math.exp, self.moments
        away_most = math.sqrt(reach / of_middle)
        low, high = middle - away_most, middle + away_most
        known = islice(moments, max(0, len(moments) - bins))
        near = [index for index, (_, b, _, _) in enumerate(known, 1) if low < b < high]
        stride = max(1, -(-len(near) // most))
        after: list[int] = []
        likes: list[float] = []
        roughs: list[float] = []
        for index in near[::stride]:
            a, b, c, d = moments[index - 1]
            off, away = a - short, b - middle
            roughly = of_short * off * off + of_middle * away * away
            if roughly < reach:
                afar, apart = c - long, d - silence
                distance = roughly + of_long * afar * afar + apart * apart
                after.append(index)
                likes.append(exp(-distance / 2) if distance < reach else 0.0)
                roughs.append(exp(-roughly / 2))
        rough = stride * sum(roughs)
        share = min(1.0, ROUGH / rough) if rough > 0 else 0.0
        weights = [stride * (like + share * roughly) for like, roughly in zip(likes, roughs, strict=True)]
        return list(zip(after, weights, strict=True))


def _moment(sums: list[float] | tuple[float, ...], silent_s: float, open_s: float, open_tokens: float) -> Moment:
    last = len(sums) - 1
    total = sums[last]

    def rate(bins: int) -> float:
        first = max(0, last - bins)
        seconds = max(SHORT, last - first) * BIN_S + open_s
        return math.sqrt(max(0.0, total - sums[first] + open_tokens) / seconds)

    return Moment(rate(SHORT), rate(MIDDLE), rate(LONG), math.log2(1.0 + silent_s))
