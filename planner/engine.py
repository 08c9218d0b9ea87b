"""The policy fed by ticks, with its memory, its sources and its log: what both transports of the plugin share."""

from __future__ import annotations

import logging
import os
import time
import uuid
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from planner.context import ids, observation
from planner.fleet_status import FleetStatusFile, FleetStatusSource, FleetStatusSubject, NoFleetStatus, pool_view
from planner.hint_sender import HintSender, NatsHintSender, NoHintSender
from planner.hints import NO_HINTS, Hinting, HintMemory, HintPolicy
from planner.joint import JointPolicy, Memories
from planner.learnt_file import LearntFile
from planner.observation import Observation, Role
from planner.policy import Action, Proposal
from planner.records import DecisionLog, beginning, record

log = logging.getLogger(__name__)

NATS_ENV = "NATS_SERVER"
"""Dynamo's own variable."""
FORGET_S = 60.0
"""Decisions that have failed for so long may do so for what is remembered: it is forgotten."""


class ScalingEngine:
    """Decides for each role at each tick.

    Args:
        policy: of all roles.
        fleet_status: where the fleet's status comes from.
        decisions: where records go.
        hint_policy, hints: what is asked for beside the decisions, and where that goes.
        learnt: what a planner before has learnt, and where this one keeps it for the next.
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
        hint_policy: HintPolicy = NO_HINTS,
        hints: HintSender | None = None,
        learnt: LearntFile | None = None,
        fleet_status_max_age_s: float = 10.0,
        clock: Callable[[], float] = time.monotonic,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        self._policy = policy
        self._fleet_status = fleet_status
        self._decisions = decisions
        self._hint_policy = hint_policy
        self._hints = hints or NoHintSender()
        self._fleet_status_max_age_s = fleet_status_max_age_s
        self._clock = clock
        self._wall_clock = wall_clock
        self._learnt = learnt or LearntFile(None)
        self._meant: dict[Role, Proposal] = {}
        self._begin(self._learnt.begin(policy, wall_clock()))

    async def start(self) -> None:
        await self._fleet_status.start()
        await self._hints.start()

    async def close(self) -> None:
        try:
            await self._fleet_status.close()
            await self._hints.close()
        finally:  # what was learnt is not to be lost for a connection that failed
            await self._learnt.close(self._policy, self._sound(), self._wall_clock())

    def reset(self) -> None:
        """Forgets everything, what is kept for the next start too: the next tick is a protective start."""
        self._meant = {}
        self._forget("the planner was told to forget")

    def _forget(self, why: str) -> None:
        self._learnt.forget(why)
        self._begin(self._policy.fresh())

    def _sound(self) -> Memories | None:
        """What is remembered; None: it may be why decisions fail."""
        return self._memories if self._failing_since is None else None

    def _begin(self, memories: Memories) -> None:
        self._memories = memories
        self._untried = memories != self._policy.fresh()
        """Whether it begins with what was learnt before, and no two decisions have been made with that yet."""
        self._hint_memory = HintMemory()
        self._run = uuid.uuid4().hex[:12]
        self._tick = 0
        self._failing_since: float | None = None

    def propose(self, context: Any) -> list[Proposal]:
        """Returns one proposal a role for this PipelineContext (pydantic or protobuf)."""
        now, wall = self._clock(), self._wall_clock()
        status = self._fleet_status.latest()
        seen = {
            role: observation(context, role, pool_view(status, role, wall, self._fleet_status_max_age_s))
            for role in self._policy.policies
        }
        self._forget_what_fails(now)
        before = self._memories
        proposals = self._decided(seen, now)
        # What is proposed for one tick, only to be said again, is no size to have something ready beside.
        meant = {role: each for role, each in proposals.items() if self._memories[role].insisted_at != now}
        self._meant |= meant
        hint, self._hint_memory = self._hint_policy.hint(meant, self._hint_memory, now, wall)
        if hint is not None:
            self._hints.tell(hint)
        self._tick += 1
        if self._decisions.enabled:
            first = self._tick == 1 or self._decisions.parted
            begins = [beginning(wall, self._run, self._policy, before, self._tick - 1)] if first else []
            entries = (
                record(
                    wall,
                    seen[role],
                    proposal,
                    now=now,
                    run=self._run,
                    tick=self._tick,
                    hint=self._hint_memory.hints.get(role),
                    ids=ids(context),
                )
                for role, proposal in proposals.items()
            )
            self._decisions.write(*begins, *entries)
        for role, proposal in proposals.items():
            if self._memories[role].insisted_at == now:
                log.warning("%s: the fleet was told %s: is there another planner?", role.value, proposal.replicas)
            level = logging.DEBUG if proposal.action in (Action.HOLD, Action.NOTHING) else logging.INFO
            log.log(level, "%s: %s", role.value, proposal.reason)
        sound = self._sound()
        if sound is not None:
            self._learnt.keep(self._policy, sound, now, wall)
        return list(proposals.values())

    def _forget_what_fails(self, now: float) -> None:
        if self._failing_since is None:
            return
        if self._untried:
            self._forget("one of the first two decisions failed, maybe for what was learnt before")
        elif now - self._failing_since >= FORGET_S:
            self._forget(f"decisions have failed for {FORGET_S:.0f} s, maybe for what is remembered")

    def _decided(self, seen: Mapping[Role, Observation], now: float) -> dict[Role, Proposal]:
        """What the policy says, or what was said before where it fails: silence Dynamo takes for what is ready now."""
        try:
            proposals, self._memories = self._policy.decide(seen, self._memories, now)
        except Exception as error:
            if self._failing_since is None:
                log.exception("a decision failed; until one does not, what was proposed before is held")
                self._failing_since = now
            return {role: self._held(role, error) for role in self._policy.policies}
        # The first one learns nothing from what it sees, for there is no time since the one before it.
        self._failing_since, self._untried = None, self._untried and self._tick == 0
        return proposals

    def _held(self, role: Role, error: Exception) -> Proposal:
        before, why = self._meant.get(role), f"the decision failed ({type(error).__name__}: {error})"
        if before is None or before.replicas is None:
            return Proposal(role, Action.NOTHING, f"no opinion: {why}")
        reason = f"hold {before.replicas}: {why}"
        return Proposal(role, Action.HOLD, reason, before.replicas, before.floor, before.desired)


def engine_from_options(
    roles: Mapping[str, Mapping[str, Any]],
    fleet_status_path: str | None = None,
    fleet_status_nats: str | None = None,
    fleet_status_subject: str | None = None,
    fleet_status_max_age_s: float = 10.0,
    decision_log_path: str | None = None,
    learnt_path: str | None = None,
    learnt_of: str = "",
    gpu_budget: int | None = None,
    gpus_per_replica: Mapping[str, int] | None = None,
    advisory: bool = False,
    hints: str = Hinting.NONE,
    hints_nats: str | None = None,
    hints_subject: str | None = None,
    parked_least: Mapping[str, int] | None = None,
    parked_most: int = HintPolicy.parked_most,
) -> ScalingEngine:
    """Builds the engine from plain options, as YAML and command lines give them.

    Args:
        roles, gpu_budget, gpus_per_replica: as :meth:`planner.joint.JointPolicy.of` takes them.
        advisory: whether Dynamo's planner carries nothing out, so that the fleet never shows what is decided here.
        fleet_status_path: the file that the fleet controller writes; it wins over NATS.
        fleet_status_nats: URL of the NATS server, with ``fleet_status_subject``.
        learnt_path: what is learnt is kept there for the next start; None: it ends with the planner.
        learnt_of: which engines the planner scales, in any words; what was learnt of others is not used.
        hints: ``none``, ``prefetch`` or ``park``; the latter two need ``hints_subject``.
        hints_nats: URL of the NATS server; None: that of ``NATS_SERVER``.
        parked_least, parked_most: replicas that a hint asks to keep parked, the least by role.

    Raises:
        ValueError: naming the role, knob or option that is wrong.
    """
    source: FleetStatusSource = NoFleetStatus()
    if fleet_status_path:
        source = FleetStatusFile(Path(fleet_status_path))
    elif fleet_status_nats and fleet_status_subject:
        source = FleetStatusSubject(fleet_status_nats, fleet_status_subject)
    policy = JointPolicy.of(roles, gpu_budget, gpus_per_replica, insists=not advisory)
    if hints != Hinting.NONE and all(knobs.ttft_objective_s is None for knobs in policy.policies.values()):
        raise ValueError(f"hints: {hints} needs a ttft_objective_s: without one nothing is predicted")
    hint_policy = HintPolicy(
        Hinting(hints),
        {role: knobs.miss_replica_s for role, knobs in policy.policies.items()},
        {Role(name): count for name, count in (parked_least or {}).items()},
        parked_most,
    )
    return ScalingEngine(
        policy,
        source,
        DecisionLog(Path(decision_log_path) if decision_log_path else None),
        hint_policy=hint_policy,
        hints=_hint_sender(hint_policy.hinting, hints_nats or os.environ.get(NATS_ENV), hints_subject),
        learnt=LearntFile(Path(learnt_path) if learnt_path else None, learnt_of),
        fleet_status_max_age_s=fleet_status_max_age_s,
    )


def _hint_sender(hinting: Hinting, url: str | None, subject: str | None) -> HintSender:
    if hinting is Hinting.NONE:
        return NoHintSender()
    if not url or not subject:
        raise ValueError(f"hints: {hinting} needs hints_subject, and hints_nats or {NATS_ENV} in the environment")
    return NatsHintSender(url, subject)
