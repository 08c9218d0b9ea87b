"""From what engines and fleet tell to the sizes that cost least now: what the policy decides upon.

:func:`observe` keeps what was learnt (pass times, what requests are like, demand by the second, start-up times),
:func:`look_ahead` predicts the misses of each size at the moments that a decision now can change.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace

from planner.demand import Demand, Flow, infer
from planner.history import KEPT_BINS, LONG, History
from planner.load import Load, Steps
from planner.observation import Observation, PoolView
from planner.outlook import (
    Backlogs,
    Capacity,
    Choice,
    Future,
    Turnover,
    bins_of,
    cheapest,
    cheapest_there,
    flood,
    futures,
    misses_by_size,
    priced,
    supposed,
)
from planner.service import Service, learn
from planner.sizes import Sizes
from planner.sizes import learn as learn_sizes
from planner.slots import Limit, Slots
from planner.slots import learn as learn_slots
from planner.startup import StartUp, start_up
from planner.waiting import Busy, Prompt, Prompts, Slotted, Waiting

START_QUANTILE = 0.8
"""Starts are expected to take as long as this share of them does."""
BALANCE = 0.95
"""Of what replicas can do together, what they do while requests are spread over them by count."""
KEPT_AFTER_START_S = 20.0
"""How long a replica that is ordered is expected to stay: its start-up time is paid over that."""
SEEN_LATE = 0.5
"""How many ticks after they came arrivals are seen on average: engines tell of a pass when it is over."""
MOST_HELD_S = 300.0
"""A replica that is not needed is kept as long as starting it anew would cost, but not for longer than this."""
SLACK_PROMPTS = 1.0
"""How many mean prompts' time of the objective is not for waiting: a request's own, and what joins its pass."""
LEAST_SLACK = 0.15
"""Of the objective, what waiting may take at the least, however long prompts are."""
LEARNT_FROM = 128
"""Passes that are learnt from at one tick, at the most: hardly more are remembered (:data:`service.KEEP_PASSES`)."""
ALIKE_OF_MANY = 150
"""Moments that are looked at where there are more engines than that: their own telemetry takes the time."""
PRIOR_WEIGHT = 6.0
PRIOR_BURST_EVERY_S = 60.0
PRIOR_BURST = 2.0
"""Before bursts are on record: one a minute, of so many replicas' worth."""
PRIOR_FADES_S = 60.0


@dataclass(frozen=True)
class Knowledge:
    """What is learnt from tick to tick."""

    service: Service = field(default_factory=Service)
    flow: Flow = field(default_factory=Flow)
    history: History = field(default_factory=History)
    start: StartUp = field(default_factory=StartUp)
    demand: Demand = field(default_factory=Demand)
    backlogs: tuple[float, ...] = ()
    """Prompt tokens that wait on each ready replica."""
    tick_s: float = 1.0
    sizes: Sizes = field(default_factory=Sizes)
    slots: Slots = field(default_factory=Slots)
    limit: Limit | None = None
    """What binds engines besides prefill; None: nothing that is known."""
    held: tuple[float, ...] = ()
    """Requests that each ready replica has, those that wait included."""
    turn: int = 0
    """Which engines' passes are learnt from next, where there are many."""

    @property
    def prefill_token_s(self) -> float:
        """Seconds of a replica that a prompt token takes; a decode step of other requests goes with each prompt."""
        return self.service.second_per_token + self.service.step_s / self.flow.prompt

    @property
    def token_s(self) -> float:
        """Replica-seconds that a prompt token stands for, by what binds: its prefill, or the slot of its request."""
        prefill_s = self.prefill_token_s
        return prefill_s if self.limit is None else max(prefill_s, self.limit.request_s / self.flow.prompt)

    @property
    def lead_s(self) -> float:
        """Seconds until a replica that is ordered now serves."""
        return self.start.quantile(self.start.next_way(), START_QUANTILE)


@dataclass(frozen=True)
class Objectives:
    """What the user wants, in seconds, and how many replica-seconds a miss is worth."""

    ttft_s: float
    itl_s: float | None
    miss_replica_s: float


@dataclass(frozen=True)
class Forecast:
    """One tick's prediction."""

    rise: int
    keep: int
    floor: int
    lead_s: float
    arriving: float
    """Demand of the last two seconds, in replicas."""
    waiting_s: float
    """Seconds of work that wait, on one replica: of prefill, or of slots where those bind."""
    slack_s: float
    alike: int
    """Moments on record that resemble this one."""
    hold_s: float = 0.0
    """What starting one more would cost, in replica-seconds: for so long it pays to keep one."""
    choices: tuple[Choice, ...] = ()
    """Sizes with predicted misses and cost, one start-up time from now."""
    limit: Limit | None = None
    """What binds besides prefill; None: nothing that is known."""
    prompts: Prompts | None = None

    def text(self) -> str:
        best = cheapest(self.choices)
        binds = "prefill"
        if self.limit is not None:
            binds = f"work ({self.limit.slots:.0f} requests at once, {self.limit.residence_s:.1f} s each)"
        return (
            f"demand {self.arriving:.1f} replicas, {self.waiting_s:.1f} s of {binds} waiting; in {self.lead_s:.1f} s "
            f"{best.replicas} would miss {best.misses:.2f} requests/s ({self.alike} moments alike)"
        )


def observe(
    knowledge: Knowledge,
    pool: PoolView | None,
    steps: Steps,
    load: Load,
    elapsed_s: float | None,
    longest_s: float,
) -> Knowledge:
    """Returns what is known with this tick; after a gap longer than ``longest_s`` what came in it is unknown."""
    learnt = steps.some(LEARNT_FROM, knowledge.turn)
    service = learn(knowledge.service, learnt)
    knowledge = replace(
        knowledge,
        service=service,
        start=start_up(pool, knowledge.start),
        turn=knowledge.turn + 1,
        backlogs=tuple([sample.queued_tokens or 0.0 for sample in steps.after]),
    )
    if elapsed_s is None or not 0 < elapsed_s <= longest_s:
        return knowledge
    slots = learn_slots(knowledge.slots, learnt, elapsed_s, service)
    knowledge = replace(knowledge, slots=slots)
    if not service.known:
        return knowledge
    demand, flow = infer(steps, elapsed_s, service, knowledge.flow)
    limit, held = slots.limit(service, flow.answer) if flow.prompt else None, knowledge.held
    if limit is not None:
        requests, slots = slots.arrivals(steps, elapsed_s, service, flow.answer)
        demand = replace(demand, requests=requests, tokens=requests * flow.prompt)
        held = tuple([(sample.running or 0.0) + (sample.queued or 0.0) for sample in steps.after])
    history = knowledge.history
    if load.complete or demand.tokens > 0:
        history = history.add(elapsed_s, demand.tokens, demand.requests)
    tick_s = knowledge.tick_s + (elapsed_s - knowledge.tick_s) / 8
    step_s = service.step_s
    sizes = learn_sizes(
        knowledge.sizes, learnt, flow.prompt, step_s, service.second_per_token, flow.answer * step_s, tick_s
    )
    return replace(
        knowledge,
        flow=flow,
        demand=demand,
        history=history,
        tick_s=tick_s,
        slots=slots,
        limit=limit,
        held=held,
        sizes=sizes,
    )


def _waiting(knowledge: Knowledge, prompts: Prompts, slack_s: float, share: float) -> Waiting:
    history, flow = knowledge.history, knowledge.flow
    rate = history.now.long**2
    queues = [Busy(prompts, rate / flow.prompt, rate * knowledge.prefill_token_s / share)]
    limit = knowledge.limit
    if limit is not None:
        counts = history.requests[-1 - LONG :]
        rate = (counts[-1] - counts[0]) / max(1, len(counts) - 1)
        queues.append(Busy(Slotted(limit.slots, limit.request_s, slack_s), rate, rate * limit.request_s / share))
    return Waiting(tuple(queues))


def _prompts(knowledge: Knowledge, ttft_s: float) -> Prompts:
    """What requests are like, and what they have for waiting and prefill."""
    service, shares = knowledge.service, knowledge.sizes.shares(knowledge.flow.prompt)
    base, _ = service.decode_line()
    sizes = tuple(Prompt(tokens * service.second_per_token + service.step_s, share) for tokens, share in shares)
    return Prompts(sizes, ttft_s - base, knowledge.history.bursts())


def _slack_s(knowledge: Knowledge, ttft_s: float) -> float:
    """Seconds that a request may wait: the objective without its own prompt and a decode step."""
    base, _ = knowledge.service.decode_line()
    own = SLACK_PROMPTS * knowledge.flow.prompt * knowledge.service.second_per_token
    return max(LEAST_SLACK * ttft_s, ttft_s - own - base)


def look_ahead(
    knowledge: Knowledge, observation: Observation, objectives: Objectives, there: int, lowest: int, highest: int
) -> Forecast | None:
    """Returns what to have; None while the service rate is unknown.

    Args:
        there: replicas that are ready or asked for.
    """
    service, flow, history = knowledge.service, knowledge.flow, knowledge.history
    if not service.known or not flow.prompt:
        return None
    per_token, token_s, limit = knowledge.prefill_token_s, knowledge.token_s, knowledge.limit
    slack_s = _slack_s(knowledge, objectives.ttft_s)
    start, lead_s, tick_s = knowledge.start, knowledge.lead_s, knowledge.tick_s
    starting = observation.pool.starting if observation.pool else ()
    backlogs = Backlogs.of([tokens * per_token for tokens in knowledge.backlogs])
    turnover, waiting_s = None, backlogs.total
    if limit is not None:
        taken = Backlogs.of([requests * limit.request_s for requests in knowledge.held])
        turnover = Turnover(limit.request_s, limit.residence_s, taken)
        queued = sum(max(0.0, requests - limit.slots) for requests in knowledge.held)
        waiting_s = max(waiting_s, queued * limit.request_s)
    capacity = Capacity(
        ready=observation.ready or 0,
        backlogs=backlogs,
        arrivals=tuple(sorted(start.remaining(one, START_QUANTILE) for one in starting)),
        lead_s=lead_s,
        share=BALANCE,
        slack_s=slack_s,
        turnover=turnover,
    )
    in_flight = knowledge.demand.decoding + knowledge.demand.waiting_tokens / flow.prompt
    rate = history.now.middle**2 / flow.prompt
    prefill_s = flow.prompt * per_token / capacity.share

    def change_cost(new: int) -> float:
        """Seconds of one replica that ``new`` more cost before they are of use."""
        ready = max(1, capacity.ready)
        missed = flood(in_flight / (ready + new), rate, prefill_s, slack_s, new)
        return new * (lead_s + objectives.miss_replica_s * missed)

    hold_s = min(MOST_HELD_S, change_cost(1))
    kept_s = max(KEPT_AFTER_START_S, hold_s) + lead_s

    def start_cost(size: int) -> float:
        return change_cost(size - there) / kept_s if size > there else 0.0

    prompts = _prompts(knowledge, objectives.ttft_s)
    waiting = _waiting(knowledge, prompts, slack_s, capacity.share)
    rise: tuple[Choice, ...] = ()
    keep = 0
    unseen_s = SEEN_LATE * tick_s
    looked_at = ALIKE_OF_MANY if len(knowledge.backlogs) > LEARNT_FROM else KEPT_BINS
    alike = history.alike(history.now, bins_of(lead_s + tick_s + unseen_s), token_s, looked_at)
    for ahead_s in (lead_s, lead_s / 2, 0.0):
        window_s = ahead_s + tick_s + unseen_s
        known = futures(history, alike, capacity, window_s, tick_s, per_token)
        possible = known + _prior(history, capacity, window_s, tick_s, per_token, flow.prompt)
        by_size = misses_by_size(possible, lowest, highest, waiting)
        if not rise:
            rise = tuple(priced(by_size, objectives.miss_replica_s, start_cost))
            keep = cheapest(rise).replicas
        keep = max(keep, cheapest_there(by_size, objectives.miss_replica_s))
    floor = math.ceil(waiting_s / (slack_s + lead_s) - 1e-9)
    if objectives.itl_s is not None:
        most = service.requests_within(objectives.itl_s)
        if most is not None:
            floor = max(floor, math.ceil(knowledge.demand.decoding / most - 1e-9))
    floor = min(floor, highest)
    return Forecast(
        rise=max(floor, cheapest(rise).replicas),
        keep=max(floor, keep),
        floor=floor,
        lead_s=lead_s,
        arriving=history.now.short**2 * token_s,
        waiting_s=waiting_s,
        slack_s=slack_s,
        alike=len(alike),
        choices=rise,
        hold_s=hold_s,
        limit=limit,
        prompts=prompts,
    )


def _prior(
    history: History, capacity: Capacity, window_s: float, tick_s: float, per_token: float, prompt: float
) -> list[Future]:
    """What may come when little is on record: as much as now, twice, four times; a burst out of silence."""
    now = history.now
    weight = PRIOR_WEIGHT * PRIOR_FADES_S / (PRIOR_FADES_S + history.bins)
    token_s = per_token if capacity.turnover is None else max(per_token, capacity.turnover.request_s / prompt)
    rate = max(now.short, now.middle) ** 2 * token_s
    silent_s = 2.0**now.silence
    burst = weight * min(1.0, window_s / PRIOR_BURST_EVERY_S) * min(1.0, PRIOR_BURST_EVERY_S / silent_s)
    requests, prefill = 1 / (prompt * token_s), per_token / token_s
    rates = [(factor * rate, share * weight) for factor, share in ((1, 0.6), (2, 0.3), (4, 0.1))]
    rates.append((rate + PRIOR_BURST, burst))
    work = [(busy * prefill, busy * requests, likely) for busy, likely in rates]
    return supposed(work, capacity, window_s, tick_s)
