"""Cold start: a house, the worker's command in it, and the wait until it serves.

With a capture wanted the worker stops at ready-for-snapshot, and is held there until a capture has let it
go, or until none came in time.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import structlog

from dynamo_snapshot.agent.house import LOG_INSIDE
from dynamo_snapshot.agent.node import Node
from dynamo_snapshot.agent.replica import Replica
from dynamo_snapshot.model import Order, Way, WorkerSpec
from worker_hooks.lifecycle import State

log = structlog.get_logger()


class ColdStart:
    """The steps of one cold start, by the names of its phases."""

    def __init__(self, node: Node, order: Order, spec: WorkerSpec, replica: Replica | None = None) -> None:
        self._node, self._order, self._spec = node, order, spec
        self.replica = replica
        """The one it makes; given where an earlier agent has already begun it."""

    async def admit(self) -> None:
        node, count = self._node, self._spec.gpus
        gpus = node.assign_gpus(await node.inventory(), count) if count else ()
        self.replica = node.admit(self._order, self._spec, Way.COLD_START, gpus)

    async def house(self) -> None:
        replica = self._replica
        replica.move_in(await self._node.houses.make(replica.id, self._spec.memory_limit_bytes))

    async def start(self) -> None:
        replica = self._replica
        assert replica.house is not None
        environment = self._node.worker_environment(replica)
        pid = await replica.house.holder.start(list(self._spec.command), environment, "/", LOG_INSIDE)
        replica.locate(pid)

    async def boot(self) -> None:
        replica = self._replica
        await registered_or(replica, lambda: replica.ready_at is not None)

    async def hold(self) -> None:
        replica = self._replica
        if not replica.record.capture or is_registered(replica):
            return
        while not replica.released:
            try:
                async with asyncio.timeout(self._node.settings.release_after_s):
                    await replica.until(lambda: True if replica.capturing or replica.released else None)
            except TimeoutError:
                # A capture may have begun in the very moment, and an order to end it may wait for one to be taken back.
                if not replica.capturing and replica.ending is None:
                    log.info("released_without_capture", replica=replica.id)
                    replica.let_go(self._node.release_environment(replica))
            # A capture that fails lets its source go; one that could not do even that leaves it to the next round.
            await replica.until(lambda: True if replica.released or not replica.capturing else None)

    async def resume(self) -> None:
        await registered(self._node, self._replica)

    async def remove_house(self) -> None:
        """Undo: ends the worker, its house, and the replica."""
        if self.replica is not None:
            if self.replica.ending is None:  # nobody wanted it gone: it failed
                self.replica.keep_log()
            await self._node.forget(self.replica)

    async def give_back(self) -> None:
        """Undo: the replica's place and port."""
        if self.replica is not None and self._node.replicas.get(self.replica.id) is self.replica:
            await self._node.forget(self.replica)

    @property
    def _replica(self) -> Replica:
        assert self.replica is not None
        return self.replica


def is_registered(replica: Replica) -> bool:
    return replica.state is not None and replica.state.state == State.REGISTERED


async def registered(node: Node, replica: Replica) -> None:
    """Returns once the worker says that it has registered; from then on it survives this agent."""
    await registered_or(replica, lambda: False)
    node.note(replica, served=True)


async def registered_or(replica: Replica, look: Callable[[], bool]) -> None:
    """Returns once the worker says that it has registered, or ``look`` finds what it looks for.

    One that has registered has requests, which whoever takes the order back would lose: too late for that, and for
    a deadline.
    """
    try:
        await replica.until(lambda: True if is_registered(replica) or look() else None)
    except asyncio.CancelledError:
        if replica.exit is None and replica.house is not None:
            replica.update()  # what it said in the meantime
        if not is_registered(replica) or replica.exit is not None:
            raise
