"""Why a pool was the size it was at a moment, in plain sentences: pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from datetime import datetime
from statistics import median

from dynamo_snapshot.errors import SnapshotError
from dynamo_snapshot.model import Reason
from dynamo_snapshot.replay.decisions.log import Candidate, Decision, Pool, Prediction

NEIGHBOURS = 2
"""So many sizes to either side of the best one are told of."""
WAYS = {"restore": "restored", "cold_start": "cold-started", "wake": "woken"}
LATE_S = 60.0


def explain(decisions: Sequence[Decision], at: float) -> list[str]:
    """Says why the pool was the size it was at ``at`` (wall-clock seconds), one thing a sentence.

    Args:
        decisions: of one role, oldest first, at least one.

    Raises:
        SnapshotError: ``configuration_invalid`` when the log begins later.
    """
    index = next((index for index in reversed(range(len(decisions))) if decisions[index].at <= at), None)
    if index is None:
        raise SnapshotError(
            Reason.CONFIGURATION_INVALID,
            f"the log begins at {clock(decisions[0].at)}, after {clock(at)}",
            "Name a later moment; an older log may lie beside it.",
        )
    decision = decisions[index]
    return [
        *_wanted(decisions, index, at),
        *_there(decision),
        *_known(decision),
        *_predicted(decision),
        *_limits(decision),
        f"In the policy's own words: {decision.reason}.",
        *_leads(decision),
    ]


def changes(decisions: Iterable[Decision]) -> Iterator[tuple[Decision, int | None]]:
    """The decisions that wanted another size than the one before, with that size."""
    before: int | None = None
    first = True
    for decision in decisions:
        if not first and decision.replicas != before:
            yield decision, before
        before, first = decision.replicas, False


def clock(at: float) -> str:
    try:
        return datetime.fromtimestamp(at).astimezone().strftime("%Y-%m-%d %H:%M:%S %z")
    except (OverflowError, ValueError, OSError):  # a log may say anything
        return f"{at:g} s after 1970"


def _wanted(decisions: Sequence[Decision], index: int, at: float) -> Iterator[str]:
    decision = decisions[index]
    if decision.replicas is None:
        yield f"At {clock(at)} the {decision.role} pool had no wanted size: the planner knew nothing to decide upon."
        return
    since = index
    while since and decisions[since - 1].replicas == decision.replicas:
        since -= 1
    were = "was" if decision.replicas == 1 else "were"
    text = f"At {clock(at)} {_replicas(decision.replicas)} {were} wanted in the {decision.role} pool"
    begin = decisions[since]
    if since:
        before = decisions[since - 1].replicas
        change = "first decided" if before is None else f"{_verb(before, decision.replicas)} from {before}"
        yield f"{text}, {change} {_ago(at - begin.at)} earlier."
    else:
        yield f"{text}, since the log begins {_ago(at - begin.at)} before."
    if at - decision.at > LATE_S:
        yield f"The planner's last decision was {_ago(at - decision.at)} old by then: it may not have been running."


def _there(decision: Decision) -> Iterator[str]:
    ready = "How many workers were ready was unknown" if decision.ready is None else f"{_workers(decision.ready)} ready"
    pool = decision.observation.pool
    if pool is None:
        yield f"{ready}; the fleet's status was not there, so what was on its way was unknown."
        return
    parked = f", {pool.parked} parked" if pool.parked else ""
    if not pool.starting:
        yield f"{ready}{parked}, none was on its way."
        return
    ways = [
        f"{len(ages)} being {WAYS.get(way, way)}, the oldest ordered {_ago(max(ages))} before{_usual(way, pool)}"
        for way, ages in _by_way(pool).items()
    ]
    yield f"{ready}{parked}, {len(pool.starting)} on the way: {'; '.join(ways)}."


def _known(decision: Decision) -> Iterator[str]:
    if decision.running is not None and decision.queued is not None:
        of = "" if decision.ready is None else f" of {decision.ready}"
        yield (
            f"{decision.fresh_workers}{of} ready workers told of {decision.running:g} running and "
            f"{decision.queued:g} waiting requests."
        )
    if decision.unknown:
        yield f"Unknown: {'; '.join(decision.unknown)}. What is unknown may raise the size and never lowers it."


def _predicted(decision: Decision) -> Iterator[str]:
    prediction = decision.forecast
    if prediction is None:
        yield "Nothing was predicted: need came from the number of requests."
        return
    yield (
        f"Requests came at a rate that keeps {prediction.demand_replicas:.1f} replicas busy, and "
        f"{prediction.waiting_s:.1f} s of work waited. A replica ordered then would serve {prediction.lead_s:.1f} s "
        f"later, so that is how far the policy looked; {prediction.alike} moments on record were like this one."
    )
    if prediction.slots is not None and prediction.residence_s is not None:
        yield (
            f"Prefill was not all that bound an engine: it ran {prediction.slots:.0f} requests at once, and each "
            f"stayed for {prediction.residence_s:.1f} s."
        )
    yield from _candidates(prediction)
    if prediction.keep > prediction.rise:
        yield f"{prediction.rise} were worth ordering, {prediction.keep} worth keeping where they are there already."


def _candidates(prediction: Prediction) -> Iterator[str]:
    if not prediction.candidates:
        return
    ordered = sorted(prediction.candidates, key=lambda candidate: candidate.replicas)
    best = min(ordered, key=lambda candidate: candidate.cost)
    place = ordered.index(best)
    near = ordered[max(0, place - NEIGHBOURS) : place + NEIGHBOURS + 1]
    yield f"{'; '.join(_candidate(candidate) for candidate in near)}. Cheapest: {best.replicas}."


def _candidate(candidate: Candidate) -> str:
    return (
        f"{_replicas(candidate.replicas)} would miss {candidate.misses_per_s:.2f} requests/s "
        f"(cost: {candidate.cost:.2f} replicas)"
    )


def _limits(decision: Decision) -> Iterator[str]:
    pool = decision.observation.pool
    unachievable = "" if pool is None else pool.unachievable_reason
    if decision.replicas is not None and decision.desired is not None and decision.desired > decision.replicas:
        if unachievable:
            why = f"the fleet could not reach more than {decision.replicas} ({unachievable})"
        else:  # the GPU budget, another planner, or a limit that the fleet told of before: the reason has it
            why = f"{decision.replicas} asked for, for the reason that the policy's own words end with"
        yield f"{decision.desired} were needed, but {why}."
    elif pool is not None and unachievable:
        yield f"The fleet said that it cannot reach more than {pool.achievable} ({unachievable})."
    yield from _hinted(decision)
    if decision.floor:
        yield f"The work that was there needs {decision.floor} at least: no other planner plugin can go below that."


def _hinted(decision: Decision) -> Iterator[str]:
    hint = decision.hint
    if hint is None:
        return
    asked = [] if hint.parked is None else [f"{_replicas(hint.parked)} kept parked"]
    asked += ["the snapshot in memory"] if hint.prefetch else []
    if asked:
        yield f"For what may come beyond that, the fleet was asked to have {' and '.join(asked)}."


def _leads(decision: Decision) -> Iterator[str]:
    if decision.request_id or decision.decision_id:
        ids = [f"request {decision.request_id}"] if decision.request_id else []
        ids += [f"decision {decision.decision_id}"] if decision.decision_id else []
        yield f"In Dynamo's audit this is {', '.join(ids)}."


def _by_way(pool: Pool) -> dict[str, list[float]]:
    ways: dict[str, list[float]] = {}
    for way, age_s in pool.starting:
        ways.setdefault(way, []).append(age_s)
    return ways


def _usual(way: str, pool: Pool) -> str:
    times = pool.start_times.get(way, ())
    return f" (lately they took {median(times):.1f} s, the median of {len(times)})" if times else ""


def _workers(count: int) -> str:
    return "1 worker was" if count == 1 else f"{count} workers were"


def _replicas(count: int) -> str:
    return "1 replica" if count == 1 else f"{count} replicas"


def _verb(before: int, after: int) -> str:
    return "raised" if after > before else "lowered"


def _ago(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.1f} s"
    if seconds < 7200:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.1f} h"
