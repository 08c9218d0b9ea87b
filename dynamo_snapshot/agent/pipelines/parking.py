"""Parking: a restore that ends with its worker parked, and the wake that lets it go on to serving.

A parked worker has its identity and has resumed nothing: it is in no discovery, and its weights are not on
the GPU. It outlives its agent, as one that serves does.
"""

from __future__ import annotations

import structlog

from dynamo_snapshot.agent.node import Node
from dynamo_snapshot.agent.pipelines.cold_start import is_registered, registered
from dynamo_snapshot.agent.pipelines.held_snapshot import HeldSnapshot
from dynamo_snapshot.agent.pipelines.restore import Restore
from dynamo_snapshot.agent.pipelines.restored_gpus import RestoredGpus
from dynamo_snapshot.agent.replica import Replica
from dynamo_snapshot.errors import SnapshotError
from dynamo_snapshot.model import Order, Reason, ReplicaPhase, WorkerSpec
from worker_hooks.lifecycle import State

log = structlog.get_logger()


class Park(Restore):
    """The steps of a restore that stops when its worker is parked, by the names of its phases."""

    async def settle(self) -> None:
        replica = self._replica
        await replica.until(lambda: True if is_parked(replica) or is_registered(replica) else None)
        if not is_parked(replica):
            raise SnapshotError(
                Reason.WORKER_NOT_READY,
                f"the worker of {replica.id} did not stop when it was told to park, and was ended",
                "Run it through `dynamo-snapshot-worker run --` or the worker hooks: both know how to.",
            )
        noted_as_parked(self._node, replica)
        replica.snapshot, self._snapshot = self._snapshot, None

    async def give_back(self) -> None:
        await self.give_up_load()
        await super().give_back()


class Wake:
    """The steps of one wake, by the names of its phases. Refused before its worker is let go, it leaves that parked."""

    def __init__(self, node: Node, order: Order, spec: WorkerSpec) -> None:
        self._node, self._order, self._spec = node, order, spec
        self.replica: Replica | None = None
        self._gpus: RestoredGpus | None = None
        """None: the snapshot uses no GPU."""

    async def admit(self) -> None:
        replica = self._node.replicas.get(self._order.replica_id)
        if replica is None:
            raise SnapshotError(Reason.UNKNOWN_REPLICA, f"replica {self._order.replica_id} is not on this node")
        if replica.phase is not ReplicaPhase.PARKED or replica.waking or replica.snapshot is None:
            what = "being woken" if replica.waking else replica.phase
            raise SnapshotError(Reason.WORKER_NOT_READY, f"replica {replica.id} is not parked, it is {what}")
        if replica.ending is not None:
            raise SnapshotError(Reason.WORKER_NOT_READY, f"replica {replica.id} is being ended: {replica.ending[1]}")
        replica.waking, self.replica = True, replica
        # Its weights are still to be read, and what it was restored from may not be what the pool runs any more.
        capture = (await replica.snapshot.take_for(self._order.pool, self._spec)).capture
        if capture.cuda is not None:
            self._gpus = RestoredGpus(self._node, replica, capture, capture.cuda)
            await self._gpus.reserve_place()
        else:
            self._node.note(replica, parked=False)

    async def load(self) -> None:
        if self._gpus is not None:
            self._gpus.begin_load()
            await self._gpus.memory_made()

    async def release(self) -> None:
        self._replica.wake()

    async def resume(self) -> None:
        await registered(self._node, self._replica)
        # Nothing is awaited from here on, as in a restore.
        if self._gpus is not None:
            self._gpus.finish()
        self._replica.leave_snapshot()
        self._replica.waking = False

    async def stay_parked(self) -> None:
        """Undo: what a worker that was not let go yet was given for its wake."""
        replica = self.replica
        if replica is not None and not replica.woken and replica.exit is None:
            noted_as_parked(self._node, replica)
            replica.waking = False

    async def give_up_load(self) -> None:
        """Undo: memory that a loader made."""
        if self._gpus is not None:
            await self._gpus.give_up()

    async def remove_house(self) -> None:
        """Undo: ends a worker that was let go and does not serve, its house, and the replica."""
        if self.replica is not None and self.replica.woken:
            if self.replica.ending is None:  # nobody wanted it gone: it failed
                self.replica.keep_log()
            await self._node.forget(self.replica)

    @property
    def _replica(self) -> Replica:
        assert self.replica is not None
        return self.replica


def is_parked(replica: Replica) -> bool:
    """Whether the worker says that it is parked, and nobody has let it go on."""
    return replica.state is not None and replica.state.state == State.PARKED and not replica.woken


def noted_as_parked(node: Node, replica: Replica) -> None:
    """What it has of its GPUs shows as used; it takes up no place there."""
    node.note(replica, parked=True, gpus=dict.fromkeys(replica.record.gpus, 0))


async def held_for_parked(node: Node, replica: Replica) -> HeldSnapshot | None:
    """Holds the snapshot of a parked replica that an earlier agent left; None: it cannot be woken from it any more."""
    assert replica.record.snapshot_id is not None
    held = HeldSnapshot(node, replica.record.snapshot_id)
    try:
        await held.take()
    except (SnapshotError, OSError) as error:
        log.warning("snapshot_of_parked_replica_lost", replica=replica.id, cause=str(error))
        held.leave()
        return None
    return held
