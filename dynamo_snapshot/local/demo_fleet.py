"""The bundled fleet: Dynamo's mocker behind our hooks, with a simulated boot and real memory, and its load."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from dynamo_snapshot.config import Fleet
from dynamo_snapshot.local.ports import free_port
from dynamo_snapshot.replay.trace import TraceRequest, bundled_trace, faster, read_trace, scaled

MODEL = "tiny"
MAX_REPLICAS = 6
INPUT_SCALE = 0.25
"""Prompts are shortened so that the frontend's tokenizer leaves the two cores to the restores."""
DECODE_SPEEDUP = 0.12
TOKEN_MS = 50
"""What a token of the mocker takes at that speed, about: as a large model's, so that the trace needs replicas."""
CONTROL_RUN_S = 45.0
"""How much of the load a run with the gate off replays: enough for a scale-out."""


@dataclass(frozen=True)
class DemoOptions:
    """What the command line may change."""

    trace: Path | None = None
    """None: seconds 1060 to 1345 of the Azure 2023 code trace."""
    speed: float = 2.0
    boot_seconds: float = 8.0
    resident_mib: int = 300
    gated: bool = True


def demo_fleet(options: DemoOptions, folder: Path) -> Fleet:
    """The fleet, with everything of it in ``folder``."""
    environment = {
        "MOCKER_BOOT_SECONDS": f"{options.boot_seconds:g}",
        "MOCKER_RESIDENT_MIB": str(options.resident_mib),
    }
    if not options.gated:
        environment["DYNAMO_SNAPSHOT_GATE"] = "off"
    command = [
        "dynamo-snapshot-worker", "run", "--", "python", "-m", "dynamo.mocker",
        "--model-path", "{model_path}", "--model-name", "{model_name}",
        "--decode-speedup-ratio", f"{DECODE_SPEEDUP:g}",
    ]  # fmt: skip
    return Fleet.model_validate(
        {
            "name": "demo",
            "model": {"name": MODEL, "path": folder / "model"},
            "pools": {
                "decode": {
                    "worker": {"command": command, "environment": environment},
                    "max_replicas": MAX_REPLICAS,
                    # An ungated worker is in discovery from its first second on: it can never be captured.
                    "snapshot": {"capture": "first-worker" if options.gated else "never"},
                }
            },
            "agent": {
                "runtime_dir": folder / "run",
                "store_dir": folder / "snapshots",
                # More at once than there are processors only makes each of them later.
                "max_concurrent_restores": len(os.sched_getaffinity(0)),
            },
            "frontend": {"port": free_port()},
            "planner": {"scale_down_after_s": 12.0},
        }
    )


def demo_load(options: DemoOptions) -> Sequence[TraceRequest]:
    """The requests of a run, at its speed."""
    requests = bundled_trace() if options.trace is None else read_trace(options.trace)
    replayed = scaled(faster(requests, options.speed), INPUT_SCALE, 1.0)
    return replayed if options.gated else [request for request in replayed if request.offset_s < CONTROL_RUN_S]


def describe(options: DemoOptions) -> str:
    """What a reader must know to judge the figures."""
    trace = (
        "seconds 1060 to 1345 of the Azure 2023 code trace (Azure Public Dataset, CC-BY-4.0)"
        if options.trace is None
        else f"the trace {options.trace.name}"
    )
    return (
        "The engine is Dynamo's mocker behind this project's worker hooks: its tokens are simulated, "
        f"each takes about {TOKEN_MS} ms, its boot of "
        f"{options.boot_seconds:g} s is simulated, and its {options.resident_mib} MiB of memory are real, digested at "
        "boot and checked by every self-test. Frontend, planner, etcd, NATS and CRIU are real. The load is "
        f"{trace}, replayed at ×{options.speed:g} with prompts shortened to {INPUT_SCALE:.0%}."
    )
