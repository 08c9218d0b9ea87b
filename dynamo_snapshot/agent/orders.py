"""Carries out one order at a time, many at once, and makes its outcome.

An order is begun once: its intent is in the journal before, its outcome after. Orders that end a replica
may be repeated after a crash; they do no harm twice.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import structlog

from dynamo_snapshot.agent.journal import Begun, Ended
from dynamo_snapshot.agent.node import Node
from dynamo_snapshot.agent.pipelines import phases
from dynamo_snapshot.agent.pipelines.capture import Capture
from dynamo_snapshot.agent.pipelines.cold_start import ColdStart
from dynamo_snapshot.agent.pipelines.parking import Park, Wake
from dynamo_snapshot.agent.pipelines.prefetch import Prefetch
from dynamo_snapshot.agent.pipelines.restore import Restore
from dynamo_snapshot.agent.replica import Replica, WorkerEnded
from dynamo_snapshot.errors import SnapshotError
from dynamo_snapshot.model import Order, OrderKind, OrderStatus, Outcome, Phase, Reason, WorkerSpec

log = structlog.get_logger()

DRAIN_GRACE_S = 5.0
"""Beyond the worker's own drain timeout, before it is killed."""
CAPTURE_GRACE_S = 10.0
"""What an agent that is stopped gives captures to end."""
_PIPELINES = {
    OrderKind.COLD_START: phases.COLD_START,
    OrderKind.RESTORE: phases.RESTORE,
    OrderKind.CAPTURE: phases.CAPTURE,
    OrderKind.PARK: phases.PARK,
    OrderKind.WAKE: phases.WAKE,
    OrderKind.PREFETCH: phases.PREFETCH,
}
_STEPS: dict[OrderKind, Callable[[Node, Order, WorkerSpec], Restore | Wake | Prefetch]] = {
    OrderKind.RESTORE: Restore,
    OrderKind.PARK: Park,
    OrderKind.WAKE: Wake,
    OrderKind.PREFETCH: Prefetch,
}


class Orders:
    """The orders of one node that are under way."""

    def __init__(
        self,
        node: Node,
        idle_share: Callable[[], float | None],
        on_publish: Callable[[], None] = lambda: None,
        on_end: Callable[[Order, Outcome], None] = lambda order, outcome: None,
    ) -> None:
        self._node, self._idle_share, self._on_publish, self._on_end = node, idle_share, on_publish, on_end
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._makers: dict[str, str] = {}
        """By replica id: the order that is making or waking it; by a prefetch's own name: that."""
        self._captures: dict[str, str] = {}
        """By replica id: the order that captures it."""
        self._cancelled: dict[str, tuple[Reason, str]] = {}

    @property
    def under_way(self) -> frozenset[str]:
        return frozenset(self._tasks)

    def begin(self, order: Order, spec: WorkerSpec, resumed: Replica | None = None) -> None:
        """Begins ``order`` unless it is under way; ``resumed``: the cold worker that an earlier agent began for it."""
        if order.id in self._tasks:
            return
        self._node.journal.append(Begun(order=order))
        task = asyncio.create_task(self._carry_out(order, spec, resumed), name=f"order-{order.id}")
        self._tasks[order.id] = task
        task.add_done_callback(lambda done: self._done(order.id, done))

    def _done(self, order_id: str, task: asyncio.Task[None]) -> None:
        self._tasks.pop(order_id, None)
        self._cancelled.pop(order_id, None)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("outcome_not_kept", order=order_id, cause=str(error), exc_info=error)

    def refuse(self, order: Order, reason: Reason, message: str) -> None:
        """Ends ``order`` without beginning it."""
        now = self._node.clock()
        self._end(
            order,
            Outcome(
                order_id=order.id,
                status=OrderStatus.FAILED,
                started_at=now,
                finished_at=now,
                reason=reason.value,
                message=message,
            ),
        )

    async def stop(self) -> None:
        """Takes back all that is under way, for an agent that goes.

        Captures may end by themselves for a while: a CRIU killed in the middle of a dump can break its worker.
        """
        captures = [self._tasks[order_id] for order_id in self._captures.values() if order_id in self._tasks]
        if captures:
            await asyncio.wait(captures, timeout=CAPTURE_GRACE_S)
        for order_id in self._tasks:
            self._cancelled.setdefault(order_id, (Reason.AGENT_RESTARTED, "the agent was stopped"))
        for replica_id in self._makers:
            if replica := self._node.replicas.get(replica_id):
                replica.ending = (Reason.AGENT_RESTARTED, "the agent was stopped")
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _carry_out(self, order: Order, spec: WorkerSpec, resumed: Replica | None) -> None:
        started_at, idle = self._node.clock(), self._idle_share()
        began = self._node.monotonic()
        snapshot_id: str | None = None
        if order.kind in _PIPELINES:
            at_work = self._captures if order.kind is OrderKind.CAPTURE else self._makers
            # A second order for the same replica is refused by the pipeline, and must not hide the first.
            at_work.setdefault(order.replica_id, order.id)
            try:
                result, snapshot_id = await self._run(order, spec, resumed)
            finally:
                if at_work.get(order.replica_id) == order.id:
                    del at_work[order.replica_id]
        else:
            result = await self._end_replica(order, spec, began)
        status, reason, message = self._verdict(order, result)
        outcome = Outcome(
            order_id=order.id,
            status=status,
            started_at=started_at,
            finished_at=self._node.clock(),
            reason=reason,
            message=message,
            phases=result.phases,
            unaccounted_s=result.unaccounted_s,
            idle_cpu=idle,
            snapshot_id=snapshot_id,
        )
        self._end(order, outcome)
        await self._node.journal.synced()

    async def _run(self, order: Order, spec: WorkerSpec, resumed: Replica | None) -> tuple[phases.Result, str | None]:
        node = self._node
        steps: Capture | ColdStart | Restore | Wake | Prefetch
        if order.kind is OrderKind.CAPTURE:
            steps = Capture(node, order, self._on_publish)
        elif order.kind in _STEPS:
            steps = _STEPS[order.kind](node, order, spec)
        else:
            steps = ColdStart(node, order, spec, resumed)
        result = await phases.run(
            _PIPELINES[order.kind],
            steps,
            order_id=order.id,
            limits=phases.Limits(
                phases=node.settings.deadlines,
                boot_timeout_s=spec.boot_timeout_s,
                order_s=order.deadline - node.clock(),
            ),
            commits=node.journal,
            clock=node.monotonic,
            first="hold" if resumed is not None else None,
        )
        if isinstance(steps, Capture):
            return steps.finish(result), steps.snapshot_id
        return _with_log(result, steps.replica), None

    async def _end_replica(self, order: Order, spec: WorkerSpec, began: float) -> phases.Result:
        """Carries out drain, kill and cancel."""
        error: SnapshotError | None = None
        try:
            stopped = await self._stop_work_on(order)
            replica = self._node.replicas.get(order.replica_id)
            if replica is not None and replica.record.served and stopped:
                replica.ending = None  # it was not taken back; else another order's, which ends it all the same
            if replica is None or replica.exit is not None:
                pass
            elif order.kind is not OrderKind.CANCEL:
                await self._let_end(replica, order, spec)
            elif not stopped or replica.record.served:
                raise SnapshotError(
                    Reason.CANCELLED,
                    f"replica {replica.id} is {replica.phase} already: too late to cancel",
                    "Drain it.",
                )
            else:  # a pipeline that did not take everything back
                await self._node.end(replica, Reason.CANCELLED, order.reason or "the fleet cancelled it")
        except SnapshotError as problem:
            error = problem
        seconds = self._node.monotonic() - began
        return phases.Result((Phase(name=order.kind.value, seconds=seconds),), 0.0, error)

    async def _stop_work_on(self, order: Order) -> bool:
        """Takes back what is being made or captured of the order's replica; returns whether anything was."""
        stopped = False
        cancelled = (Reason.CANCELLED, order.reason or f"by a {order.kind}")
        replica = self._node.replicas.get(order.replica_id)
        published = replica is not None and replica.released  # beside the source, which is not needed for it any more
        if replica is not None and self._makers.get(order.replica_id) in self._tasks:
            replica.ending = cancelled  # a capture that is taken back does not let it go on any more
        # The capture first: until it is over the source is not the maker's.
        for at_work in (self._makers,) if published else (self._captures, self._makers):
            order_id = at_work.get(order.replica_id, "")
            if task := self._tasks.get(order_id):
                self._cancelled[order_id] = cancelled
                task.cancel()
                await asyncio.wait({task})
                stopped = True
        return stopped

    async def _let_end(self, replica: Replica, order: Order, spec: WorkerSpec) -> None:
        node = self._node
        if order.kind is OrderKind.DRAIN:
            limit = min(spec.drain_timeout_s + DRAIN_GRACE_S, max(0.0, order.deadline - node.clock()))
            if await node.drain(replica, limit) is not None:
                return
            await node.end(replica, Reason.DEADLINE_EXCEEDED, f"it was still draining after {limit:g} s")
            raise SnapshotError(
                Reason.DEADLINE_EXCEEDED,
                f"replica {replica.id} had not drained after {limit:g} s and was killed",
                "Raise drain_timeout_s if its requests are longer than that.",
            )
        await node.end(replica, Reason.CANCELLED, order.reason or "the fleet ended it")

    def _verdict(self, order: Order, result: phases.Result) -> tuple[OrderStatus, str | None, str]:
        if result.cancelled:
            reason, message = self._cancelled.pop(order.id, (Reason.AGENT_RESTARTED, "the agent was stopped"))
            status = OrderStatus.CANCELLED if reason is Reason.CANCELLED else OrderStatus.FAILED
            return status, reason.value, message
        if result.error is not None:
            # The worker's own is the more precise, and what its replica's exit is reported with.
            own = result.error.own if isinstance(result.error, WorkerEnded) else None
            cause = own or result.error.reason.value
            log.warning(
                "order_failed",
                order=order.id,
                kind=order.kind,
                replica=order.replica_id,
                phase=result.failed_phase,
                reason=cause,
                cause=result.error.message,
            )
            remedy = f". {result.error.remedy}" if result.error.remedy else ""
            return OrderStatus.FAILED, cause, result.error.message + remedy
        log.info("order_done", order=order.id, kind=order.kind, replica=order.replica_id)
        return OrderStatus.DONE, None, ""

    def _end(self, order: Order, outcome: Outcome) -> None:
        self._node.journal.keep(Ended(outcome=outcome))
        self._on_end(order, outcome)
        self._node.on_change()


def _with_log(result: phases.Result, replica: Replica | None) -> phases.Result:
    """``result`` with the place of the log of the worker that failed, in the message of its error."""
    if result.error is not None and replica is not None and replica.kept_log is not None:
        said = f"; its log is kept: {replica.kept_log}"
        if said not in result.error.message:
            result.error.message += said
    return result
