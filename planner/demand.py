"""What came in since the tick before, inferred from the newest forward pass of each engine.

Engines tell only their newest pass, so what the others held is inferred, by conservation:

* an engine that had prompts waiting spent what its decode steps left of the time on prefilling them;
* an engine without a queue decodes, and prefilled as many requests as it has more now, and as many more as it
  has finished since: tokens decoded divided by the tokens of a request.

The queues of prompt tokens are told exactly, so what is wrong here is made good as soon as work piles up.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from planner.load import Step
from planner.service import Service

HEARTBEAT_S = 1.25
"""Idle engines tell so once a second; one that has been silent for longer is in a long pass."""
KEEP_REQUESTS = 300.0
"""After so many newer requests, an old one counts 1/e in the means of prompts and answers."""
STEADY = 3.0
"""An engine that decodes so many requests at both ticks was not idle in between."""
PRIOR_REQUESTS = 5.0
PRIOR_OUTPUT_TOKENS = 64.0


@dataclass(frozen=True)
class Flow:
    """What requests are like: forgetful sums. ``debt`` is demand counted too early, in prompt tokens."""

    prompts: float = 0.0
    prompt_tokens: float = 0.0
    answers: float = PRIOR_REQUESTS
    """Requests known to have come, and tokens decoded: more requests came, so their quotient is too high."""
    answer_tokens: float = PRIOR_REQUESTS * PRIOR_OUTPUT_TOKENS
    pressed_answers: float = PRIOR_REQUESTS
    """The same while prompts queued: most of what came then is decoded later, so their quotient is too low."""
    pressed_tokens: float = PRIOR_REQUESTS * PRIOR_OUTPUT_TOKENS
    debt: float = 0.0

    @property
    def prompt(self) -> float:
        """Mean prompt tokens; 0 while unknown."""
        return self.prompt_tokens / self.prompts if self.prompts else 0.0

    @property
    def answer(self) -> float:
        """Mean tokens decoded for a request: the middle of the two bounds."""
        most, least = self.answer_tokens / self.answers, self.pressed_tokens / self.pressed_answers
        return max(1.0, math.sqrt(most * min(most, least)))


@dataclass(frozen=True)
class Demand:
    """What arrived in the time since the tick before, and what waits now."""

    tokens: float = 0.0
    requests: float = 0.0
    waiting_tokens: float = 0.0
    decoding: float = 0.0
    """Requests that decode now."""


def infer(steps: Iterable[Step], elapsed_s: float, service: Service, flow: Flow) -> tuple[Demand, Flow]:
    """Returns the demand of the last ``elapsed_s`` seconds and what requests are like with it.

    Needs ``service.known``.
    """
    base, slope = service.decode_line()
    per_token = service.second_per_token
    prompt, answer = flow.prompt, flow.answer
    tokens = waiting = decoding = 0.0
    seen_prompts = seen_tokens = 0.0
    answers = answer_tokens = pressed_answers = pressed_tokens = 0.0
    for before, after, unchanged_s in steps:
        queued_tokens = after.queued_tokens or 0.0
        decodes = after.decode_requests or 0.0
        context = after.decode_kv_tokens or 0.0
        waiting += queued_tokens
        decoding += decodes
        queued = after.queued
        if queued and queued_tokens:  # else only preempted ones wait
            seen_prompts += queued
            seen_tokens += queued_tokens
        if before is None:
            tokens += queued_tokens + context
            continue
        if after.pass_s == 0 and not queued_tokens and unchanged_s < HEARTBEAT_S:
            continue  # idle for a second: what was queued was prefilled, nothing came
        was_queued = before.queued_tokens or 0.0
        passes = after.sequence - before.sequence
        chunk = (after.prefill_tokens or 0.0) if unchanged_s == 0 else 0.0
        if decodes and not queued_tokens:
            seen_prompts += decodes
            seen_tokens += context
        if before.pass_s == 0 or passes < 0:
            prefilled = max(chunk, context)
            answers += prefilled / prompt if prompt else 0.0
            tokens += ((queued or 0.0) - (before.queued or 0.0)) * prompt + prefilled
            continue
        was_decoding = before.decode_requests or 0.0
        decoded = passes * (decodes + was_decoding) / 2
        queues = (queued_tokens > 0) + (was_queued > 0)
        left = elapsed_s - passes * (base + slope * context)
        if left < 0:
            left = 0.0
        if queues == 2 or decodes >= STEADY <= was_decoding or (passes == 0 and unchanged_s > HEARTBEAT_S):
            prefilled = left / per_token
            certain = prefilled
            if prompt:
                pressed_answers += certain / prompt
                pressed_tokens += decoded
        elif queues:
            prefilled = max(chunk, left / per_token / 2)
            certain = prefilled
        else:
            more = decodes - was_decoding
            certain = max(chunk, more * prompt)
            prefilled = min(max(certain, (more + decoded / answer) * prompt), left / per_token)
        if prompt:
            answers += certain / prompt
            answer_tokens += decoded
        tokens += (queued or 0.0) * prompt - (before.queued or 0.0) * prompt + prefilled
    keep = KEEP_REQUESTS / (KEEP_REQUESTS + seen_prompts)
    keep_answers = KEEP_REQUESTS / (KEEP_REQUESTS + answers)
    keep_pressed = KEEP_REQUESTS / (KEEP_REQUESTS + pressed_answers)
    total = tokens + flow.debt
    flow = Flow(
        prompts=flow.prompts * keep + seen_prompts,
        prompt_tokens=flow.prompt_tokens * keep + seen_tokens,
        answers=flow.answers * keep_answers + answers,
        answer_tokens=flow.answer_tokens * keep_answers + answer_tokens,
        pressed_answers=flow.pressed_answers * keep_pressed + pressed_answers,
        pressed_tokens=flow.pressed_tokens * keep_pressed + pressed_tokens,
        debt=min(0.0, total) / 2,
    )
    arrived = max(0.0, total)
    return Demand(arrived, arrived / flow.prompt if flow.prompt else 0.0, waiting, decoding), flow
