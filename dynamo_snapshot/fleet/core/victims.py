"""Who goes first when a pool shrinks."""

from __future__ import annotations

from dynamo_snapshot.fleet.core.draft import Draft
from dynamo_snapshot.fleet.core.state import Replica
from dynamo_snapshot.model import ReplicaState, WorkerLoad


def victims(draft: Draft, alive: list[Replica], count: int) -> list[Replica]:
    """The ``count`` replicas of ``alive`` that cost least to lose.

    What serves nobody goes first, the farthest from serving before the nearest; then idle workers;
    then busy ones, the least loaded first. A load that is not known counts as the highest. Among
    equals the newest goes.
    """
    return sorted(alive, key=lambda replica: (*_cost(draft, replica), -replica.since))[:count]


def load_of(draft: Draft, replica: Replica) -> WorkerLoad | None:
    """The replica's load, if it is known and fresh."""
    load = None if replica.instance_id is None else draft.state.loads.get(replica.instance_id)
    return load if load is not None and draft.now - load.at <= draft.rules.load_fresh_s else None


def _cost(draft: Draft, replica: Replica) -> tuple[int, float]:
    match replica.state:
        case ReplicaState.ORDERED:
            return 0, replica.captures
        case ReplicaState.STARTING:
            return 1, replica.captures  # a worker that is to be captured is worth more than another
        case ReplicaState.RESTORING:
            return 2, 0
        case ReplicaState.RESUMING:
            return 3, 0
    load = load_of(draft, replica)
    if load is None:
        return 6, 0
    requests = load.running + load.queued
    return (5, requests) if requests else (4, 0)
