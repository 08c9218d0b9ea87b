"""Deadlines: the end of a state's time is a transition like any other."""

from __future__ import annotations

from dynamo_snapshot.fleet.core.draft import Draft
from dynamo_snapshot.fleet.core.failures import fail
from dynamo_snapshot.fleet.core.lifecycle import Happening
from dynamo_snapshot.fleet.core.state import Replica
from dynamo_snapshot.model import Reason, ReplicaState


def expire(draft: Draft) -> None:
    """Moves on every replica whose state is overdue."""
    for replica in list(draft.replicas.values()):
        if replica.deadline is None or draft.now < replica.deadline or _excused(draft, replica):
            continue
        draft.withdraw(replica.node, replica.stop_order)
        draft.set_replica(replica.id, stop_order=None)
        # A start order stays in the list until its outcome is reported: the node may have begun it.
        fail(draft, replica.id, Happening.OVERDUE, Reason.DEADLINE_EXCEEDED)


def _excused(draft: Draft, replica: Replica) -> bool:
    waits_for_discovery = replica.state is ReplicaState.RESUMING and replica.start_order is None
    if waits_for_discovery and not draft.state.discovery_known:
        return True
    # After a restart of the controller: its outcome may stand in a report that is about to be read.
    unheard = draft.nodes[replica.node].reported is None
    return unheard and draft.now < draft.state.started_at + draft.rules.settle_s
