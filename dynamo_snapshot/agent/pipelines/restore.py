"""Restore: a house with a holder in stand-by, CRIU in it, a new identity, and the wait until it serves."""

from __future__ import annotations

import asyncio

from dynamo_snapshot.agent.criu import shm
from dynamo_snapshot.agent.node import Node
from dynamo_snapshot.agent.pipelines.cold_start import registered
from dynamo_snapshot.agent.pipelines.held_snapshot import HeldSnapshot
from dynamo_snapshot.agent.pipelines.restored_gpus import RestoredGpus
from dynamo_snapshot.agent.replica import Replica
from dynamo_snapshot.model import Order, Way, WorkerSpec
from dynamo_snapshot.snapshots.manifest import Manifest


class Restore:
    """The steps of one restore, by the names of its phases."""

    def __init__(self, node: Node, order: Order, spec: WorkerSpec) -> None:
        self._node, self._order, self._spec = node, order, spec
        self.replica: Replica | None = None
        self._slot = False
        self._snapshot: HeldSnapshot | None = None
        self._manifest: Manifest | None = None
        self._gpus: RestoredGpus | None = None
        """None: the snapshot uses no GPU."""

    async def queue(self) -> None:
        await self._node.restore_slots.acquire()
        self._slot = True

    async def admit(self) -> None:
        snapshot = HeldSnapshot.of(self._node, self._order)
        self.replica = self._node.admit(self._order, self._spec, Way.RESTORE)
        self._snapshot = snapshot
        manifest = self._manifest = await snapshot.take_for(self._order.pool, self._spec)
        if manifest.capture.cuda is not None:
            capture, cuda = manifest.capture, manifest.capture.cuda
            self._gpus = RestoredGpus(self._node, self.replica, capture, cuda, manifest.size_bytes)
            await self._gpus.reserve()

    async def load(self) -> None:
        if self._gpus is not None:
            self._gpus.begin_load()

    async def house(self) -> None:
        replica = self._replica
        house = await self._node.houses.make(replica.id, self._spec.memory_limit_bytes)
        replica.move_in(house)
        house.control.refuse_if_released()

    async def restore(self) -> None:
        house, capture = self._replica.house, self._checked.capture
        assert house is not None
        if self._gpus is not None:
            await self._gpus.memory_made()
        await asyncio.to_thread(shm.load, self._held.images, house.shm)
        # Whenever the worker ends from now on, its holder knows that it was the worker.
        expected = asyncio.create_task(house.holder.expect(capture.source_pid))
        try:
            await self._node.criu.restore(house, await house.images(self._held.images), capture.log_path)
        finally:
            await expected

    async def adopt(self) -> None:
        replica = self._replica
        replica.locate(self._checked.capture.source_pid)
        if replica.pid is None:
            await replica.until(lambda: None if replica.exit is None else True)
        await self.leave_queue()  # CRIU's work is done: the next one may go

    async def thaw(self) -> None:
        if self._gpus is not None:
            await self._gpus.thaw()

    async def release(self) -> None:
        self._replica.let_go(self._node.release_environment(self._replica))

    async def resume(self) -> None:
        await registered(self._node, self._replica)
        # Nothing is awaited from here on: what ends this phase would end a worker that has requests.
        if self._gpus is not None:
            self._gpus.finish()
        # Only now is it known that the snapshot made a worker: who removed it before would have none to try again.
        self._leave_snapshot()

    async def leave_queue(self) -> None:
        """Undo: the slot among the restores that may run at once."""
        if self._slot:
            self._slot = False
            self._node.restore_slots.release()

    async def give_back(self) -> None:
        """Undo: the hold on the snapshot, the replica's place and port."""
        self._leave_snapshot()
        if self.replica is not None and self._node.replicas.get(self.replica.id) is self.replica:
            await self._node.forget(self.replica)

    async def give_up_load(self) -> None:
        """Undo: memory that a loader made, and calls of the driver that outlived the replica."""
        if self._gpus is not None:
            await self._gpus.give_up()

    async def remove_house(self) -> None:
        """Undo: ends CRIU, worker and house; images and port come after it."""
        if self.replica is not None:
            if self.replica.ending is None:  # nobody wanted it gone: it failed
                self.replica.keep_log()
            await self._node.forget(self.replica)

    def _leave_snapshot(self) -> None:
        if self._snapshot is not None:
            self._snapshot.leave()

    @property
    def _held(self) -> HeldSnapshot:
        assert self._snapshot is not None
        return self._snapshot

    @property
    def _replica(self) -> Replica:
        assert self.replica is not None
        return self.replica

    @property
    def _checked(self) -> Manifest:
        assert self._manifest is not None
        return self._manifest
