"""From Dynamo's PipelineContext to what the policy sees.

Reads by attribute, so the pydantic mirror of an in-process plugin and the protobuf message of an
external one will do alike, in every Dynamo version with plugin protocol 1.0 (1.3 to 1.6). The
forward-pass metrics are decoded here, field by field: a message of another schema version, or one
that does not decode, is an unknown sample and not an absent worker.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from planner.observation import EngineSample, Observation, PoolView, Role

FPM_VERSION = 1
"""``dynamo.common.forward_pass_metrics.FPM_VERSION``; a test holds the two together."""
MOST = 2.0**53
"""Of anything that an engine tells: what is more is no amount but, say, a counter that ran below zero."""


def observation(context: Any, role: Role, pool: PoolView | None = None) -> Observation:
    """Returns what ``context`` says of ``role``; whatever it lacks is unknown."""
    observations = _optional(context, "observations")
    workers = _optional(observations, "workers")
    ready = _optional(workers, f"ready_{role.value}")
    fpm = _optional(observations, "fpm")
    engines: Mapping[str, bytes] = getattr(fpm, f"{role.value}_engines", None) or {}
    return Observation(
        ready=None if ready is None else int(ready),
        samples=tuple(engine_sample(key, engines[key]) for key in sorted(engines)),
        pool=pool,
    )


def ids(context: Any) -> dict[str, str]:
    """The tick's and the decision's id in Dynamo's own audit; what is missing is left out."""
    return {name: str(value) for name in ("request_id", "decision_id") if (value := getattr(context, name, None))}


def engine_sample(key: str, message: bytes) -> EngineSample:
    """Decodes one entry of Dynamo's FpmData: ``key`` is ``"<worker id>/<dp rank>"``."""
    worker_id, _, rank = key.partition("/")
    dp_rank = int(rank) if rank.isdigit() else 0
    try:
        content = msgspec.msgpack.decode(message)
    except msgspec.DecodeError:
        content = None
    if not isinstance(content, dict) or content.get("version", FPM_VERSION) != FPM_VERSION:
        return EngineSample(worker_id, dp_rank, sequence=0, running=None, queued=None)
    sequence = content.get("counter_id", 0)
    scheduled, waiting = content.get("scheduled_requests", {}), content.get("queued_requests", {})
    return EngineSample(
        worker_id,
        dp_rank,
        sequence=sequence if isinstance(sequence, int) else 0,
        running=_requests(scheduled),
        queued=_requests(waiting),
        pass_s=_amount(content, "wall_time"),
        prefill_tokens=_amount(scheduled, "sum_prefill_tokens"),
        prefill_kv_tokens=_amount(scheduled, "sum_prefill_kv_tokens"),
        decode_requests=_amount(scheduled, "num_decode_requests"),
        decode_kv_tokens=_amount(scheduled, "sum_decode_kv_tokens"),
        queued_tokens=_amount(waiting, "sum_prefill_tokens"),
    )


def _requests(group: object) -> float | None:
    """Prefill and decode requests of one group, left out counting as none; None where one is not a count."""
    if not isinstance(group, dict):
        return None
    prefill, decode = _amount(group, "num_prefill_requests", 0), _amount(group, "num_decode_requests", 0)
    return None if prefill is None or decode is None else prefill + decode


def _amount(group: object, name: str, missing: float | None = None) -> float | None:
    """A count or duration; None where it is none, and where it is missing: what was not told is unknown, not zero."""
    value = group.get(name, missing) if isinstance(group, dict) else None
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= MOST:
        return None
    return float(value)


def _optional(message: Any, name: str) -> Any:
    """``message.name``, or None where it is unset: pydantic says None, protobuf HasField."""
    if message is None:
        return None
    if hasattr(message, "HasField"):
        return getattr(message, name) if message.HasField(name) else None
    return getattr(message, name, None)
