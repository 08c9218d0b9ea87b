"""Signals for tests of scaling policies: a quiet pool unless a test says otherwise."""

from __future__ import annotations

from typing import Any

from dynamo_snapshot.replay.simulation.signals import Signals
from planner.observation import EngineSample, Observation


def signals(now: float, ready: int = 1, **changes: Any) -> Signals:
    """One tick; the target is what is there, and every ready replica tells metrics of an idle engine."""
    there: dict[str, Any] = {"starting": 0, "draining": 0, **changes}
    there.setdefault("target", ready + there["starting"])
    quiet = Observation(ready, tuple(sample(str(number)) for number in range(ready)))
    observation = there.pop("observation", quiet)
    return Signals(now=now, ready=ready, observe=lambda: observation, **there)


def sample(worker_id: str, **changes: Any) -> EngineSample:
    """Forward-pass metrics of an idle engine, with ``changes``."""
    values: dict[str, Any] = {
        "sequence": 1,
        "running": 0.0,
        "queued": 0.0,
        "pass_s": 0.0,
        "prefill_tokens": 0.0,
        "prefill_kv_tokens": 0.0,
        "decode_requests": 0.0,
        "decode_kv_tokens": 0.0,
        "queued_tokens": 0.0,
    }
    return EngineSample(worker_id, 0, **{**values, **changes})
