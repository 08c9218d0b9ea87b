"""What a restore costs beside CRIU, engine and content checks: real etcd, agent, CRIU and worker, one by one."""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from dynamo_snapshot.agent.pipelines.phases import PIPELINES, RESTORE, Share
from dynamo_snapshot.errors import SnapshotError
from dynamo_snapshot.local.recorder import Recorder
from dynamo_snapshot.local.up import LocalFleet
from dynamo_snapshot.model import (
    Order,
    OrderKind,
    OrderStatus,
    Outcome,
    Reason,
    ReplicaPhase,
    Wanted,
    WorkerSpec,
)
from worker_hooks import control, holder
from worker_hooks.lifecycle import State

NODE = "local"
POOL = "decode"
ORDER_S = 60.0
OWN_PHASES = frozenset(spec.name for spec in PIPELINES[RESTORE] if spec.share in (Share.OWN, Share.WAIT))

Say = Callable[[str], None]


@dataclass
class RestoreCosts:
    """Milliseconds, one value a restore that succeeded."""

    own_overhead_ms: list[float] = field(default_factory=list)
    restore_complete_to_discovered_ms: list[float] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)


class RestoreBench:
    """Captures one worker, then restores and kills it over and over, by orders of its own on the agent's bus."""

    def __init__(self, local: LocalFleet, recorder: Recorder, spec: WorkerSpec) -> None:
        self._local = local
        self._recorder = recorder
        self._spec = spec
        self._orders: dict[str, Order] = {}
        self._sequence = 0

    async def run(self, repeats: int, warm_up: int, say: Say) -> RestoreCosts:
        snapshot_id = await self._capture()
        costs = RestoreCosts()
        for number in range(warm_up + repeats):
            measured = costs if number >= warm_up else RestoreCosts()
            await self._restore(snapshot_id, measured)
            if number % 50 == 49:
                say(f"{number + 1} of {warm_up + repeats} restores, {len(costs.failures)} failed")
        return costs

    async def _capture(self) -> str:
        source = "source"
        cold = await self._give(OrderKind.COLD_START, source, capture=True)
        reports = self._recorder.record.reports

        def ready() -> bool:
            return source in reports and reports[source].phase is ReplicaPhase.READY_FOR_SNAPSHOT

        ordered = await self._recorder.wait_for(ready, ORDER_S)
        outcome = await self._outcome(await self._give(OrderKind.CAPTURE, source) if ordered else cold)
        if outcome.snapshot_id is None:
            reason = next((reason for reason in Reason if reason == outcome.reason), Reason.WORKER_EXITED)
            raise SnapshotError(reason, f"no snapshot to measure with: {outcome.message} ({outcome.reason})")
        await self._outcome(cold)
        await self._outcome(await self._give(OrderKind.KILL, source))
        return outcome.snapshot_id

    async def _restore(self, snapshot_id: str, costs: RestoreCosts) -> None:
        replica_id = f"bench-{uuid.uuid4().hex[:10]}"
        order = await self._give(OrderKind.RESTORE, replica_id, snapshot_id=snapshot_id)
        outcome = await self._outcome(order)
        record = self._recorder.record
        if outcome.status is not OrderStatus.DONE:
            costs.failures.append(f"{outcome.reason}: {outcome.message}")
        elif not await self._recorder.wait_for(lambda: record.registration_of(replica_id) is not None, ORDER_S):
            costs.failures.append(f"{replica_id} did not come into discovery")
        else:
            registration = record.registration_of(replica_id)
            assert registration is not None
            costs.own_overhead_ms.append(own_overhead_s(order, outcome) * 1000)
            house = self._local.runtime_dir / "replicas" / replica_id
            costs.restore_complete_to_discovered_ms.append(discovery_s(house, registration.at) * 1000)
        if replica_id in record.reports:
            await self._outcome(await self._give(OrderKind.KILL, replica_id))
        self._orders.clear()

    async def _give(
        self, kind: OrderKind, replica_id: str, *, capture: bool = False, snapshot_id: str | None = None
    ) -> Order:
        now = time.time()
        order = Order(
            id=f"{kind}-{uuid.uuid4().hex[:12]}",
            kind=kind,
            replica_id=replica_id,
            pool=POOL,
            fence=1,
            issued_at=now,
            deadline=now + ORDER_S,
            capture=capture,
            snapshot_id=snapshot_id,
            reason="measurement",
        )
        self._orders[order.id] = order
        self._sequence += 1
        await self._local.bus.publish_wanted(
            Wanted(
                node=NODE,
                fence=1,
                sequence=self._sequence,
                workers={POOL: self._spec},
                orders=tuple(self._orders.values()),
            )
        )
        return order

    async def _outcome(self, order: Order) -> Outcome:
        outcomes = self._recorder.record.outcomes
        if not await self._recorder.wait_for(lambda: order.id in outcomes, ORDER_S + 10):
            raise SnapshotError(Reason.DEADLINE_EXCEEDED, f"the agent never told how {order.id} ended")
        return outcomes[order.id]


def own_overhead_s(order: Order, outcome: Outcome) -> float:
    """From the order to its outcome, less the phases that are CRIU's, the engine's or a content check."""
    theirs = sum(phase.seconds for phase in outcome.phases if phase.name not in OWN_PHASES)
    return outcome.finished_at - order.issued_at - theirs


def discovery_s(house: Path, discovered_at: float) -> float:
    """From restore-complete to discovery, less resume and self-test, by the worker's own history."""
    folder = house / holder.CONTROL
    released_at = (folder / control.RESTORE_COMPLETE).stat().st_mtime
    state = json.loads((folder / control.WORKER_STATE).read_text())
    began = dict(reversed([tuple(step) for step in state["history"]]))
    resume = began[State.SELF_TESTING] - began[State.RESUMING]
    self_test = state["self_test_at"] - began[State.SELF_TESTING]
    return float(discovered_at - released_at - resume - self_test)
