"""How long an engine's forward pass takes: the polynomial model of Dynamo's mocker, made faster or slower.

The mocker (``timing_model: polynomial``) adds two times: that of the prompt tokens prefilled in the pass, and
that of one decode step over all requests that decode, by the share of the KV cache that their contexts fill.
Its ``speedup_ratio`` is ``speed`` here, its ``decode_speedup_ratio`` ``decode_speed``. An integration test holds
the two together.
"""

from __future__ import annotations

import msgspec

_PREFILL_MS = (16.50142, 0.01518344, 4.209989e-7)
"""Constant, per token, per token squared; tokens of the whole pass."""
_DECODE_MS = (5.74, 54.01, -25.74)
"""Constant, per share of the KV cache, per share squared."""


class EngineTiming(msgspec.Struct, frozen=True, kw_only=True):
    """One engine; the defaults are the mocker's."""

    speed: float = 1.0
    """How many times as fast as the mocker's model, above 0."""
    decode_speed: float = 1.0
    """The same for decode steps alone, on top of ``speed``."""
    max_batched_tokens: int = 8192
    """Tokens of one forward pass: decoded ones first, the rest are chunks of prompts."""
    max_requests: int = 256
    """Requests that run at once."""
    kv_tokens: int = 16384 * 64
    """Tokens of context that fit into the KV cache."""

    def __post_init__(self) -> None:
        for name in ("speed", "decode_speed"):
            if not 0 < getattr(self, name) < float("inf"):
                raise ValueError(f"{name} must be a positive number, not {getattr(self, name)}")
        for name in ("max_batched_tokens", "max_requests", "kv_tokens"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, not {getattr(self, name)}")
        if self.max_batched_tokens < self.max_requests:
            raise ValueError("max_batched_tokens must be at least max_requests: every running request decodes one")


class PassTimes:
    """Seconds of forward passes, with the coefficients worked out once."""

    __slots__ = ("_d0", "_d1", "_d2", "_p0", "_p1", "_p2")

    def __init__(self, timing: EngineTiming) -> None:
        scale = 1000.0 * timing.speed
        self._p0, self._p1, self._p2 = (coefficient / scale for coefficient in _PREFILL_MS)
        scale *= timing.decode_speed
        self._d0 = _DECODE_MS[0] / scale
        self._d1 = _DECODE_MS[1] / scale / timing.kv_tokens
        self._d2 = _DECODE_MS[2] / scale / timing.kv_tokens**2

    def prefill(self, tokens: int) -> float:
        """Of ``tokens`` prompt tokens in one pass, more than none."""
        return self._p0 + tokens * (self._p1 + tokens * self._p2)

    def decode(self, context: float) -> float:
        """Of one decode step over requests whose contexts add up to ``context`` tokens."""
        return self._d0 + context * (self._d1 + context * self._d2)

    def decodes(self, context: float, batch: int, passes: int) -> float:
        """Of ``passes`` decode steps in a row: the context grows by ``batch`` tokens with each."""
        steps = passes * (passes - 1) / 2
        squares = steps * (2 * passes - 1) / 3
        contexts = passes * context + batch * steps
        context_squares = passes * context**2 + 2 * context * batch * steps + batch**2 * squares
        return passes * self._d0 + self._d1 * contexts + self._d2 * context_squares

    def decodes_within(self, context: float, batch: int, elapsed: float, most: int) -> int:
        """How many of at most ``most`` decode steps in a row are over after ``elapsed`` seconds."""
        passes = min(most, int(elapsed / self.decode(context)))  # a later step is no shorter: never too few
        while passes > 0:
            over = self.decodes(context, batch, passes) - elapsed
            if over <= 0:
                break
            passes -= max(1, int(over / self.decode(context + batch * passes)))  # never too many
        return max(passes, 0)
