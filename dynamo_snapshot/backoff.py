"""Waiting before the next try: capped, with full jitter, so that many who lost one server do not return at once.

Source: "Exponential Backoff And Jitter", AWS Architecture Blog, 2015.
"""

from __future__ import annotations

import random


class Backoff:
    """Delays for one sequence of tries.

    Args:
        first_s: upper bound of the first delay; it doubles with every further one.
        limit_s: upper bound of every delay.
        dice: where the jitter comes from.
    """

    def __init__(self, first_s: float = 0.1, limit_s: float = 2.0, dice: random.Random | None = None) -> None:
        self._first_s = first_s
        self._limit_s = limit_s
        self._dice = dice or random.Random()
        self._tries = 0

    def next(self) -> float:
        """The delay before the next try, in seconds."""
        # The exponent is bounded, as floats are.
        bound = min(self._limit_s, self._first_s * 2.0 ** min(self._tries, 60))
        self._tries += 1
        return self._dice.uniform(0.0, bound)

    def reset(self) -> None:
        """A try succeeded."""
        self._tries = 0
