"""How fast one replica works, learnt from the newest forward pass of each engine.

A pass takes a decode step over the contexts in it, ``base + per_context × tokens``, and beside it the time of
the prompt tokens that it prefills. Both are learnt online as sums that forget: old passes fade as new ones
come, so a pool that was given other GPUs is known again after some hundred passes.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from planner.load import Step

KEEP_PASSES = 400.0
"""After so many newer passes, an old one counts 1/e."""
KNOWN_PREFILLS = 4.0
"""Prefill passes until the rate is known."""
OUTLIER = 4.0
"""A pass that differs from what is known by more than this factor counts as differing by it: warm-up, a paused host."""


@dataclass(frozen=True)
class Service:
    """Sums over passes; read through the methods."""

    prefills: float = 0.0
    prefill_tokens: float = 0.0
    prefill_s: float = 0.0
    decodes: float = 0.0
    contexts: float = 0.0
    """Sum of context tokens over decode passes; with squares and products for the line through them."""
    squares: float = 0.0
    seconds: float = 0.0
    products: float = 0.0
    requests: float = 0.0
    """Decoded requests, over the same passes."""

    @property
    def known(self) -> bool:
        """Whether the prefill rate is."""
        return self.prefills >= KNOWN_PREFILLS and self.prefill_s > 0

    @property
    def second_per_token(self) -> float:
        """Seconds that one prompt token takes; raises ZeroDivisionError while nothing was prefilled."""
        return self.prefill_s / self.prefill_tokens

    @property
    def step_s(self) -> float:
        """Seconds of a decode step as they were; 0 while none was seen."""
        return self.seconds / self.decodes if self.decodes >= 1 else 0.0

    def decode_line(self) -> tuple[float, float]:
        """(seconds, seconds a context token) of a decode step; zeros while none was seen."""
        if self.decodes < 1:
            return 0.0, 0.0
        mean_x, mean_y = self.contexts / self.decodes, self.seconds / self.decodes
        spread = self.squares / self.decodes - mean_x**2
        if spread <= 1e-6 * mean_x**2:
            return mean_y, 0.0
        slope = (self.products / self.decodes - mean_x * mean_y) / spread
        slope = min(max(0.0, slope), mean_y / mean_x)
        return mean_y - slope * mean_x, slope

    def requests_within(self, itl_s: float) -> float | None:
        """How many requests a replica can decode with ``itl_s`` between tokens; None: not known to be bounded."""
        base, slope = self.decode_line()
        if self.requests <= 0 or self.decodes < KNOWN_PREFILLS or slope <= 0:
            return None
        return max(1.0, (itl_s - base) / (slope * self.contexts / self.requests))


def learn(service: Service, steps: Iterable[Step]) -> Service:
    """Returns what is known with these passes; an engine's first metrics, a warm-up as a rule, are left out."""
    base, slope = service.decode_line()
    expected = service.second_per_token if service.known else None
    prefills = tokens = prefill_s = 0.0
    decodes = contexts = squares = seconds = products = requests = 0.0
    for before, sample, unchanged_s in steps:
        pass_s = sample.pass_s
        if before is None or unchanged_s > 0 or not pass_s:
            continue
        chunk, context = sample.prefill_tokens, sample.decode_kv_tokens or 0.0
        if chunk:
            rest = pass_s - base - slope * context
            if sample.decode_requests == 0:
                rest = pass_s
            if expected is not None:
                rest = min(max(rest, chunk * expected / OUTLIER), chunk * expected * OUTLIER)
            if rest > 0:
                prefills += 1
                tokens += chunk
                prefill_s += rest
        elif chunk == 0 and sample.decode_requests:
            if service.decodes >= KNOWN_PREFILLS:
                pass_s = min(pass_s, OUTLIER * (base + slope * context))
            decodes += 1
            contexts += context
            squares += context * context
            seconds += pass_s
            products += context * pass_s
            requests += sample.decode_requests
    if not prefills and not decodes:
        return service
    keep, keep_decodes = _keep(prefills), _keep(decodes)
    return Service(
        prefills=service.prefills * keep + prefills,
        prefill_tokens=service.prefill_tokens * keep + tokens,
        prefill_s=service.prefill_s * keep + prefill_s,
        decodes=service.decodes * keep_decodes + decodes,
        contexts=service.contexts * keep_decodes + contexts,
        squares=service.squares * keep_decodes + squares,
        seconds=service.seconds * keep_decodes + seconds,
        products=service.products * keep_decodes + products,
        requests=service.requests * keep_decodes + requests,
    )


def _keep(new: float) -> float:
    return KEEP_PASSES / (KEEP_PASSES + new)
