"""The policy fed by ticks, with its memory, its sources and its log: what both transports of the plugin share."""

from __future__ import annotations

import logging
import time
import uuid
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from planner.context import ids, observation
from planner.fleet_status import FleetStatusFile, FleetStatusSource, FleetStatusSubject, NoFleetStatus, pool_view
from planner.joint import JointPolicy
from planner.policy import Action, Proposal
from planner.records import DecisionLog, beginning, record

log = logging.getLogger(__name__)


class ScalingEngine:
    """Decides for each role at each tick.

    Args:
        policy: of all roles.
        fleet_status: where the fleet's status comes from.
        decisions: where records go.
        fleet_status_max_age_s: an older status counts as none.
        clock: monotonic seconds, for the policy.
        wall_clock: seconds since the epoch, for records and the age of the fleet's status.
    """

    def __init__(
        self,
        policy: JointPolicy,
        fleet_status: FleetStatusSource,
        decisions: DecisionLog,
        *,
        fleet_status_max_age_s: float = 10.0,
        clock: Callable[[], float] = time.monotonic,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        self._policy = policy
        self._fleet_status = fleet_status
        self._decisions = decisions
        self._fleet_status_max_age_s = fleet_status_max_age_s
        self._clock = clock
        self._wall_clock = wall_clock
        self.reset()

    async def start(self) -> None:
        await self._fleet_status.start()

    async def close(self) -> None:
        await self._fleet_status.close()

    def reset(self) -> None:
        """Forgets everything: the next tick is a protective start."""
        self._memories = self._policy.fresh()
        self._run = uuid.uuid4().hex[:12]
        self._tick = 0

    def propose(self, context: Any) -> list[Proposal]:
        """Returns one proposal a role for this PipelineContext (pydantic or protobuf)."""
        now, wall = self._clock(), self._wall_clock()
        status = self._fleet_status.latest()
        seen = {
            role: observation(context, role, pool_view(status, role, wall, self._fleet_status_max_age_s))
            for role in self._policy.policies
        }
        proposals, self._memories = self._policy.decide(seen, self._memories, now)
        self._tick += 1
        if self._decisions.enabled:
            begins = [beginning(wall, self._run, self._policy)] if self._tick == 1 else []
            entries = (
                record(wall, seen[role], proposal, now=now, run=self._run, tick=self._tick, ids=ids(context))
                for role, proposal in proposals.items()
            )
            self._decisions.write(*begins, *entries)
        for role, proposal in proposals.items():
            if self._memories[role].taken_over_at == now:
                log.warning("%s: somebody else decided %s: is there another planner?", role.value, proposal.desired)
            level = logging.DEBUG if proposal.action in (Action.HOLD, Action.NOTHING) else logging.INFO
            log.log(level, "%s: %s", role.value, proposal.reason)
        return list(proposals.values())


def engine_from_options(
    roles: Mapping[str, Mapping[str, Any]],
    fleet_status_path: str | None = None,
    fleet_status_nats: str | None = None,
    fleet_status_subject: str | None = None,
    fleet_status_max_age_s: float = 10.0,
    decision_log_path: str | None = None,
    gpu_budget: int | None = None,
    gpus_per_replica: Mapping[str, int] | None = None,
) -> ScalingEngine:
    """Builds the engine from plain options, as YAML and command lines give them.

    Args:
        roles, gpu_budget, gpus_per_replica: as :meth:`planner.joint.JointPolicy.of` takes them.
        fleet_status_path: the file that the fleet controller writes; it wins over NATS.
        fleet_status_nats: URL of the NATS server, with ``fleet_status_subject``.

    Raises:
        ValueError: naming the role or knob that is wrong.
    """
    source: FleetStatusSource = NoFleetStatus()
    if fleet_status_path:
        source = FleetStatusFile(Path(fleet_status_path))
    elif fleet_status_nats and fleet_status_subject:
        source = FleetStatusSubject(fleet_status_nats, fleet_status_subject)
    return ScalingEngine(
        JointPolicy.of(roles, gpu_budget, gpus_per_replica),
        source,
        DecisionLog(Path(decision_log_path) if decision_log_path else None),
        fleet_status_max_age_s=fleet_status_max_age_s,
    )
