"""Holds replicas against discovery: who serves, who was lost, whose registration outlived its process."""

from __future__ import annotations

from collections.abc import Iterator

from msgspec.structs import replace

from dynamo_snapshot.fleet import start_times
from dynamo_snapshot.fleet.core.draft import Draft
from dynamo_snapshot.fleet.core.failures import succeeded
from dynamo_snapshot.fleet.core.lifecycle import PENDING, Happening
from dynamo_snapshot.fleet.core.messages import RevokeLease
from dynamo_snapshot.fleet.core.state import Replica
from dynamo_snapshot.model import Instance, ReplicaPhase, ReplicaReport, ReplicaState


def discovered(draft: Draft, instances: tuple[Instance, ...] | None) -> None:
    """Takes a view in. An unknown one leaves the last known one standing."""
    draft.set(discovery_heard=True)
    if instances is None:
        draft.set(discovery_known=False)
        return
    if not draft.state.discovery_known:
        _give_time_again(draft)
    ids = {instance.instance_id for instance in instances}
    draft.set(
        instances=instances,
        discovery_known=True,
        bindings={i: replica for i, replica in draft.state.bindings.items() if i in ids},
        revoking=draft.state.revoking & ids,
    )


def _give_time_again(draft: Draft) -> None:
    """Nobody could be seen registering while discovery was unknown."""
    for replica in list(draft.replicas.values()):
        if replica.state is ReplicaState.RESUMING and replica.start_order is None:
            deadline = max(replica.deadline or 0.0, draft.now + draft.rules.discover_s)
            draft.set_replica(replica.id, deadline=deadline)


def match_discovery(draft: Draft) -> None:
    """Moves replicas by what discovery shows, if it is known."""
    if not draft.state.discovery_known:
        return
    _bind(draft)
    seen = _seen(draft)
    for replica in list(draft.replicas.values()):
        instance = seen.get(replica.id)
        if instance != replica.instance_id:
            draft.set_replica(replica.id, instance_id=instance)
        if instance is not None and replica.state in PENDING | {ReplicaState.PARKED}:
            _serves(draft, replica)
        elif instance is None and replica.state is ReplicaState.SERVING:
            draft.move(replica.id, Happening.LOST, deadline=draft.now + draft.rules.discover_s)
            draft.record(replica.pool, f"{replica.id} left discovery", "its node does not report an exit")
    _revoke(draft)


def _seen(draft: Draft) -> dict[str, int]:
    """The instance of each replica whose endpoint discovery shows; other endpoints of a worker prove nothing."""
    seen: dict[str, int] = {}
    for instance in draft.state.instances:
        replica = draft.replicas.get(draft.state.bindings.get(instance.instance_id, ""))
        if replica is not None and _serves_endpoint(draft, replica.pool, instance):
            seen[replica.id] = instance.instance_id
    return seen


def _serves(draft: Draft, replica: Replica) -> None:
    first = replica.served_since is None
    draft.move(
        replica.id,
        Happening.DISCOVERED,
        deadline=None,
        parks=False,
        served_since=draft.now if first else replica.served_since,
    )
    succeeded(draft, replica)
    if first and replica.ordered_at is not None:
        took = draft.now - replica.ordered_at - replica.capture_took
        memory = draft.state.memory
        times = start_times.record(
            memory.start_times, replica.pool, replica.way, replica.snapshot_id, replica.node, max(0.0, took)
        )
        draft.set(memory=replace(memory, start_times=times))


def _bind(draft: Draft) -> None:
    """Says of each new instance which replica it is, by node address and port, once and for good."""
    bindings = dict(draft.state.bindings)
    for instance in draft.state.instances:
        if instance.instance_id in bindings:
            continue
        claims = [seen for seen in _at(draft, instance) if _serves_endpoint(draft, seen.pool, instance)]
        live = [seen for seen in claims if seen.phase is not ReplicaPhase.EXITED]
        if live and len(claims) > len(live):
            # The port had another owner before, whose registration this may be: wait for the worker's word.
            live = [seen for seen in live if seen.phase is ReplicaPhase.REGISTERED]
            if not live:
                continue
        if len(live) > 1:
            continue  # two nodes tell the same address: better nobody's than the wrong one's
        owner = (live or claims)[-1:]
        if owner:
            bindings[instance.instance_id] = owner[0].replica_id
    draft.set(bindings=bindings)


def _at(draft: Draft, instance: Instance) -> Iterator[ReplicaReport]:
    for node in draft.nodes.values():
        if node.reported is not None and node.reported.host == instance.host:
            for seen in node.reported.replicas:
                if seen.rpc_port == instance.port:
                    yield seen


def _serves_endpoint(draft: Draft, pool: str, instance: Instance) -> bool:
    rules = draft.rules.pools.get(pool)
    if rules is None:  # of a pool that is no longer configured: only its address can tell
        return True
    return (instance.namespace, instance.component, instance.endpoint) == (
        draft.rules.namespace,
        rules.component,
        rules.endpoint,
    )


def _revoke(draft: Draft) -> None:
    """Asks for the end of registrations whose process has exited, by its node's word and nothing else."""
    exited = {
        seen.replica_id
        for node in draft.nodes.values()
        if node.reported is not None
        for seen in node.reported.replicas
        if seen.phase is ReplicaPhase.EXITED
    }
    for instance, replica in draft.state.bindings.items():
        if replica in exited and instance not in draft.state.revoking:
            draft.set(revoking=draft.state.revoking | {instance})
            draft.commands.append(RevokeLease(instance_id=instance, replica_id=replica))
