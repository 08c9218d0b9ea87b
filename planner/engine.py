"""One policy and memory a role, fed by ticks: what both transports of the plugin share."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

from planner.budget import Want, allocate
from planner.context import ids, observation
from planner.fleet_status import FleetStatusFile, FleetStatusSource, FleetStatusSubject, NoFleetStatus, pool_view
from planner.observation import Observation, Role
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
        gpu_budget: GPUs that all roles together may use; None: no bound but each role's own.
        gpus_per_replica: by role, needed with a budget: an unknown cost is never taken for none.
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
        gpu_budget: int | None = None,
        gpus_per_replica: Mapping[Role, int] = MappingProxyType({}),
        clock: Callable[[], float] = time.monotonic,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        _check_budget(policies, gpu_budget, gpus_per_replica)
        self._policies = dict(policies)
        self._gpu_budget = gpu_budget
        self._gpus = dict(gpus_per_replica)
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
        seen: dict[Role, Observation] = {}
        proposals: dict[Role, Proposal] = {}
        for role, policy in self._policies.items():
            seen[role] = observation(context, role, pool_view(status, role, wall, self._fleet_status_max_age_s))
            proposals[role], self._memories[role] = policy.decide(seen[role], self._memories[role], now)
        proposals = self._within_budget(proposals)
        for role, proposal in proposals.items():
            if self._decisions.enabled:
                self._decisions.write(record(wall, seen[role], proposal, now=now, ids=ids(context)))
            level = logging.DEBUG if proposal.action in (Action.HOLD, Action.NOTHING) else logging.INFO
            log.log(level, "%s: %s", role.value, proposal.reason)
        return list(proposals.values())

    def _within_budget(self, proposals: dict[Role, Proposal]) -> dict[Role, Proposal]:
        """A role without an opinion is counted with its most: what it has is not known."""
        budget = self._gpu_budget
        if budget is None:
            return proposals
        silent = [role for role, proposal in proposals.items() if proposal.replicas is None]
        budget -= sum(self._policies[role].max_replicas * self._gpus[role] for role in silent)
        wants = {
            role: Want(
                proposal.replicas,
                self._policies[role].min_replicas,
                self._gpus[role],
                proposal.forecast.choices if proposal.forecast else (),
            )
            for role, proposal in proposals.items()
            if proposal.replicas is not None
        }
        given = allocate(wants, budget)
        return {
            role: proposal if role not in given else _cut(proposal, given[role], self._gpu_budget)
            for role, proposal in proposals.items()
        }


def _cut(proposal: Proposal, replicas: int, budget: int | None) -> Proposal:
    if proposal.replicas is None or replicas >= proposal.replicas:
        return proposal
    return replace(
        proposal,
        replicas=replicas,
        floor=None if proposal.floor is None else min(proposal.floor, replicas),
        reason=f"{proposal.reason}; {replicas} of {proposal.replicas} within the budget of {budget} GPUs",
    )


def _check_budget(policies: Mapping[Role, LoadPolicy], budget: int | None, gpus: Mapping[Role, int]) -> None:
    if budget is None:
        return
    unknown = [role.value for role in policies if gpus.get(role, 0) < 1]
    if unknown:
        raise ValueError(f"gpu_budget needs gpus_per_replica of at least 1 for {', '.join(unknown)}")
    least = sum(policy.min_replicas * gpus[role] for role, policy in policies.items())
    if budget < least:
        raise ValueError(f"gpu_budget {budget} is below the {least} GPUs that the minimums need")


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
        gpu_budget=gpu_budget,
        gpus_per_replica={Role(name): count for name, count in (gpus_per_replica or {}).items()},
    )
