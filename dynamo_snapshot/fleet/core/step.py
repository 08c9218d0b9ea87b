"""One step of the fleet: an event in, commands out."""

from __future__ import annotations

from dynamo_snapshot.fleet.core.decide import decided, hinted
from dynamo_snapshot.fleet.core.draft import Draft
from dynamo_snapshot.fleet.core.expire import expire
from dynamo_snapshot.fleet.core.failures import end_pauses
from dynamo_snapshot.fleet.core.match import discovered, match_discovery
from dynamo_snapshot.fleet.core.messages import (
    Command,
    Decided,
    DiscoverySeen,
    Event,
    Hinted,
    LoadsSeen,
    NodeReported,
    Started,
    Ticked,
)
from dynamo_snapshot.fleet.core.observe import reported
from dynamo_snapshot.fleet.core.plan import plan
from dynamo_snapshot.fleet.core.state import State
from dynamo_snapshot.fleet.core.takeover import started


def step(state: State, event: Event, now: float) -> tuple[State, tuple[Command, ...]]:
    """Returns the state after ``event`` at wall-clock time ``now`` (seconds), and what is to be done.

    Half-done work is repaired before anything new is decided: outcomes first, then discovery, then
    deadlines, then the plan. Every command is safe to repeat.
    """
    if state.resigned:
        return state, ()
    draft = Draft(state, now)
    match event:
        case Started():
            started(draft, event)
        case Decided(decision=decision):
            decided(draft, decision)
        case Hinted(hint=hint):
            hinted(draft, hint)
        case NodeReported(reported=report):
            reported(draft, report)
        case DiscoverySeen(instances=instances):
            discovered(draft, instances)
        case LoadsSeen(loads=loads):
            draft.set(loads=loads)
        case Ticked():
            pass
    if not draft.state.resigned:
        match_discovery(draft)
        expire(draft)
        end_pauses(draft)
        plan(draft)
    return draft.finish()
