"""The most that was needed within a sliding window of time."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class NeedWindow:
    """Needs with the time of each, newest last; only those that can still be the maximum are kept."""

    entries: tuple[tuple[float, int], ...] = ()

    def add(self, at: float, need: int, length_s: float) -> NeedWindow:
        """Returns the window with one more need, without what is older than ``length_s``."""
        kept = tuple(entry for entry in self.entries if entry[0] > at - length_s and entry[1] > need)
        return NeedWindow((*kept, (at, need)))

    @property
    def highest(self) -> int:
        """The most that was needed; raises ``IndexError`` when nothing was added."""
        return self.entries[0][1]

    @property
    def highest_at(self) -> float:
        """When the highest need was last seen."""
        return self.entries[0][0]
