"""What an engine's metrics tell at a moment: forward passes as Dynamo's vLLM scheduler publishes them.

A message is published at the end of each pass, before the next one is planned, and each second while idle. So what
is told is always a little old: a pass that is running has not been told yet.
"""

from __future__ import annotations

from collections.abc import Iterable

from dynamo_snapshot.replay.simulation.engine import HEARTBEAT_S, NOTHING, Engine
from dynamo_snapshot.replay.simulation.job import Job
from planner.observation import EngineSample


def sample(engine: Engine, worker_id: str, now: float) -> EngineSample:
    """The newest metrics published at ``now``; those of an idle engine are empty."""
    over = engine.over(now)
    newest, sequence = engine.newest, engine.passes + over
    batch = engine.batch
    if over:
        decoding = len(batch.decoding)
        newest = (None, 0, 0, 0, decoding, batch.context + decoding * (over - 1))
    elif engine.idle:
        heartbeats = int((now - engine.began_at) / HEARTBEAT_S)
        sequence += heartbeats
        newest = NOTHING if heartbeats else newest
    seconds, prompts, tokens, computed, decoding, context = newest
    queued, queued_tokens = _queued(engine, over)
    return EngineSample(
        worker_id=worker_id,
        dp_rank=0,
        sequence=sequence,
        running=float(prompts + decoding),
        queued=float(queued),
        pass_s=engine.times.decode(context) if seconds is None else seconds,
        prefill_tokens=float(tokens),
        prefill_kv_tokens=float(computed),
        decode_requests=float(decoding),
        decode_kv_tokens=float(context),
        queued_tokens=float(queued_tokens),
    )


def busy_s(engine: Engine, now: float) -> float:
    """Seconds in forward passes so far."""
    return engine.busy_before if engine.idle else engine.busy_before + now - engine.began_at


def _queued(engine: Engine, over: int) -> tuple[int, int]:
    """Requests that waited for their prompt to be begun when the newest metrics were published, and their tokens."""
    if engine.shares_queue:
        return 0, 0
    waiting: Iterable[Job] = engine.batch.waiting
    if not over:
        began_at = engine.began_at
        waiting = [job for job in (*engine.batch.begun, *waiting) if job.arrived_s < began_at]
    tokens = [job.prompt + job.given for job in waiting]
    return len(tokens), sum(tokens)
