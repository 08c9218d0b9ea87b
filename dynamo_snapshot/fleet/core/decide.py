"""Takes up what the planner decides, and what it hints at."""

from __future__ import annotations

from msgspec.structs import replace

from dynamo_snapshot.fleet.core.draft import Draft
from dynamo_snapshot.fleet.core.messages import CompleteDecision
from dynamo_snapshot.model import Decision, ScalingHint

HINT_LASTS_AT_MOST_S = 3600.0
"""Whatever a hint says of its own end: whose planner has gone must not be obeyed for ever."""


def decided(draft: Draft, decision: Decision) -> None:
    """Takes up a decision; a repeated one changes nothing but is acknowledged again."""
    draft.commands.append(CompleteDecision(decision=decision))
    last = draft.state.decision
    if last is not None and last[0] == decision.revision and decision.id <= last[1]:
        draft.set(decision_seen=True)
        return
    draft.set(decision=(decision.revision, decision.id), decision_seen=True)
    numbers = {"prefill": decision.prefill, "decode": decision.decode}
    for name, rules in draft.rules.pools.items():
        number = numbers.get(rules.role)
        if number is None or number < 0:
            continue  # unknown is not zero: the target stands
        target = max(rules.min_replicas, min(rules.max_replicas, number))
        pool = draft.pools[name]
        if target != pool.target or not pool.decided:
            reason = f"planner's decision {decision.id}"
            if target != number:
                reason += f" asks for {number}; the pool takes {rules.min_replicas} to {rules.max_replicas}"
            draft.record(name, f"target {pool.target} -> {target}", reason)
        draft.set_pool(name, target=target, decided=True)


def hinted(draft: Draft, hint: ScalingHint) -> None:
    """Takes up a hint, unless a newer one came before it. One of a clock that is ahead is of now."""
    hint = replace(hint, at=min(hint.at, draft.now), expires_at=min(hint.expires_at, draft.now + HINT_LASTS_AT_MOST_S))
    known = draft.state.hint
    if known is None or hint.at >= known.at or known.at > draft.now:  # the last: this clock was set back
        draft.set(hint=hint)
