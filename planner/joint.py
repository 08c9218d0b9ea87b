"""All roles' policies, the GPU budget over them, and who else decides: pure, as each of them is.

``decide(observations, memories, now) -> (proposals, memories)`` is what the plugin runs at each tick, and what
a decision log is decided anew with.

Two planners on one fleet, as for a moment in a rolling update, must not undo each other's decisions by turns. A
target of the fleet that is not among what this one has said is somebody else's: it is taken over as if it were
one's own, so it holds for a whole window, and twice as long where it is more than this one had asked for.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from types import MappingProxyType
from typing import Any

from planner.budget import Want, allocate
from planner.observation import Observation, PoolView, Role
from planner.policy import MOST_PATIENCE, LoadPolicy, Memory, Proposal
from planner.window import NeedWindow

MOST_SAID = 32
"""So many decisions are kept that the fleet has not shown yet."""


@dataclass(frozen=True)
class RoleMemory:
    """What is carried from one tick to the next for one role."""

    policy: Memory = field(default_factory=Memory)
    said: tuple[int, ...] = ()
    """What was asked for, oldest first, from the decision that the fleet last showed."""
    told: int | None = None
    """The fleet's target as its status last showed it."""
    taken_over_at: float | None = None
    """When the fleet last showed a target that somebody else decided."""


Memories = Mapping[Role, RoleMemory]


@dataclass(frozen=True)
class JointPolicy:
    """Decides for each role that has a policy; roles without one get no proposal.

    Raises:
        ValueError: for a budget without the cost of each role, or below what the minimums need.
    """

    policies: Mapping[Role, LoadPolicy]
    gpu_budget: int | None = None
    """GPUs that all roles together may use; None: no bound but each role's own."""
    gpus_per_replica: Mapping[Role, int] = field(default_factory=lambda: MappingProxyType({}))
    """Needed with a budget: an unknown cost is never taken for none."""

    def __post_init__(self) -> None:
        if self.gpu_budget is None:
            return
        unknown = [role.value for role in self.policies if self.gpus_per_replica.get(role, 0) < 1]
        if unknown:
            raise ValueError(f"gpu_budget needs gpus_per_replica of at least 1 for {', '.join(unknown)}")
        least = sum(policy.min_replicas * self.gpus_per_replica[role] for role, policy in self.policies.items())
        if self.gpu_budget < least:
            raise ValueError(f"gpu_budget {self.gpu_budget} is below the {least} GPUs that the minimums need")

    @classmethod
    def of(
        cls,
        roles: Mapping[str, Mapping[str, Any]],
        gpu_budget: int | None = None,
        gpus_per_replica: Mapping[str, int] | None = None,
    ) -> JointPolicy:
        """Builds it from plain values, as YAML and decision logs hold them.

        Args:
            roles: ``{"decode": {knob: value}, …}``; the knobs are :class:`LoadPolicy`'s fields.

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
        return cls(policies, gpu_budget, {Role(name): count for name, count in (gpus_per_replica or {}).items()})

    def plain(self) -> dict[str, Any]:
        """Returns what :meth:`of` takes, every knob named."""
        return {
            "roles": {
                role.value: {name: value for name, value in asdict(policy).items() if name != "role"}
                for role, policy in self.policies.items()
            },
            "gpu_budget": self.gpu_budget,
            "gpus_per_replica": {role.value: count for role, count in self.gpus_per_replica.items()},
        }

    def fresh(self) -> Memories:
        """The memories of a start."""
        return {role: RoleMemory() for role in self.policies}

    def decide(
        self, observations: Mapping[Role, Observation], memories: Memories, now: float
    ) -> tuple[dict[Role, Proposal], Memories]:
        """Returns one proposal a role, and the memories for the next tick.

        Args:
            observations: of every role that has a policy.
            now: seconds of a clock that never goes back.
        """
        proposals: dict[Role, Proposal] = {}
        kept: dict[Role, RoleMemory] = {}
        for role, policy in self.policies.items():
            memory = _hearing(memories[role], observations[role].pool, now, policy.scale_down_after_s)
            proposal, after = policy.decide(observations[role], memory.policy, now)
            if memory.taken_over_at == now:
                proposal = replace(proposal, reason=f"{proposal.reason}; somebody else decided {memory.told}")
            proposals[role], kept[role] = proposal, replace(memory, policy=after)
        proposals = self._within_budget(proposals)
        return proposals, {role: _saying(memory, proposals[role].replicas) for role, memory in kept.items()}

    def _within_budget(self, proposals: dict[Role, Proposal]) -> dict[Role, Proposal]:
        """A role without an opinion is counted with its most: what it has is not known."""
        budget = self.gpu_budget
        if budget is None:
            return proposals
        silent = [role for role, proposal in proposals.items() if proposal.replicas is None]
        budget -= sum(self.policies[role].max_replicas * self.gpus_per_replica[role] for role in silent)
        wants = {
            role: Want(
                proposal.replicas,
                self.policies[role].min_replicas,
                self.gpus_per_replica[role],
                proposal.forecast.choices if proposal.forecast else (),
            )
            for role, proposal in proposals.items()
            if proposal.replicas is not None
        }
        given = allocate(wants, budget)
        return {
            role: proposal if role not in given else _cut(proposal, given[role], self.gpu_budget)
            for role, proposal in proposals.items()
        }


def _hearing(memory: RoleMemory, pool: PoolView | None, now: float, window_s: float) -> RoleMemory:
    """Takes note of the fleet's target; one that was never said here is taken over."""
    if pool is None or pool.target == memory.told:
        return memory
    heard = replace(memory, told=pool.target)
    if pool.target in memory.said:
        return replace(heard, said=memory.said[memory.said.index(pool.target) :])
    if memory.told is None or not memory.said:
        return heard  # the first that is shown, or from before the first decision
    more = pool.target > memory.said[-1]
    policy = replace(
        memory.policy,
        target=pool.target,
        free=pool.target,
        changed_at=now,
        lowered_at=-math.inf,
        window=NeedWindow().add(now, pool.target, window_s),
        patience=min(MOST_PATIENCE, 2 * memory.policy.patience) if more else memory.policy.patience,
    )
    return replace(heard, said=(pool.target,), policy=policy, taken_over_at=now)


def _saying(memory: RoleMemory, replicas: int | None) -> RoleMemory:
    if replicas is None or memory.said[-1:] == (replicas,):
        return memory
    return replace(memory, said=(*memory.said, replicas)[-MOST_SAID:])


def _cut(proposal: Proposal, replicas: int, budget: int | None) -> Proposal:
    if proposal.replicas is None or replicas >= proposal.replicas:
        return proposal
    return replace(
        proposal,
        replicas=replicas,
        floor=None if proposal.floor is None else min(proposal.floor, replicas),
        reason=f"{proposal.reason}; {replicas} of {proposal.replicas} within the budget of {budget} GPUs",
    )
