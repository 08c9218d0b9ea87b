"""`bench planner`: the same load through the same fleet, sized by this project's policy and by Dynamo's own scaling.

Every run has servers of its own. The worker is Dynamo's mocker with room for few requests at once, so that a fleet
that is too small makes requests wait for their first token, as a real engine's does.
"""

from __future__ import annotations

import asyncio
import shutil
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dynamo_snapshot.agent.criu.command import find as find_criu
from dynamo_snapshot.config import CapturePolicy, Fleet, Planner, ScalingPolicy
from dynamo_snapshot.errors import SnapshotError
from dynamo_snapshot.local import host, measures
from dynamo_snapshot.local.demo_fleet import MODEL, DemoOptions, demo_fleet, demo_load
from dynamo_snapshot.local.load_meter import LoadMeter
from dynamo_snapshot.local.processes import DECISION_LOG
from dynamo_snapshot.local.recorder import Record, Recorder
from dynamo_snapshot.local.tiny_model import write_tiny_model
from dynamo_snapshot.local.up import LocalFleet
from dynamo_snapshot.model import OrderKind, OrderStatus, Reason
from dynamo_snapshot.replay.chat import Endpoint
from dynamo_snapshot.replay.load import LoadGenerator
from dynamo_snapshot.replay.records import RequestRecord

POOL = "decode"
ENGINE_LIMITS = (
    "--max-num-seqs", "8", "--num-gpu-blocks-override", "256", "--no-enable-prefix-caching",
    "--decode-speedup-ratio", "0.3",
)  # fmt: skip
"""Eight requests at once, 20 to 50 ms a token: six replicas carry the trace's steepest burst, one does not."""
READY_S = 120.0
FIRST_TICK = b"[summary]"
"""What Dynamo's planner logs at the end of each of its ticks."""

Say = Callable[[str], None]


@dataclass(frozen=True)
class Objectives:
    """What a request is to get. Seconds."""

    ttft_s: float = 1.0
    itl_s: float = 0.1


@dataclass(frozen=True)
class Contender:
    """One way to size the fleet, and to start its replicas."""

    name: str
    policy: ScalingPolicy
    restores: bool = True

    def applied(self, fleet: Fleet, objectives: Objectives) -> Fleet:
        pool = fleet.pools[POOL]
        capture = CapturePolicy.FIRST_WORKER if self.restores else CapturePolicy.NEVER
        worker = pool.worker.model_copy(update={"command": (*pool.worker.command, *ENGINE_LIMITS)})
        snapshot = pool.snapshot.model_copy(update={"capture": capture})
        return fleet.model_copy(
            update={
                "pools": {POOL: pool.model_copy(update={"worker": worker, "snapshot": snapshot})},
                "planner": Planner(
                    policy=self.policy, ttft_objective_s=objectives.ttft_s, itl_objective_s=objectives.itl_s
                ),
            }
        )


CONTENDERS = (
    Contender("snapshot", ScalingPolicy.SNAPSHOT),
    Contender("dynamo-latency", ScalingPolicy.DYNAMO_LATENCY),
    Contender("dynamo-throughput", ScalingPolicy.DYNAMO_THROUGHPUT),
    Contender("dynamo-latency, cold starts", ScalingPolicy.DYNAMO_LATENCY, restores=False),
)


async def compare(options: DemoOptions, objectives: Objectives, contenders: Sequence[Contender], say: Say) -> Any:
    """Runs every contender once, one after the other, and returns what ``--json`` writes."""
    rows = []
    for contender in contenders:
        say(f"{contender.name}:")
        rows.append({"planner": contender.name, **await _run(options, objectives, contender, say)})
    return {
        "what": "One load through one fleet a planner. GPU-seconds count each replica from its order until it has "
        "exited, while the load ran. The engine is Dynamo's mocker, eight requests at once; its boot of "
        f"{options.boot_seconds:g} s is simulated, frontend, planner, etcd, NATS and CRIU are real.",
        "trace": "seconds 1060 to 1345 of the Azure 2023 code trace" if options.trace is None else options.trace.name,
        "trace_speed": options.speed,
        "objectives": {"ttft_s": objectives.ttft_s, "itl_s": objectives.itl_s},
        "rows": rows,
        "environment": host.environment(find_criu(None)),
    }


async def _run(options: DemoOptions, objectives: Objectives, contender: Contender, say: Say) -> dict[str, Any]:
    folder = Path(tempfile.mkdtemp(prefix="dynamo-snapshot-bench-"))
    fleet = contender.applied(demo_fleet(options, folder), objectives)
    local = LocalFleet(fleet, say)
    generator = LoadGenerator(demo_load(options), Endpoint(local.frontend_url, MODEL))
    meter = LoadMeter(generator, lambda: local.supervisor.pid("frontend"))
    try:
        write_tiny_model(fleet.model.path)
        await local.start_servers()
        pool = fleet.pools[POOL]
        prefix = f"v1/instances/{fleet.namespace}/{pool.component}/{pool.endpoint}/"
        async with Recorder(local.bus, local.runtime_dir, local.etcd_url, prefix) as recorder:
            await local.start_workers()
            await _ready(recorder, local, contender)
            begun = time.time()
            async with meter:
                await generator.run()
            ended = time.time()
        return figures(recorder.record, generator.records, objectives, begun, ended) | {"load_cores": meter.cores()}
    finally:
        await asyncio.shield(local.stop())
        shutil.rmtree(folder, ignore_errors=True)


async def _ready(recorder: Recorder, local: LocalFleet, contender: Contender) -> None:
    """A worker serves, its snapshot is there where one is wanted, and the planner decides."""
    record = recorder.record

    def there() -> bool:
        return bool(record.serving()) and (not contender.restores or _captured(record))

    if not await recorder.wait_for(there, READY_S):
        raise SnapshotError(
            Reason.DEADLINE_EXCEEDED,
            f"waited {READY_S:.0f} s in vain for the first worker{' and its snapshot' if contender.restores else ''}",
            f"The logs in {local.runtime_dir / 'logs'} tell why.",
        )
    logs = local.runtime_dir / "logs"
    if not await recorder.wait_for(lambda: _decides(local.runtime_dir), READY_S):
        raise SnapshotError(
            Reason.DEADLINE_EXCEEDED, f"the planner decided nothing within {READY_S:.0f} s", f"{logs} tells why."
        )


def _decides(runtime_dir: Path) -> bool:
    """Our plugin writes a log of its decisions, Dynamo's planner one of its ticks."""
    own, theirs = runtime_dir / DECISION_LOG, runtime_dir / "logs" / "planner.log"
    return own.exists() or (theirs.exists() and FIRST_TICK in theirs.read_bytes())


def figures(
    record: Record, requests: Sequence[RequestRecord], objectives: Objectives, begun: float, ended: float
) -> dict[str, Any]:
    """One contender's row: shares of all requests that were sent, seconds, GPU-seconds."""
    in_time = [request for request in requests if not request.failed and _within(request.ttft_s, objectives.ttft_s)]
    smooth = [request for request in requests if not request.failed and _within(_itl_s(request), objectives.itl_s)]
    both = {request.id for request in in_time} & {request.id for request in smooth}
    ttft = [request.ttft_s for request in requests if request.ttft_s is not None]
    orders = [order for order in record.orders.values() if order.issued_at >= begun]
    return {
        "requests": len(requests),
        "failed": sum(request.failed for request in requests),
        "ttft_attainment": _share(len(in_time), len(requests)),
        "itl_attainment": _share(len(smooth), len(requests)),
        "attainment": _share(len(both), len(requests)),
        "ttft_s": {f"p{share}": measures.percentile(ttft, share) for share in (50, 95, 99)},
        "gpu_seconds": round(measures.gpu_seconds(record, begun, ended), 1),
        "seconds": round(ended - begun, 1),
        "most_serving": measures.most_serving(record),
        "restores": sum(order.kind is OrderKind.RESTORE for order in orders),
        "cold_starts": sum(order.kind is OrderKind.COLD_START for order in orders),
        "drains": sum(order.kind is OrderKind.DRAIN for order in orders),
        "counts": measures.count_rows(record),
    }


def _within(value: float | None, bound: float) -> bool:
    return value is not None and value <= bound


def _itl_s(request: RequestRecord) -> float | None:
    """Mean seconds between two tokens; 0 where there was only one."""
    if request.first_token is None or request.last_token is None:
        return None
    return (request.last_token - request.first_token) / max(1, request.tokens - 1)


def _share(part: int, whole: int) -> float | None:
    return round(part / whole, 4) if whole else None


def _captured(record: Record) -> bool:
    captures = [order.id for order in record.orders.values() if order.kind is OrderKind.CAPTURE]
    outcomes = [record.outcomes.get(order_id) for order_id in captures]
    return any(outcome is not None and outcome.status is OrderStatus.DONE for outcome in outcomes)
