"""What binds an engine besides prefill: how many requests it runs at once, and how long each stays.

Requests that wait while a pass prefills nothing wait for something else: a slot (``max_num_seqs``) or room in the
KV cache. How many run in such a *stall* is what the engine holds, and whichever of requests and KV tokens stands
still over stalls is its limit. A request stays for its answer's decode steps and for the prompts that are
prefilled meanwhile (Little's law), so ``slots`` divided by that time is what a replica takes a second.

A limit is believed once stalls were the rule where requests had been waiting before: in a single pass requests
also wait because they came during it. It grows at once when more are seen running, and fades unless confirmed.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import NamedTuple

from planner.load import Step
from planner.service import Service

KNOWN_STALLS, FORGOTTEN_STALLS = 2.5, 1.0
"""Stalls on record from which a limit is believed, and below which it is not any more."""
RULE, EXCEPTION = 0.3, 0.1
"""Of the passes without prefill after which requests might wait on, the share that must be stalls, and the one below
which a limit is not believed any more."""
SUSPECTED = 0.5
"""Stalls and crowds from which a limit is suspected."""
CROWD = 4.0
"""So many do not come during a single pass, as a rule; but some clients send many requests at once."""
KEEP_STALLS = 60.0
"""After so many newer stalls, an old one counts 1/e."""
FADES_S = 600.0
"""After so many seconds without stalls, those on record count 1/e."""
KEEP_PREFILLS = 80.0
"""After so many newer passes with prefill, an old one counts 1/e in the length of answers."""
PRIOR_REQUESTS = 20.0
"""For how many requests the first guess of that length counts."""
KEEP_PROMPTS = 300.0
"""After so many newer prompts that waited, an old one counts 1/e in their mean."""
FULL = 0.75
"""Of the most requests or tokens that were seen at once, what an engine has that is full."""


class Limit(NamedTuple):
    """What a replica holds, and how fast it turns over."""

    slots: float
    """Requests that run at once."""
    residence_s: float
    """How long each stays when all slots are taken."""

    @property
    def request_s(self) -> float:
        """Replica-seconds that one request takes."""
        return self.residence_s / self.slots


@dataclass(frozen=True)
class Slots:
    """Forgetful sums over stalls, and over all passes of busy engines."""

    believed: bool = False
    stalls: float = 0.0
    chances: float = 0.0
    """Stalls, and passes of full engines without prefill after which nothing waits any more."""
    crowds: float = 0.0
    """At this tick alone: such passes after which so many wait, where nothing had waited, that it may be a stall."""
    running: float = 0.0
    running_squares: float = 0.0
    tokens: float = 0.0
    """Of KV cache in use; as ``running``, summed over stalls."""
    token_squares: float = 0.0
    most: float = 0.0
    """Requests that were seen running at once."""
    most_tokens: float = 0.0
    """Tokens of KV cache that were seen in use."""
    decoded: float = 0.0
    """Tokens that engines decoded, and prompt tokens that they prefilled in that time."""
    prefilled: float = 0.0
    prompts: float = 0.0
    """That waited, with their tokens."""
    prompt_tokens: float = 0.0
    debt: float = 0.0
    """Requests that were counted too early."""

    @property
    def suspected(self) -> bool:
        """Whether something may bind that is not known yet."""
        return not self.believed and self.stalls + self.crowds >= max(SUSPECTED, RULE * (self.chances + self.crowds))

    def limit(self, service: Service, answer: float) -> Limit | None:
        """What binds besides prefill; None: nothing that is known.

        Args:
            answer: first guess of the tokens that are decoded for a request.
        """
        if not self.believed or not service.known:
            return None
        slots = max(1.0, self._held(service))
        base, slope = self._residence(service, answer)
        residence_s = base + slope * slots
        return Limit(slots, residence_s) if residence_s > 0 else None  # engines that tell nothing of decoding

    def arrivals(self, steps: Iterable[Step], elapsed_s: float, service: Service, answer: float) -> tuple[float, Slots]:
        """Requests that came in ``elapsed_s``: as many as there are more now, and as many as left since.

        Needs :meth:`limit`.
        """
        came = self.debt
        base, slope = self._residence(service, answer)
        for before, after, _ in steps:
            running = after.running or 0.0
            came += running + (after.queued or 0.0)
            if before is None:
                continue
            came -= _count(before.running) + _count(before.queued)
            if running:
                # Its newest pass may be an idle engine's last one.
                busy_s = min(elapsed_s, (after.sequence - before.sequence) * (after.pass_s or 0.0))
                came += running * busy_s / (base + slope * running)
        return max(0.0, came), replace(self, debt=min(0.0, came))

    def _residence(self, service: Service, answer: float) -> tuple[float, float]:
        """How long a request stays: seconds, and seconds for each that runs."""
        base, slope = service.decode_line()
        context = service.contexts / service.requests if service.requests else 0.0
        if not self.prompt_tokens:  # all that ever waited had been prefilled before: it was preempted
            return answer * base, answer * slope * context
        prompt = self.prompt_tokens / self.prompts
        decodes = (self.decoded + PRIOR_REQUESTS * answer) / (self.prefilled / prompt + PRIOR_REQUESTS)
        return decodes * base, decodes * slope * context + prompt * service.second_per_token

    def _held(self, service: Service) -> float:
        mean, mean_tokens = self.running / self.stalls, self.tokens / self.stalls
        unsteady = self.running_squares / self.stalls / mean**2
        if mean_tokens and service.contexts and self.token_squares / self.stalls / mean_tokens**2 < unsteady:
            return mean_tokens * service.requests / service.contexts
        return max(mean, self.most)


def _count(value: float | None) -> float:
    """Of the tick before; what could not be read then counts as nothing."""
    return value if value is not None and 0 <= value < math.inf else 0.0


def learn(slots: Slots, steps: Iterable[Step], elapsed_s: float, service: Service) -> Slots:
    """Returns what is known with the newest pass of each engine, ``elapsed_s`` after the ones before.

    A pass is the newest one at a tick with the chance that its successor is running then, so each that prefilled
    stands for as many as would fit between two ticks if all were as long as that.
    """
    base, slope = service.decode_line()
    stalls = chances = crowds = running_sum = running_squares = tokens = token_squares = 0.0
    prefills = decoded = prefilled = prompts = prompt_tokens = 0.0
    most, most_tokens = slots.most, slots.most_tokens
    for before, after, unchanged_s in steps:
        chunk, queued = after.prefill_tokens, after.queued
        if before is None or unchanged_s > 0 or not after.pass_s or chunk is None:
            continue
        running, passes = after.running or 0.0, after.sequence - before.sequence
        held = (after.decode_kv_tokens or 0.0) + (after.prefill_kv_tokens or 0.0) + chunk
        if running > most:
            most = running
        if held > most_tokens:
            most_tokens = held
        if queued and after.queued_tokens:  # else only preempted ones wait
            prompts += queued
            prompt_tokens += after.queued_tokens
        if passes <= 0:
            continue
        decoded += passes * (after.decode_requests or 0.0)
        if chunk:
            prefills += 1
            next_s = max(base + slope * held, min(elapsed_s / passes, after.pass_s))
            prefilled += chunk * elapsed_s / next_s
            continue
        if running < FULL * most and held < FULL * most_tokens:
            continue
        if not running or queued == 1:
            continue
        if _count(before.queued):
            chances += 1
            if queued:
                stalls += 1
                running_sum += running
                running_squares += running * running
                tokens += held
                token_squares += held * held
        elif queued and queued >= CROWD:
            crowds += 1
    keep = math.exp(-elapsed_s / FADES_S) * KEEP_STALLS / (KEEP_STALLS + stalls)
    keep_prefills = KEEP_PREFILLS / (KEEP_PREFILLS + prefills)
    keep_prompts = KEEP_PROMPTS / (KEEP_PROMPTS + prompts)
    known, could = slots.stalls * keep + stalls, slots.chances * keep + chances
    least, share = (FORGOTTEN_STALLS, EXCEPTION) if slots.believed else (KNOWN_STALLS, RULE)
    running_sum += slots.running * keep
    tokens += slots.tokens * keep
    if known:
        # Engines that hold less than others before them: what those held fades with each stall.
        fades = stalls / KEEP_STALLS
        most -= max(0.0, most - running_sum / known) * fades
        most_tokens -= max(0.0, most_tokens - tokens / known) * fades
    return Slots(
        believed=known >= least and known >= share * could,
        stalls=known,
        chances=could,
        crowds=crowds,
        running=running_sum,
        running_squares=slots.running_squares * keep + running_squares,
        tokens=tokens,
        token_squares=slots.token_squares * keep + token_squares,
        most=most,
        most_tokens=most_tokens,
        decoded=slots.decoded * keep_prefills + decoded,
        prefilled=slots.prefilled * keep_prefills + prefilled,
        prompts=slots.prompts * keep_prompts + prompts,
        prompt_tokens=slots.prompt_tokens * keep_prompts + prompt_tokens,
        debt=slots.debt,
    )
