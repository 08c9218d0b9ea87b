"""What single prompts are like: a histogram that forgets, from requests that were seen alone.

What is seen at a tick is the more likely seen the longer it lasts, so each size counts by the inverse of that:
else long prompts would seem to be more than they are.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import NamedTuple

from planner.observation import EngineSample

KEEP = 300.0
"""After so many newer requests, an old one counts 1/e."""
PER_OCTAVE = 1
"""Classes of size between a size and its double."""
ENOUGH = 8.0
"""Requests seen until the histogram is believed."""
LEAST_VISIBLE_S = 1e-3
PRIOR = ((0.5, 0.75), (2.5, 0.25))
"""Before that: (size in means, share of requests)."""


class Class(NamedTuple):
    """Requests of about one size, by weight, with their tokens."""

    weight: float
    tokens: float


@dataclass(frozen=True)
class Sizes:
    """Classes by the whole part of the logarithm of their size."""

    classes: Mapping[int, Class] = field(default_factory=lambda: MappingProxyType({}))
    seen: float = 0.0
    chunk: float = 1.0
    """The most prompt tokens that were seen in one pass."""

    def shares(self, mean: float) -> list[tuple[float, float]]:
        """(tokens, share of requests), the smallest first; ``mean`` is what is known besides."""
        if self.seen < ENOUGH:
            return [(size * mean, share) for size, share in PRIOR]
        total = sum(one.weight for one in self.classes.values())
        return [(one.tokens / one.weight, one.weight / total) for _, one in sorted(self.classes.items())]


def learn(
    sizes: Sizes,
    steps: Iterable[tuple[EngineSample | None, EngineSample, float]],
    prompt: float,
    step_s: float,
    second_per_token: float,
    answer_s: float,
    tick_s: float,
) -> Sizes:
    """Returns what is known with these.

    Args:
        steps: each a :class:`planner.load.Step`.
        prompt: mean prompt tokens; so much besides is in the pass that prefills one.
        step_s: of a decode step.
        second_per_token: of prefill.
        answer_s: how long a request decodes.
    """
    found: list[tuple[float, float]] = []
    chunk = sizes.chunk
    for before, after, unchanged_s in steps:
        if before is None or unchanged_s > 0:
            continue
        chunk = max(chunk, after.prefill_tokens or 0.0)
        if after.queued_tokens and after.queued == 1 and not before.queued:
            pass_s = step_s + second_per_token * (prompt + min(chunk, after.queued_tokens))
            found.append((after.queued_tokens, pass_s))
        elif after.decode_kv_tokens and not after.queued and after.decode_requests == 1 != before.decode_requests:
            found.append((after.decode_kv_tokens, answer_s))
    if not found:
        return sizes
    keep = KEEP / (KEEP + len(found))
    classes = {number: Class(one.weight * keep, one.tokens * keep) for number, one in sizes.classes.items()}
    for tokens, visible_s in found:
        weight = 1 / max(LEAST_VISIBLE_S, min(tick_s, visible_s))
        number = math.floor(PER_OCTAVE * math.log2(max(1.0, tokens)))
        known = classes.get(number, Class(0.0, 0.0))
        classes[number] = Class(known.weight + weight, known.tokens + weight * tokens)
    return Sizes(MappingProxyType(classes), sizes.seen * keep + len(found), chunk)
