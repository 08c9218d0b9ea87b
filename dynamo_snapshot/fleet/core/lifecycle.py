"""The replica lifecycle: one table. What is not in it is illegal, raises and changes nothing."""

from __future__ import annotations

from enum import StrEnum

from dynamo_snapshot.model import ReplicaState

ORDERED = ReplicaState.ORDERED
STARTING = ReplicaState.STARTING
RESTORING = ReplicaState.RESTORING
PARKED = ReplicaState.PARKED
RESUMING = ReplicaState.RESUMING
SERVING = ReplicaState.SERVING
DRAINING = ReplicaState.DRAINING
STOPPED = ReplicaState.STOPPED
FAILED = ReplicaState.FAILED


class Happening(StrEnum):
    """What can happen to a replica, and who says so."""

    BOOTS = "boots"
    """Node: its engine boots."""
    RESTORES = "restores"
    """Node: its processes are being restored."""
    PARKED = "parked"
    """Node: it waits to be woken, on its way there or since its wake was refused."""
    WOKEN = "woken"
    """Fleet: it is needed."""
    RELEASED = "released"
    """Node: the worker goes on by itself, to identity, resume, self-test and registration."""
    DISCOVERED = "discovered"
    """Discovery: its instance is there."""
    LOST = "lost"
    """Discovery: its instance is gone, while its node says that it lives."""
    WITHDRAWN = "withdrawn"
    """Fleet: it is not wanted any more; or node: it drains by itself."""
    BROKE = "broke"
    """Node: its order failed, or it exited when it should not have."""
    OVERDUE = "overdue"
    """Clock: the deadline of its state has passed."""
    GONE = "gone"
    """Node: nothing of it is left."""


TABLE: dict[ReplicaState, dict[Happening, ReplicaState]] = {
    ORDERED: {
        Happening.BOOTS: STARTING,
        Happening.RESTORES: RESTORING,
        Happening.PARKED: PARKED,
        Happening.RELEASED: RESUMING,
        Happening.DISCOVERED: SERVING,
        Happening.WITHDRAWN: DRAINING,
        Happening.BROKE: FAILED,
        Happening.OVERDUE: FAILED,
    },
    STARTING: {
        Happening.BOOTS: STARTING,
        Happening.RELEASED: RESUMING,
        Happening.DISCOVERED: SERVING,
        Happening.WITHDRAWN: DRAINING,
        Happening.BROKE: FAILED,
        Happening.OVERDUE: FAILED,
    },
    RESTORING: {
        Happening.RESTORES: RESTORING,
        Happening.PARKED: PARKED,
        Happening.RELEASED: RESUMING,
        Happening.DISCOVERED: SERVING,
        Happening.WITHDRAWN: DRAINING,
        Happening.BROKE: FAILED,
        Happening.OVERDUE: FAILED,
    },
    # No deadline: a replica may be parked for ever.
    PARKED: {
        Happening.PARKED: PARKED,
        Happening.WOKEN: RESUMING,
        Happening.RELEASED: RESUMING,
        Happening.DISCOVERED: SERVING,
        Happening.WITHDRAWN: DRAINING,
        Happening.BROKE: FAILED,
    },
    RESUMING: {
        Happening.PARKED: PARKED,
        Happening.RELEASED: RESUMING,
        Happening.DISCOVERED: SERVING,
        Happening.WITHDRAWN: DRAINING,
        Happening.BROKE: FAILED,
        Happening.OVERDUE: FAILED,
    },
    # No deadline: a replica may serve for ever.
    SERVING: {
        Happening.RELEASED: SERVING,
        Happening.DISCOVERED: SERVING,
        Happening.LOST: RESUMING,
        Happening.WITHDRAWN: DRAINING,
        Happening.BROKE: FAILED,
    },
    DRAINING: {
        Happening.WITHDRAWN: DRAINING,
        Happening.OVERDUE: FAILED,
        Happening.GONE: STOPPED,
    },
    # Failed is not gone: it takes up its node until the node says that nothing is left of it.
    FAILED: {
        Happening.OVERDUE: FAILED,
        Happening.GONE: STOPPED,
    },
    STOPPED: {},
}

PENDING = frozenset({ORDERED, STARTING, RESTORING, RESUMING})
"""On the way to serving: counts as capacity."""
ALIVE = PENDING | {SERVING}
"""Counts towards the target, unless it is to be parked."""
WANTED = ALIVE | {PARKED}
"""Its end is a failure."""


class IllegalHappeningError(ValueError):
    """The table has no such transition."""

    def __init__(self, state: ReplicaState, happening: Happening) -> None:
        super().__init__(f"a replica that is {state} cannot be {happening}")
        self.state = state
        self.happening = happening


def legal(state: ReplicaState, happening: Happening) -> bool:
    """Whether the table has this transition."""
    return happening in TABLE[state]


def advance(state: ReplicaState, happening: Happening) -> ReplicaState:
    """Returns the state that follows; raises :class:`IllegalHappeningError` where there is none."""
    try:
        return TABLE[state][happening]
    except KeyError:
        raise IllegalHappeningError(state, happening) from None


def mermaid() -> str:
    """Renders the table as a Mermaid state diagram; transitions that share both ends share an arrow."""
    lines = ["stateDiagram-v2", f"    [*] --> {ORDERED}"]
    for state, row in TABLE.items():
        arrows: dict[ReplicaState, list[str]] = {}
        for happening, following in row.items():
            if following is not state:
                arrows.setdefault(following, []).append(happening)
        lines += [f"    {state} --> {following}: {', '.join(names)}" for following, names in arrows.items()]
    return "\n".join([*lines, f"    {STOPPED} --> [*]"])
