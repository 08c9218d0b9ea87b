"""A snapshot that a replica of this node needs: kept from being removed, and refused where it does not fit."""

from __future__ import annotations

import asyncio
from contextlib import ExitStack
from pathlib import Path

from dynamo_snapshot.agent.node import Node
from dynamo_snapshot.errors import SnapshotError
from dynamo_snapshot.model import Order, Reason, WorkerSpec
from dynamo_snapshot.snapshots.compatibility import compatibility_key, explain_difference
from dynamo_snapshot.snapshots.manifest import Manifest


class HeldSnapshot:
    """Held from :meth:`take` to :meth:`leave`; each may be called when there is nothing to do.

    Raises:
        SnapshotError: ``snapshot_corrupt`` where this node has found it to be so.
    """

    def __init__(self, node: Node, snapshot_id: str) -> None:
        self._node, self._id = node, snapshot_id
        self._use = ExitStack()
        self._refuse_distrusted()
        self.images = Path()
        """The folder of its images, while it is held."""

    @classmethod
    def of(cls, node: Node, order: Order) -> HeldSnapshot:
        """The one that ``order`` names; raises ``snapshot_missing`` where it names none."""
        if order.snapshot_id is None:
            raise SnapshotError(Reason.SNAPSHOT_MISSING, f"order {order.id} names no snapshot")
        return cls(node, order.snapshot_id)

    async def take(self) -> Manifest:
        """Holds it, and returns its manifest unless it is not what was published (see ``check_unchanged``).

        What is held already is looked at anew, and not let go for it.
        """
        self._refuse_distrusted()
        taking = asyncio.create_task(asyncio.to_thread(self._take))
        try:
            return await asyncio.shield(taking)
        finally:
            # What it takes is given back by the caller's undo, which must not come before it.
            await asyncio.wait({taking})
            taking.exception()

    async def take_for(self, pool: str, spec: WorkerSpec) -> Manifest:
        """Likewise; raises ``snapshot_incompatible`` where it cannot stand in for a cold start of ``pool`` here."""
        taking = asyncio.create_task(self.take())
        try:
            wanted = await self._node.parts(pool, spec)
            manifest = await taking
        finally:
            await asyncio.wait({taking})
            taking.exception()
        captured = manifest.capture.compatibility
        if compatibility_key(captured) != compatibility_key(wanted):
            raise SnapshotError(
                Reason.SNAPSHOT_INCOMPATIBLE,
                f"snapshot {self._id} cannot stand in for pool {pool} here: "
                + "; ".join(explain_difference(captured, wanted)[:3]),
                "A cold start works; capture the pool's worker anew.",
            )
        return manifest

    def leave(self) -> None:
        """It may be removed."""
        self._use.close()

    def _take(self) -> Manifest:
        store, use = self._node.store, ExitStack()
        self.images = use.enter_context(store.use(self._id))
        self._use, before = use, self._use
        before.close()
        return store.check_unchanged(self._id)

    def _refuse_distrusted(self) -> None:
        if self._id in self._node.distrusted:
            raise SnapshotError(
                Reason.SNAPSHOT_CORRUPT,
                self._node.distrusted[self._id],
                f"Remove it with `dynamo-snapshot snapshots rm {self._id}` and capture again.",
            )
