"""What the policies' settings have in common: how they are checked, and loads that are relative to an engine."""

from __future__ import annotations

import math
from dataclasses import field
from enum import StrEnum
from typing import Any

RELATIVE = "relative"
"""Key of a knob's metadata: its value is a :class:`Load`."""


class Load(StrEnum):
    """What a knob that is a load of one replica counts; the catalog then takes ``0.5c`` for half its capacity."""

    REQUESTS = "requests"
    """In flight."""
    KV_PERCENT = "kv-percent"
    """Percent of the KV cache that the contexts of the requests in flight fill."""


def per_replica(default: float, load: Load = Load.REQUESTS) -> Any:
    """A dataclass field for such a knob."""
    return field(default=default, metadata={RELATIVE: load})


def check(rules: dict[str, bool]) -> None:
    """Raises ``ValueError`` naming each rule that does not hold."""
    broken = [rule for rule, holds in rules.items() if not holds]
    if broken:
        raise ValueError("; ".join(broken))


def positive(value: float) -> bool:
    return 0 < value < math.inf


def duration(value: float) -> bool:
    """Whether ``value`` can be a time span in seconds; 0 is none at all."""
    return 0 <= value < math.inf
