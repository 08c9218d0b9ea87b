"""A restored replica's GPUs: chosen and reserved, its weights on their way, its processes brought back onto them."""

from __future__ import annotations

import asyncio

import structlog

from dynamo_snapshot.agent.cuda.devices import device_map, weights_bytes, without_weights
from dynamo_snapshot.agent.cuda.driver import DeviceMap
from dynamo_snapshot.agent.cuda.tree import cuda_processes, process_tree, thaw
from dynamo_snapshot.agent.gpu_budget import require_place
from dynamo_snapshot.agent.loader.client import ReplicaLoad
from dynamo_snapshot.agent.node import Node
from dynamo_snapshot.agent.replica import Replica
from dynamo_snapshot.errors import SnapshotError
from dynamo_snapshot.model import Reason
from dynamo_snapshot.snapshots.manifest import Capture, CudaRecord

log = structlog.get_logger()


class RestoredGpus:
    """One restore's; what is begun here is given up by :meth:`give_up`, whatever became of it."""

    def __init__(
        self, node: Node, replica: Replica, capture: Capture, record: CudaRecord, image_bytes: int = 0
    ) -> None:
        self._node, self._replica, self._capture, self._record = node, replica, capture, record
        self._image_bytes = image_bytes
        """What CRIU restores beside the load."""
        self._devices: DeviceMap = {}
        self._load: ReplicaLoad | None = None
        self._loading: asyncio.Task[None] | None = None
        self._thawing: asyncio.Task[None] | None = None

    async def reserve(self) -> None:
        """Chooses the replica's GPUs and counts in what it will need of them.

        Raises:
            SnapshotError: everything that :func:`dynamo_snapshot.agent.cuda.devices.device_map` refuses, and
                ``cuda_missing``, ``node_at_capacity``.
        """
        inventory = await self._node.inventory()
        wanted = [device.uuid for device in self._record.devices]
        count = self._replica.record.spec.gpus or len(wanted)
        parks = self._replica.record.parked
        record = without_weights(self._record, self._capture.weights) if parks else self._record
        # No await from here on: another restore must not count on the same memory.
        assigned = self._node.assign_gpus(inventory, count, wanted, parks=parks)
        self._devices = device_map(record, inventory, assigned)
        needed = (device.needed_bytes for device in record.devices)
        self._node.note(self._replica, gpus=dict(zip(assigned, needed, strict=True)))

    async def reserve_place(self) -> None:
        """Counts in what the parked replica will need of its GPUs to serve; from now on it takes a place there.

        Raises:
            SnapshotError: ``node_at_capacity``, ``gpu_out_of_memory``.
        """
        inventory = await self._node.inventory()
        # No await from here on, as above.
        weights = weights_bytes(self._record, self._capture.weights)
        needed = dict(zip(self._replica.record.gpus, weights, strict=True))
        require_place(inventory, self._node.living(), needed, self._node.settings.gpu.replicas_per_gpu)
        self._node.note(self._replica, parked=False, gpus=needed)

    def begin_load(self) -> None:
        """Has a loader make memory and fill it, beside all that follows; nothing where the worker loads by itself."""
        gpus = self._node.gpus
        assert gpus is not None
        if not self._capture.weights:
            return
        replica = self._replica
        house = self._node.houses.prepare(replica.id) if replica.house is None else replica.house.path
        assigned = tuple(replica.record.gpus)
        self._load = gpus.load_for(replica.id, house, self._capture.weights, assigned, self._image_bytes)
        if self._load is not None:
            self._loading = asyncio.create_task(self._load.begin(), name=f"load-{self._replica.id}")

    async def memory_made(self) -> None:
        """Returns once the weights have memory; raises ``gpu_out_of_memory`` or ``weights_corrupt`` otherwise."""
        if self._loading is not None:
            await self._loading

    async def thaw(self) -> None:
        """Brings the restored tree back onto its GPUs. After a failure it is beyond help: to be ended."""
        gpus, pid = self._node.gpus, self._replica.pid
        assert gpus is not None
        assert pid is not None
        pids = list(await cuda_processes(gpus.driver, process_tree(pid)))
        if not pids:
            raise SnapshotError(
                Reason.CUDA_RESTORE_FAILED,
                f"no process of the restored worker of {self._replica.id} has a CUDA state, though its source had",
            )
        self._thawing = asyncio.create_task(thaw(gpus.driver, pids, self._devices), name=f"thaw-{self._replica.id}")
        # Not cancelled with its phase: a driver's call ends when it wants, or when the replica is killed.
        await asyncio.shield(self._thawing)

    async def give_up(self) -> None:
        """Ends the load if nobody took it. Waits for the driver's calls: the replica has been killed by then."""
        gpus = self._node.gpus
        waits = {self._thawing} if self._thawing is not None else set()
        if self._loading is not None and self._load is not None and gpus is not None:
            self._loading.cancel()  # what it has asked for by now is the load's to give up
            await asyncio.gather(self._loading, return_exceptions=True)
            waits.add(gpus.leave(self._load))
        if waits:
            await asyncio.wait(waits)  # a loader that hangs may take longer than anybody waits

    def finish(self) -> None:
        """After the worker has registered: what it did not take is not needed any more, and nobody waits for that."""
        gpus = self._node.gpus
        if self._load is not None and gpus is not None:
            if self._load.lost:
                log.warning("weights_not_by_loader", replica=self._replica.id, cause=self._load.lost)
            gpus.leave(self._load)
