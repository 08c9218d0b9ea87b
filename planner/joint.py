"""All roles' policies, the GPU budget over them, and who else decides: pure, as each policy is.

``decide(observations, memories, now) -> (proposals, memories)`` is what the plugin runs at each tick, and what
a decision log is decided anew with.

Of two planners on one fleet, as there are for a moment in a rolling update, the last that writes counts. Dynamo
writes a decision only where it differs from that planner's last one, so a planner whose wish stands still would
never be heard again once the other has written something else, and gone. It insists: see :class:`RoleMemory`.
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

NEEDED_UNHEARD_S, MORE_UNHEARD_S, FEWER_UNHEARD_S = 5.0, 30.0, 120.0
"""A wish that the fleet does not show for so long is said again: for more replicas that the work needs which is
there, for more that may be needed, for fewer. Each time that it has to be said again it is waited for twice as long,
and for fewer not before it is calm again."""
CALM_S = 600.0
"""Then it is as at first."""
SHARE_KEPT_S = 30.0
"""How long after GPUs went from one role to another none does: each move drains workers and starts others."""


@dataclass(frozen=True)
class RoleMemory:
    """What is carried from one tick to the next for one role.

    To be written again, a wish has to be preceded by another: by what the fleet was told, which changes nothing.
    """

    policy: Memory = field(default_factory=Memory)
    wish: int | None = None
    unheard_since: float | None = None
    """Since when the fleet's target is another than the wish, which has not changed."""
    patience: float = 1.0
    """How many times longer than at first a wish is waited for."""
    insisted_at: float | None = None
    share: int | None = None
    """Replicas that the budget left it; None: there is none, or no opinion."""
    taken_at: float = -math.inf
    """When it last had to give replicas that it wants to another role."""


Memories = Mapping[Role, RoleMemory]


@dataclass(frozen=True)
class JointPolicy:
    """Decides for each role that has a policy; roles without one get no proposal.

    Raises:
        ValueError: for a budget without the cost of each role, of roles that all cost nothing, or below what the
            minimums need.
    """

    policies: Mapping[Role, LoadPolicy]
    gpu_budget: int | None = None
    """GPUs that all roles together may use; None: no bound but each role's own."""
    gpus_per_replica: Mapping[Role, int] = field(default_factory=lambda: MappingProxyType({}))
    """Needed with a budget: an unknown cost is never taken for none. A role of 0 is not bound by the budget."""
    insists: bool = True
    """Whether a wish that somebody else overwrote is said again; not where nobody carries wishes out."""

    def __post_init__(self) -> None:
        if self.gpu_budget is None:
            return
        unknown = [role.value for role in self.policies if self.gpus_per_replica.get(role, -1) < 0]
        if unknown:
            raise ValueError(f"gpu_budget needs gpus_per_replica of at least 0 for {', '.join(unknown)}")
        if not any(self.gpus_per_replica[role] for role in self.policies):
            raise ValueError("gpu_budget bounds nothing: gpus_per_replica is 0 for every role")
        least = sum(policy.min_replicas * self.gpus_per_replica[role] for role, policy in self.policies.items())
        if self.gpu_budget < least:
            raise ValueError(f"gpu_budget {self.gpu_budget} is below the {least} GPUs that the minimums need")

    @classmethod
    def of(
        cls,
        roles: Mapping[str, Mapping[str, Any]],
        gpu_budget: int | None = None,
        gpus_per_replica: Mapping[str, int] | None = None,
        insists: bool = True,
    ) -> JointPolicy:
        """Builds it from plain values, as YAML and decision logs hold them.

        Args:
            roles: ``{"decode": {knob: value}, …}``; the knobs are :class:`LoadPolicy`'s fields, ``replica_cost``
                where it is left out the GPUs that a replica takes.

        Raises:
            ValueError: naming the role or knob that is wrong.
        """
        if not roles:
            raise ValueError("roles is empty: name at least one of decode, prefill")
        gpus = {Role(name): count for name, count in (gpus_per_replica or {}).items()}
        policies = {}
        for name, knobs in roles.items():
            try:
                role = Role(name)
                policies[role] = LoadPolicy(role=role, **{"replica_cost": max(1, gpus.get(role, 1)), **knobs})
            except (TypeError, ValueError) as error:
                raise ValueError(f"roles.{name}: {error}") from error
        return cls(policies, gpu_budget, gpus, insists)

    def plain(self) -> dict[str, Any]:
        """Returns what :meth:`of` takes, every knob named."""
        return {
            "roles": {
                role.value: {name: value for name, value in asdict(policy).items() if name != "role"}
                for role, policy in self.policies.items()
            },
            "gpu_budget": self.gpu_budget,
            "gpus_per_replica": {role.value: count for role, count in self.gpus_per_replica.items()},
            "insists": self.insists,
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
        decided = {
            role: policy.decide(observations[role], memories[role].policy, now)
            for role, policy in self.policies.items()
        }
        wished = {role: proposal for role, (proposal, _) in decided.items()}
        shares = self._shares(observations, wished, memories, now)
        proposals: dict[Role, Proposal] = {}
        kept: dict[Role, RoleMemory] = {}
        for role, (proposal, after) in decided.items():
            before, share = memories[role], shares.get(role)
            proposals[role] = proposal if share is None else _cut(proposal, share, self.gpu_budget)
            taken = share is not None and before.share is not None and share < min(before.share, proposal.replicas or 0)
            memory = replace(before, policy=after, share=share, taken_at=now if taken else before.taken_at)
            kept[role] = memory
            if self.insists:
                proposals[role], kept[role] = _insisting(proposals[role], memory, observations[role].pool, now)
        return proposals, kept

    def _shares(
        self,
        observations: Mapping[Role, Observation],
        proposals: Mapping[Role, Proposal],
        memories: Memories,
        now: float,
    ) -> dict[Role, int]:
        """Replicas that the budget leaves each role with a wish; roles that take no GPUs are not among them.

        A role without an opinion is counted with its most, for what it has is not known; that bounds how others
        grow. What they have they keep, as does a role whose load is not known: all but what does not fit beside the
        minimums of those without an opinion.
        """
        if self.gpu_budget is None:
            return {}
        costs = self.gpus_per_replica
        silent = [role for role, proposal in proposals.items() if proposal.replicas is None]
        wants = {
            role: Want(
                proposal.replicas,
                self.policies[role].min_replicas,
                costs[role],
                proposal.forecast.choices if proposal.forecast else (),
                self.policies[role].miss_cost_s,
                self.policies[role].replica_cost,
            )
            for role, proposal in proposals.items()
            if proposal.replicas is not None and costs[role] > 0
        }
        moved = now - max((memory.taken_at for memory in memories.values()), default=-math.inf) < SHARE_KEPT_S
        keeping = {
            role: _what_is_there_of(want, _there(observations[role], memories[role]))
            for role, want in wants.items()
            if moved or silent or not proposals[role].load.complete
        }
        least = sum(self.policies[role].min_replicas * costs[role] for role in silent)
        others = sum(want.least * want.gpus for role, want in wants.items() if role not in keeping)
        for role, kept in allocate(keeping, self.gpu_budget - least - others).items():
            wants[role] = replace(wants[role], minimum=kept)
        most = sum(self.policies[role].max_replicas * costs[role] for role in silent)
        return allocate(wants, self.gpu_budget - most)


def _there(observation: Observation, memory: RoleMemory) -> int:
    """What a role has of the budget: its share so far, or what the fleet was told or has at a start."""
    if memory.share is not None:
        return memory.share
    return (observation.ready if observation.pool is None else observation.pool.target) or 0


def _what_is_there_of(want: Want, there: int) -> Want:
    return replace(want, replicas=min(want.replicas, max(want.minimum, there)))


def _insisting(
    proposal: Proposal, memory: RoleMemory, pool: PoolView | None, now: float
) -> tuple[Proposal, RoleMemory]:
    """The proposal, or for one tick the fleet's own target, so that the proposal is written anew at the next."""
    wish, told = proposal.replicas, None if pool is None else pool.target
    if wish is None or told is None:
        return proposal, memory
    if wish == told:
        return proposal, replace(memory, wish=wish, unheard_since=None, patience=_calmed(memory, now))
    if wish != memory.wish or memory.unheard_since is None:
        return proposal, replace(memory, wish=wish, unheard_since=now)
    if now - memory.unheard_since < memory.patience * _unheard_s(proposal, wish, told):
        return proposal, memory
    if wish < told and memory.insisted_at is not None and now - memory.insisted_at < CALM_S:
        # Of two that disagree the one that wants more has the last word: one too many costs less than turning.
        return proposal, memory
    said_again = replace(
        proposal,
        replicas=told,
        floor=None if proposal.floor is None else min(proposal.floor, told),
        reason=f"{proposal.reason}; the fleet was told {told} by somebody else, so {wish} is said again",
    )
    longer = min(MOST_PATIENCE, 2 * memory.patience)
    return said_again, replace(memory, unheard_since=now, patience=longer, insisted_at=now)


def _unheard_s(proposal: Proposal, wish: int, told: int) -> float:
    if (proposal.floor or 0) > told:
        return NEEDED_UNHEARD_S
    return MORE_UNHEARD_S if wish > told else FEWER_UNHEARD_S


def _calmed(memory: RoleMemory, now: float) -> float:
    """After a time without insisting the next wish is waited for as at first."""
    calm = memory.insisted_at is None or now - memory.insisted_at > CALM_S
    return 1.0 if calm else memory.patience


def _cut(proposal: Proposal, replicas: int, budget: int | None) -> Proposal:
    if proposal.replicas is None or replicas >= proposal.replicas:
        return proposal
    return replace(
        proposal,
        replicas=replicas,
        floor=None if proposal.floor is None else min(proposal.floor, replicas),
        reason=f"{proposal.reason}; {replicas} of {proposal.replicas} within the budget of {budget} GPUs",
    )
