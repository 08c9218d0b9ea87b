"""One policy and memory a role, fed by ticks: what both transports of the plugin share."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from planner.context import ids, observation
from planner.fleet_status import FleetStatusFile, FleetStatusSource, FleetStatusSubject, NoFleetStatus, pool_view
from planner.observation import Role
from planner.policy import Action, LoadPolicy, Memory, Proposal
from planner.records import DecisionLog, record

log = logging.getLogger(__name__)


class ScalingEngine:
    """Decides for each role at each tick.

    Args:
        policies: one a role; roles without one get no proposal.
        fleet_status: where the fleet's status comes from.
        decisions: where records go.
        fleet_status_max_age_s: an older status counts as none.
        clock: monotonic seconds, for the policy.
        wall_clock: seconds since the epoch, for records and the age of the fleet's status.
    """

    def __init__(
        self,
        policies: Mapping[Role, LoadPolicy],
        fleet_status: FleetStatusSource,
        decisions: DecisionLog,
        *,
        fleet_status_max_age_s: float = 10.0,
        clock: Callable[[], float] = time.monotonic,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        self._policies = dict(policies)
        self._memories = {role: Memory() for role in policies}
        self._fleet_status = fleet_status
        self._decisions = decisions
        self._fleet_status_max_age_s = fleet_status_max_age_s
        self._clock = clock
        self._wall_clock = wall_clock

    async def start(self) -> None:
        await self._fleet_status.start()

    async def close(self) -> None:
        await self._fleet_status.close()

    def reset(self) -> None:
        """Forgets everything: the next tick is a protective start."""
        self._memories = {role: Memory() for role in self._policies}

    def propose(self, context: Any) -> list[Proposal]:
        """Returns one proposal a role for this PipelineContext (pydantic or protobuf)."""
        now, wall = self._clock(), self._wall_clock()
        status = self._fleet_status.latest()
        proposals = []
        for role, policy in self._policies.items():
            seen = observation(context, role, pool_view(status, role, wall, self._fleet_status_max_age_s))
            proposal, self._memories[role] = policy.decide(seen, self._memories[role], now)
            if self._decisions.enabled:
                self._decisions.write(record(wall, seen, proposal, now=now, ids=ids(context)))
            level = logging.DEBUG if proposal.action in (Action.HOLD, Action.NOTHING) else logging.INFO
            log.log(level, "%s: %s", role.value, proposal.reason)
            proposals.append(proposal)
        return proposals


def engine_from_options(
    roles: Mapping[str, Mapping[str, Any]],
    fleet_status_path: str | None = None,
    fleet_status_nats: str | None = None,
    fleet_status_subject: str | None = None,
    fleet_status_max_age_s: float = 10.0,
    decision_log_path: str | None = None,
) -> ScalingEngine:
    """Builds the engine from plain options, as YAML and command lines give them.

    Args:
        roles: ``{"decode": {knob: value}, …}``; the knobs are :class:`LoadPolicy`'s fields.
        fleet_status_path: the file that the fleet controller writes; it wins over NATS.
        fleet_status_nats: URL of the NATS server, with ``fleet_status_subject``.

    Raises:
        ValueError: naming the role or knob that is wrong.
    """
    if not roles:
        raise ValueError("roles is empty: name at least one of decode, prefill")
    policies = {}
    for name, knobs in roles.items():
        try:
            role = Role(name)
            policies[role] = LoadPolicy(role=role, **knobs)
        except (TypeError, ValueError) as error:
            raise ValueError(f"roles.{name}: {error}") from error
    source: FleetStatusSource = NoFleetStatus()
    if fleet_status_path:
        source = FleetStatusFile(Path(fleet_status_path))
    elif fleet_status_nats and fleet_status_subject:
        source = FleetStatusSubject(fleet_status_nats, fleet_status_subject)
    return ScalingEngine(
        policies,
        source,
        DecisionLog(Path(decision_log_path) if decision_log_path else None),
        fleet_status_max_age_s=fleet_status_max_age_s,
    )
