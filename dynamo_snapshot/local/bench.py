"""`bench control-path`: what this project adds to a decision and to a restore, with the environment beside it."""

from __future__ import annotations

import asyncio
import shutil
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from dynamo_snapshot.agent.criu.command import find as find_criu
from dynamo_snapshot.config import CapturePolicy
from dynamo_snapshot.fleet.rules import fleet_rules
from dynamo_snapshot.local import host, processes
from dynamo_snapshot.local.bench_decision import BookkeepingNode, DecisionBench, DecisionTimes
from dynamo_snapshot.local.bench_restore import POOL, RestoreBench
from dynamo_snapshot.local.demo_fleet import DemoOptions, demo_fleet
from dynamo_snapshot.local.etcd import Etcd
from dynamo_snapshot.local.host import CpuMeter
from dynamo_snapshot.local.measures import percentile
from dynamo_snapshot.local.recorder import Recorder
from dynamo_snapshot.local.tiny_model import write_tiny_model
from dynamo_snapshot.local.up import LocalFleet

WARM_UP = 5
BOUNDS_MS = {"decision_to_order_ms": 10.0, "restore_complete_to_discovered_ms": 50.0, "own_overhead_ms": 100.0}
"""What the 99th percentile is to stay below on an idle machine."""

Say = Callable[[str], None]


async def control_path(repeats: int, say: Say) -> dict[str, Any]:
    """Measures ``repeats`` decisions and ``repeats`` restores, one by one, on servers of its own."""
    folder = Path(tempfile.mkdtemp(prefix="dynamo-snapshot-bench-"))
    try:
        write_tiny_model(folder / "model")
        cpu = CpuMeter()
        decisions = await _decisions(folder / "decisions", folder / "model", repeats, say)
        decision_idle = cpu.idle()
        costs = await _restores(folder / "restores", folder / "model", repeats, say)
        return {
            "what": (
                "decision_to_order_ms: from etcd's acknowledgement of a decision to its order on the node's bus "
                "(decision_write_ms: what that write took the planner's side, here by etcd's HTTP gateway). "
                "restore_complete_to_discovered_ms: from restore-complete to the worker's key in etcd, without resume "
                "and self-test. own_overhead_ms: from a restore's order to its outcome, without CRIU, engine and "
                "content checks. The worker is Dynamo's mocker, without simulated boot or memory; nothing else runs."
            ),
            "repeats": repeats,
            "decision_to_order_ms": figures(decisions.to_order_ms),
            "decision_write_ms": figures(decisions.write_ms),
            "restore_complete_to_discovered_ms": figures(costs.restore_complete_to_discovered_ms),
            "own_overhead_ms": figures(costs.own_overhead_ms),
            "bounds_p99_ms": BOUNDS_MS,
            "failures": {
                "decisions": len(decisions.failures),
                "restores": len(costs.failures),
                "texts": sorted({*decisions.failures, *costs.failures})[:20],
            },
            "idle_cpu": {"decisions": round(decision_idle, 3), "restores": round(cpu.idle(), 3)},
            "environment": host.environment(find_criu(None)),
        }
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def figures(values: Sequence[float]) -> dict[str, Any]:
    """Percentiles in milliseconds, rounded to microseconds; None where nothing was measured."""
    rows: dict[str, Any] = {
        f"p{share}": None if (value := percentile(values, share)) is None else round(value, 3) for share in (50, 95, 99)
    }
    return {**rows, "max": round(max(values), 3) if values else None, "count": len(values)}


async def _decisions(folder: Path, model: Path, repeats: int, say: Say) -> DecisionTimes:
    # Where books alone are kept no capture ever comes, and the fleet would rather wait for one than order.
    local = _fleet(folder, model, say, capture=CapturePolicy.NEVER)
    await local.start_servers()
    try:
        node = BookkeepingNode(local.bus)
        following = asyncio.create_task(node.run(), name="bookkeeping node")
        await local.start_service(processes.controller(local.fleet, local.write_fleet(), local.environment))
        bench = DecisionBench(Etcd(local.etcd_url), local.fleet.namespace, node)
        measured = await bench.run(repeats, WARM_UP, say)
        following.cancel()
        return measured
    finally:
        await asyncio.shield(local.stop())


async def _restores(folder: Path, model: Path, repeats: int, say: Say) -> Any:
    local = _fleet(folder, model, say)
    await local.start_servers()
    try:
        pool = local.fleet.pools[POOL]
        prefix = f"v1/instances/{local.fleet.namespace}/{pool.component}/{pool.endpoint}/"
        async with Recorder(local.bus, local.runtime_dir, local.etcd_url, prefix) as recorder:
            await local.start_service(processes.agent(local.fleet, local.write_fleet(), local.environment))
            rules = fleet_rules(local.fleet, local.etcd_url, local.nats_url, {})
            return await RestoreBench(local, recorder, rules.pools[POOL].worker).run(repeats, WARM_UP, say)
    finally:
        await asyncio.shield(local.stop())


def _fleet(folder: Path, model: Path, say: Say, capture: CapturePolicy = CapturePolicy.FIRST_WORKER) -> LocalFleet:
    fleet = demo_fleet(DemoOptions(boot_seconds=0, resident_mib=0), folder)
    pool = fleet.pools[POOL]
    pool = pool.model_copy(update={"snapshot": pool.snapshot.model_copy(update={"capture": capture})})
    changes = {"model": fleet.model.model_copy(update={"path": model}), "pools": {POOL: pool}}
    return LocalFleet(fleet.model_copy(update=changes), say)
