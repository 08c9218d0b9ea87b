"""The fleet at one moment, for the planner plugin, the live view and anyone else: built from the state alone."""

from __future__ import annotations

from dynamo_snapshot.fleet.core.lifecycle import PENDING
from dynamo_snapshot.fleet.core.spares import parked_target
from dynamo_snapshot.fleet.core.state import PoolState, Replica, State
from dynamo_snapshot.fleet.core.ways import newest_usable
from dynamo_snapshot.model import FleetStatus, PoolStatus, Reason, ReplicaState, ReplicaStatus


def fleet_status(state: State, now: float) -> FleetStatus:
    """Returns what :class:`FleetStatus` says of ``state`` at wall-clock time ``now``."""
    return FleetStatus(
        fleet=state.rules.fleet,
        at=now,
        fence=state.fence,
        pools=tuple(_pool(state, name, pool, now) for name, pool in state.pools.items()),
        replicas=tuple(_replica(state, replica) for replica in state.replicas.values()),
        start_times=state.memory.start_times,
        snapshot_bytes=_sizes(state),
        quarantined={name: entry.reason for name, entry in state.memory.quarantined.items()},
        decisions=state.records,
        discovery_known=state.discovery_known,
    )


def _sizes(state: State) -> dict[str, int]:
    reports = [node.reported for node in state.nodes.values() if node.reported is not None]
    return {snapshot.id: snapshot.size_bytes for report in reports for snapshot in report.snapshots}


def _pool(state: State, name: str, pool: PoolState, now: float) -> PoolStatus:
    members = [replica for replica in state.replicas.values() if replica.pool == name]
    serving = sum(replica.state is ReplicaState.SERVING for replica in members)
    pending = sum(replica.state in PENDING and replica.counts for replica in members)
    limit, reason = _limit(state, name, serving, pending, now)
    snapshots = [newest_usable(state.memory, node.reported, name) for node in state.nodes.values()]
    newest = max((s for s in snapshots if s is not None), key=lambda s: s.created_at, default=None)
    return PoolStatus(
        pool=name,
        role=state.rules.pools[name].role,
        target=pool.target,
        achievable=pool.target if limit is None else limit,
        serving=serving,
        pending=pending,
        draining=sum(replica.state is ReplicaState.DRAINING for replica in members),
        parked=sum(
            replica.state is ReplicaState.PARKED and state.nodes[replica.node].is_heard(now, state.rules.node_silent_s)
            for replica in members
        ),
        parked_target=parked_target(state, name, now),
        unachievable_reason=reason,
        snapshot_id=newest.id if newest else None,
    )


def _limit(state: State, name: str, serving: int, pending: int, now: float) -> tuple[int | None, str | None]:
    """The most that ``name`` can reach now and why; (None, None): nothing stands in the way.

    The limit is told even where the target is below it, so that whoever asks for replicas need not
    try first. While starts pause, and while one is on trial after that, it is what is alive; in
    between it is lifted, as without demand nothing would ever be tried.
    """
    block = state.pools[name].block
    if block is not None and (now < block.until or pending):
        return serving + pending, block.reason
    heard = [node for node in state.nodes.values() if node.reported is not None]
    if heard:
        # What is parked gives way.
        others = sum(replica.pool != name and not replica.spare for replica in state.replicas.values())
        room = max(0, len(heard) * state.rules.node_capacity - others)
        if room < state.rules.pools[name].max_replicas:
            return room, Reason.NODE_AT_CAPACITY
    return None, None


def _replica(state: State, replica: Replica) -> ReplicaStatus:
    load = None if replica.instance_id is None else state.loads.get(replica.instance_id)
    return ReplicaStatus(
        replica_id=replica.id,
        pool=replica.pool,
        node=replica.node,
        state=replica.state,
        since=replica.since,
        way=replica.way,
        parks=replica.spare,
        instance_id=replica.instance_id,
        load=load,
        reason=replica.reason,
        ordered_at=replica.ordered_at,
    )
