"""How long the policy takes to decide, with the garbage collector as Python runs it.

    python tests/bench/bench_decide.py [--engines 1000] [--ticks 400] [--objects 190000] [--walked] [--slots]
        [--wall] [--learnt FILE] [--pause 0.05]

The record is half an hour long and the heap holds as many objects as that of Dynamo 1.6.1's planner. Prints one line
of JSON: milliseconds of a decision (p50, p99, most), and the same for making the observation, where most of the
collector's work falls. With ``--learnt`` what is learnt is written every 30 ticks, as at one a second; what its thread
takes from a decision shows on the wall clock alone, as does all else that the machine does. ``machine_ms`` is what a
loop that always does the same takes in between: how far its p99 is from its p50 is the machine's part.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from planner.collector import set_aside_what_stays
from planner.history import KEPT_BINS
from planner.joint import JointPolicy, RoleMemory
from planner.learnt_file import LearntFile
from planner.observation import EngineSample, Observation, PoolView, Role
from planner.policy import LoadPolicy, Memory

POLICY = LoadPolicy(ttft_objective_s=1.5, itl_objective_s=0.2, max_replicas=2000)
SAME = 100_000
STARTS = {"restore": (2.0, 2.1, 1.9, 2.3, 2.0, 1.8, 2.2, 2.0)}


def observation(engines: int, tick: int, dice: random.Random, slots: bool) -> Observation:
    """Engines in the middle of a busy minute: some prefill, some decode, some have a queue, one in eight is idle."""
    samples = tuple(sample(str(number), tick, dice, slots) for number in range(engines))
    return Observation(engines, samples, PoolView(engines, engines, start_times=STARTS))


def sample(name: str, tick: int, dice: random.Random, slots: bool) -> EngineSample:
    if dice.random() < 0.125:
        return EngineSample(name, 0, tick, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0)
    decoding = float(8 if slots else dice.randint(1, 12))
    chunk = 0.0 if dice.random() < 0.6 else float(dice.randint(200, 4000))
    queued = float(dice.randint(2, 5) if slots else dice.choice((0, 0, 0, 1, 2)) * (chunk > 0))
    pass_s = 0.02 + 8e-5 * chunk + 1e-6 * 1500 * decoding
    return EngineSample(
        name, 0, tick * 9, decoding + (chunk > 0), queued, pass_s, chunk, 0.0, decoding, 1500 * decoding, 2000 * queued
    )


def measure(
    engines: int, ticks: int, slots: bool, clock: Callable[[], float], learnt: LearntFile, pause_s: float
) -> dict[str, dict[str, float]]:
    """Milliseconds of ``ticks`` decisions, after half an hour of the same load: all moments on record are alike."""
    joint = JointPolicy({Role.DECODE: POLICY})
    dice = random.Random(1)
    memory = Memory()
    now = 0
    for _ in range(KEPT_BINS + 10):
        now += 1
        _, memory = POLICY.decide(observation(engines, now, dice, slots), memory, float(now))
    decided, seen, same = [], [], []
    for _ in range(ticks + 10):
        now += 1
        time.sleep(pause_s)
        began = clock()
        shown = observation(engines, now, dice, slots)
        there = clock()
        _, memory = POLICY.decide(shown, memory, float(now))
        learnt.keep(joint, {Role.DECODE: RoleMemory(memory)}, float(now), time.time())
        decided.append(1000 * (clock() - there))
        seen.append(1000 * (there - began))
        began = clock()
        sum(map(abs, range(SAME)))
        same.append(1000 * (clock() - began))
    return {
        "decide_ms": figures(decided[10:]),
        "observation_ms": figures(seen[10:]),
        "machine_ms": figures(same[10:]),
    }


def figures(took: Sequence[float]) -> dict[str, float]:
    ordered = sorted(took)
    shares = {"p50": ordered[len(ordered) // 2], "p99": ordered[int(0.99 * len(ordered))], "most": ordered[-1]}
    return {name: round(value, 2) for name, value in shares.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--engines", type=int, default=1000)
    parser.add_argument("--ticks", type=int, default=400)
    parser.add_argument("--objects", type=int, default=190_000, help="that the collector walks besides")
    parser.add_argument("--walked", action="store_true", help="the collector walks the heap at each full collection")
    parser.add_argument("--slots", action="store_true", help="engines whose slots bind")
    parser.add_argument("--wall", action="store_true", help="by the wall clock, not by this thread's own")
    parser.add_argument("--learnt", type=Path, help="write what is learnt there")
    parser.add_argument("--pause", type=float, default=0.0, help="seconds before each observation")
    options = parser.parse_args()
    heap = [[number] for number in range(options.objects)]
    if not options.walked:
        set_aside_what_stays()
    clock = time.perf_counter if options.wall else time.thread_time
    learnt = LearntFile(options.learnt)
    row = measure(options.engines, options.ticks, options.slots, clock, learnt, options.pause)
    setting = {"engines": options.engines, "objects": len(heap), "slots": options.slots, "wall": options.wall}
    print(json.dumps({**setting, "learnt": options.learnt is not None, **row}))


if __name__ == "__main__":
    main()
