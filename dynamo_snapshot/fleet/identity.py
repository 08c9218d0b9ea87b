"""Names that never repeat: each carries the fence of the controller that gave it."""

from __future__ import annotations


def replica_id(pool: str, fence: int, serial: int) -> str:
    """A replica's id, unique over the life of a fleet; short, because sockets live under folders named so."""
    return f"{pool}-{fence}-{serial}"


def order_id(fence: int, serial: int) -> str:
    """An order's id, unique over the life of a fleet: nodes carry each id out once."""
    return f"{fence}-{serial}"
