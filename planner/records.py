"""Decision records: one line of JSON a tick and role, with what was seen, what was predicted and the reason.

A log can be decided anew: each run, from the plugin's start or reset to the next, begins with a line that holds
the policy and what it remembers (:func:`beginning`), and so does each file that a run goes on in, and what follows
lines that could not be written. Each record has its run, its tick and the whole observation, and
:func:`read_observation` and the record's ``now`` are what ``decide`` was given. NaN and infinity, which JSON does not
know, come back as None; the policy takes all three for unreadable.
"""

from __future__ import annotations

import base64
import logging
import math
import os
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import msgspec

from dynamo_snapshot.model import PoolHint
from planner.forecast import Forecast
from planner.joint import JointPolicy, Memories, RoleMemory
from planner.observation import EngineSample, Observation, PoolView, Role, Starting
from planner.policy import Proposal
from planner.source import code

log = logging.getLogger(__name__)

MAX_BYTES = 64 << 20
"""At this size the file is moved to ``<name>.1``, replacing an older one."""
_NUMBERS = (
    "running",
    "queued",
    "pass_s",
    "prefill_tokens",
    "prefill_kv_tokens",
    "decode_requests",
    "decode_kv_tokens",
    "queued_tokens",
)
"""Fields of a sample after its identity and sequence number, in the order in which a record holds them."""


def beginning(at: float, run: str, policy: JointPolicy, memories: Memories, tick: int = 0) -> dict[str, Any]:
    """The line before the first decisions of ``run`` in a file: the policy, the digest of its code, what it remembers.

    Args:
        at: wall-clock seconds.
        memories: before those decisions; fresh ones are left out.
        tick: of the decisions before, which are elsewhere; 0: there were none.
    """
    begins: dict[str, Any] = {"code": code(), "policy": policy.plain()}
    if tick or memories != policy.fresh():
        # Times that never were are minus infinity, which JSON does not know; nor does msgspec read-only mappings.
        packed = msgspec.msgpack.encode(memories, enc_hook=dict)
        begins |= {"tick": tick, "memories": base64.b64encode(packed).decode()}
    return {"at": at, "run": run, "begins": begins}


def read_beginning(entry: Mapping[str, Any]) -> tuple[JointPolicy, Memories, int]:
    """Returns the policy of a :func:`beginning`, what it remembers, and the tick before; a fresh run's if none is told.

    Raises:
        KeyError, TypeError, ValueError: the line holds no such thing.
    """
    begins = entry["begins"]
    policy = JointPolicy.of(**begins["policy"])
    if "memories" not in begins:
        return policy, policy.fresh(), 0
    packed = base64.b64decode(begins["memories"], validate=True)
    memories = msgspec.msgpack.decode(packed, type=dict[Role, RoleMemory])
    if memories.keys() != policy.policies.keys():
        raise ValueError(f"it remembers {', '.join(sorted(memories)) or 'nothing'}")
    return policy, memories, int(begins["tick"])


def record(
    at: float,
    observation: Observation,
    proposal: Proposal,
    *,
    now: float | None = None,
    run: str = "",
    tick: int = 0,
    hint: PoolHint | None = None,
    ids: Mapping[str, str] = MappingProxyType({}),
) -> dict[str, Any]:
    """One decision as JSON-ready values; loads are requests.

    Args:
        at: wall-clock seconds.
        now: the policy's clock.
        run: see :func:`beginning`.
        tick: from 1, without a gap: one that is not there was lost.
        hint: what the fleet was asked to have ready beside; None: nothing.
        ids: what leads on to Dynamo's audit and, through its decision, to orders and instances.
    """
    return {
        "at": at,
        "now": now,
        "run": run,
        "tick": tick,
        **ids,
        "role": proposal.role.value,
        "action": proposal.action.value,
        "replicas": proposal.replicas,
        "floor": proposal.floor,
        "desired": proposal.desired,
        "reason": proposal.reason,
        "ready": observation.ready,
        "running": _plain(proposal.load.running),
        "queued": _plain(proposal.load.queued),
        "fresh_workers": proposal.load.fresh,
        "unknown": list(proposal.load.unknown),
        "forecast": None if proposal.forecast is None else _forecast(proposal.forecast),
        "hint": None if hint is None else {"parked": hint.parked, "prefetch": hint.prefetch},
        "observation": {
            "samples": [_sample(sample) for sample in observation.samples],
            "pool": None if observation.pool is None else _pool(observation.pool),
        },
    }


def read_observation(entry: Mapping[str, Any]) -> Observation:
    """Returns what a record's decision was made from.

    Raises:
        ValueError: the record holds no whole observation, as those of older versions do not.
    """
    try:
        seen = entry["observation"]
        samples = tuple(
            EngineSample(worker, rank, sequence, **dict(zip(_NUMBERS, numbers, strict=True)))
            for worker, rank, sequence, *numbers in seen["samples"]
        )
        return Observation(entry["ready"], samples, None if seen["pool"] is None else _read_pool(seen["pool"]))
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"record at {entry.get('at')} holds no whole observation ({error!r})") from error


def _sample(sample: EngineSample) -> list[Any]:
    numbers = (_plain(getattr(sample, name)) for name in _NUMBERS)
    return [sample.worker_id, sample.dp_rank, sample.sequence, *numbers]


def _forecast(forecast: Forecast) -> dict[str, Any]:
    return {
        "lead_s": forecast.lead_s,
        "demand_replicas": forecast.arriving,
        "waiting_s": forecast.waiting_s,
        "slack_s": forecast.slack_s,
        "hold_s": forecast.hold_s,
        "alike": forecast.alike,
        "slots": None if forecast.limit is None else forecast.limit.slots,
        "residence_s": None if forecast.limit is None else forecast.limit.residence_s,
        "rise": forecast.rise,
        "keep": forecast.keep,
        "candidates": [
            {"replicas": choice.replicas, "misses_per_s": choice.misses, "cost": choice.cost}
            for choice in forecast.choices
        ],
    }


def _pool(pool: PoolView) -> dict[str, Any]:
    return {
        "target": pool.target,
        "achievable": pool.achievable,
        "unachievable_reason": pool.unachievable_reason,
        "not_serving": sorted(pool.not_serving),
        "discovery_known": pool.discovery_known,
        "parked": pool.parked,
        "starting": [[one.way, one.age_s] for one in pool.starting],
        "start_times": {way: list(times) for way, times in pool.start_times.items()},
    }


def _read_pool(entry: Mapping[str, Any]) -> PoolView:
    return PoolView(
        target=entry["target"],
        achievable=entry["achievable"],
        unachievable_reason=entry["unachievable_reason"],
        not_serving=frozenset(entry["not_serving"]),
        discovery_known=entry["discovery_known"],
        parked=entry.get("parked", 0),
        starting=tuple(Starting(way, age_s) for way, age_s in entry["starting"]),
        start_times=MappingProxyType({way: tuple(times) for way, times in entry["start_times"].items()}),
    )


def _plain(value: float | None) -> float | None:
    """JSON knows neither NaN nor infinity."""
    return value if value is not None and math.isfinite(value) else None


class DecisionLog:
    """Appends records to a file; a file that cannot be written is reported once and never stops a decision."""

    def __init__(self, path: Path | None, max_bytes: int = MAX_BYTES) -> None:
        self._path = path
        self._max_bytes = max_bytes
        self._failing = False
        self._before: tuple[int, int, int] | None = None
        """Device, inode and size of the file that holds what was written last; None: none does."""

    @property
    def enabled(self) -> bool:
        return self._path is not None

    @property
    def parted(self) -> bool:
        """Whether what was written last does not stand before the next entry: it was moved away, or is lost."""
        if self._path is None or self._before is None:
            return True
        try:
            there = self._path.stat()
        except OSError:
            return True
        device, inode, size = self._before
        return (there.st_dev, there.st_ino) != (device, inode) or there.st_size < size

    def write(self, *entries: dict[str, Any]) -> None:
        """Appends them, not to be parted by those of another planner."""
        if self._path is None:
            return
        self._before = None
        try:
            data = b"".join(msgspec.json.encode(entry) + b"\n" for entry in entries)
            with self._path.open("a+b") as file:
                if file.tell():
                    file.seek(-1, os.SEEK_END)
                    if file.read(1) != b"\n":  # somebody's last line is torn; the first of these is none of it
                        data = b"\n" + data
                file.write(data)
                file.flush()
                there = os.fstat(file.fileno())
        except (OSError, TypeError, ValueError, OverflowError) as error:
            self._fails("written", error)
            return
        self._before = there.st_dev, there.st_ino, there.st_size
        try:
            if there.st_size >= self._max_bytes and not self.parted:
                self._path.replace(self._path.with_name(self._path.name + ".1"))
        except OSError as error:
            self._fails(f"moved to {self._path.name}.1, and grows", error)
            return
        self._failing = False

    def _fails(self, what: str, error: Exception) -> None:
        if not self._failing:
            log.warning("decision log %s cannot be %s: %s", self._path, what, error)
        self._failing = True
