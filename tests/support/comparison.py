"""Rows of a comparison, made up, and pieces of work for processes."""

from __future__ import annotations

import os
import signal
from typing import Any

import msgspec

from dynamo_snapshot.errors import SnapshotError
from dynamo_snapshot.model import Reason
from dynamo_snapshot.replay.comparison.rows import Row, Start, family

PLAIN = Row(
    trace="code",
    half="first",
    policy="snapshot",
    knob="",
    start=Start.RESTORE,
    startup="restore-2s",
    restore_s=2.0,
    cold_s=45.0,
    seed=0,
    requests=100,
    ttft_attainment=0.97,
    itl_attainment=1.0,
    both_attainment=0.97,
    ttft_p50_s=0.3,
    ttft_p95_s=1.1,
    ttft_p99_s=2.2,
    gpu_hours=3.4,
    scalings=10,
)


def row(policy: str, attainment: float, hours: float, **others: Any) -> Row:
    """A row of ``policy`` (a spec); the rest is that of one fixed run unless told."""
    name, knob = family(policy)
    changes = {"policy": name, "knob": knob, "ttft_attainment": attainment, "gpu_hours": hours}
    return msgspec.structs.replace(PLAIN, **(changes | others))


def double(piece: int) -> int:
    return 2 * piece


def refuse(piece: int) -> int:
    if piece == 3:
        raise SnapshotError(Reason.CONFIGURATION_INVALID, "three", "Take four.")
    return piece


def die(piece: int) -> int:
    if piece == 3:
        os.kill(os.getpid(), signal.SIGKILL)
    return piece


def threads(piece: int) -> int:
    """How many threads this process has once numpy has multiplied matrices."""
    import numpy as np

    square = np.ones((400, 400)) @ np.ones((400, 400))
    return len(os.listdir("/proc/self/task")) if square[0, 0] == 400 else 0
