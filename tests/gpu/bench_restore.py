"""Measures restores: ``PYTHONPATH=.:tests python tests/gpu/bench_restore.py --folder F --out O``.

``--engine torch`` (weights of ``--gib``) or ``--engine vllm`` (a model in the folder ``--model``, named by ``--case``).

One JSON file: the environment, the machine's own limits, and for each case and way every restore's phases. The clock
runs from the order to a passed self-test: admission, house, CRIU, CUDA, weights, first result.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from gpu.rig import ENGINE, VLLM_ENGINE, Captured, Rig, percentile, rig

from dynamo_snapshot.agent.cuda_client import CudaHelper
from dynamo_snapshot.agent.house import House
from dynamo_snapshot.agent.loader_process import Settings
from dynamo_snapshot.agent.page_cache import cached_bytes
from worker_hooks import holder


@dataclass(frozen=True)
class Way:
    """How one series of restores is made."""

    detached: bool = True
    """Weights out of the image; zero pages dropped."""
    prefetch: bool = True
    """A loader fills the weights while CRIU restores."""
    pin: bool = False
    """The loader had them in pinned memory before the order."""
    huge_pages: bool = False
    """Transparent huge pages ``always`` while restoring."""


WAYS = {
    "stock": Way(detached=False, prefetch=False),
    "hugepages": Way(detached=False, prefetch=False, huge_pages=True),
    "detached": Way(prefetch=False, huge_pages=True),
    "prefetched-small-pages": Way(),
    "prefetched": Way(huge_pages=True),
    "pinned": Way(pin=True, huge_pages=True),
}
HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage/enabled")


def host_to_device_rate() -> float:
    """Bytes a second from one pinned buffer to the GPU, in a process of its own."""
    code = """
import torch
source = torch.empty(1 << 30, dtype=torch.uint8, pin_memory=True).fill_(1)
target = torch.empty(1 << 30, dtype=torch.uint8, device="cuda")
begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
target.copy_(source, non_blocking=True); torch.cuda.synchronize()
begin.record()
for _ in range(8): target.copy_(source, non_blocking=True)
end.record(); torch.cuda.synchronize()
print((8 << 30) / (begin.elapsed_time(end) / 1e3))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return float(done.stdout)


def read_rate(path: Path) -> float:
    """Bytes a second that one thread reads from the page cache (or the disk, if the file is not cached)."""
    buffer = bytearray(16 << 20)
    began, total = time.monotonic(), 0
    with path.open("rb", buffering=0) as file:
        while count := file.readinto(buffer):
            total += count
    return total / (time.monotonic() - began)


def huge_pages() -> str:
    return HUGE_PAGES.read_text().split("[")[1].split("]")[0]


def run_is_tmpfs() -> bool:
    """Where it is, CRIU keeps what it learnt of the kernel in ``/run/criu.kdat`` and need not probe each time."""
    return any(line.split()[1:3] == ["/run", "tmpfs"] for line in Path("/proc/mounts").read_text().splitlines())


@contextmanager
def huge_pages_set(always: bool) -> Iterator[None]:
    """The host's transparent huge pages ``always``, if so wanted, and then as they were."""
    before = huge_pages()
    if always:
        HUGE_PAGES.write_text("always")
    try:
        yield
    finally:
        HUGE_PAGES.write_text(before)


async def environment() -> dict[str, Any]:
    import torch

    helper = CudaHelper(Path(os.devnull))
    inventory = await helper.inventory()
    await helper.close()
    return {
        "at": time.time(),
        "gpus": [{"name": d.name, "total_bytes": d.total_bytes} for d in inventory.devices],
        "driver": inventory.driver_version,
        "kernel": platform.release(),
        "cores": os.cpu_count(),
        "memory_bytes": os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "run_is_tmpfs": run_is_tmpfs(),
        "host_to_device_bytes_per_s": host_to_device_rate(),
    }


@dataclass(frozen=True)
class Subject:
    """What is captured."""

    engine: str
    case: str
    command: tuple[str, ...]
    detach: tuple[str, ...]
    """Arguments that keep the weights out of the image; the segment store's folder follows."""
    cold_starts: int = 1
    """How often it is started before its capture, each time timed; all but the last only to see how long it takes."""


def torch_subject(gib: float) -> Subject:
    command = (str(ENGINE), "--house", holder.HOUSE, "--weights-gib", str(gib))
    return Subject("torch", f"{gib:g}GiB", command, ("--segments",))


def vllm_subject(model: Path, case: str, arguments: list[str], cold_starts: int) -> Subject:
    command = (str(VLLM_ENGINE), "--model", str(model), *arguments)
    return Subject("vllm", case, command, ("--segments",), cold_starts)


async def measure(node: Rig, subject: Subject, name: str, repeats: int) -> dict[str, Any]:
    way = WAYS[name]
    detach = (*subject.detach, str(node.store.folder)) if way.detached else ()
    cold_starts_s = []
    for start in range(subject.cold_starts):
        if start:
            await node.remove("source")
        began = time.monotonic()
        house = await node.ready("source", *subject.command, *detach)
        cold_starts_s.append(time.monotonic() - began)
    images = node.folder / f"images-{name}-{subject.case}"
    history = _seconds_in_states(house)
    snapshot = await node.capture(house, images, drop_zeros=way.detached)
    await node.remove("source")
    row = {
        "engine": subject.engine,
        "case": subject.case,
        "way": name,
        "huge_pages": huge_pages(),
        "repeats": repeats,
        "cold_starts_s": cold_starts_s,
        "cold_start_states_s": history,
        "capture": snapshot.seconds,
        "zero_pages": None if snapshot.zero_pages is None else asdict(snapshot.zero_pages),
        "dirty_mebibytes": snapshot.dirty,
        "segments": len(snapshot.segments),
        "image_bytes": snapshot.image_bytes,
        "image_read_bytes_per_s": read_rate(max(images.glob("pages-*.img"), key=lambda path: path.stat().st_size)),
        "image_cached_bytes": sum(cached_bytes(path) for path in images.iterdir()),
        "weight_bytes": sum(segment.size for segment in snapshot.segments),
    }
    row |= await restores(node, snapshot, name, repeats)
    shutil.rmtree(images)
    return row


async def restores(node: Rig, snapshot: Captured, name: str, repeats: int) -> dict[str, Any]:
    """Restores ``snapshot`` again and again, each time into a house of its own."""
    way = WAYS[name]
    prefetch_s = 0.0
    if snapshot.segments:
        prefetch_s = (await node.loader.prefetch(snapshot.segments, node.store, pin=way.pin)).seconds
    done: list[dict[str, Any]] = []
    failures: list[str] = []
    for number in range(repeats):
        replica = f"{name}-{number}"
        try:
            restored = await node.restore(replica, snapshot, prefetch=way.prefetch)
            done.append({"seconds": restored.seconds, "evidence": restored.evidence})
        except Exception as failure:
            failures.append(f"{type(failure).__name__}: {failure}"[:2000])
        await node.loader.cancel(replica)
        await node.remove(replica)
    totals = [restore["seconds"]["total"] for restore in done]
    return {
        "failures": len(failures),
        "median_s": statistics.median(totals) if totals else None,
        "p95_s": percentile(totals, 0.95) if totals else None,
        "prefetch_s": prefetch_s,
        "answers": sorted({restore["evidence"]["answer"] for restore in done}),
        "errors": failures,
        "restores": done,
    }


def _seconds_in_states(house: House) -> dict[str, float]:
    """How long the worker was in each state on its way to its capture."""
    state = house.control.state()
    assert state is not None
    entered = state.history
    return {name: after - since for (name, since), (_, after) in pairwise(entered)}


def limit(row: dict[str, Any], host_to_device: float) -> float | None:
    """max(image / read rate + driver time, weight bytes / host-to-device rate), in seconds."""
    if not row["restores"]:
        return None
    driver_s = statistics.median(restore["seconds"]["cuda"] for restore in row["restores"])
    image_s: float = row["image_bytes"] / row["image_read_bytes_per_s"] + driver_s
    weights_s: float = row["weight_bytes"] / host_to_device
    return max(image_s, weights_s)


def summary(row: dict[str, Any]) -> str:
    phases: dict[str, list[float]] = {}
    for restore in row["restores"]:
        for name, seconds in restore["seconds"].items():
            phases.setdefault(name, []).append(seconds)
    medians = " ".join(f"{name}={statistics.median(values):.3f}" for name, values in phases.items())
    head = f"{row['case']} {row['way']}: median {row['median_s'] or 0:.3f} p95 {row['p95_s'] or 0:.3f}"
    return f"{head} failures {row['failures']}/{row['repeats']} image {row['image_bytes'] >> 20} MiB | {medians}"


def subjects(arguments: argparse.Namespace) -> list[Subject]:
    if arguments.engine == "torch":
        return [torch_subject(float(gib)) for gib in arguments.gib.split(",")]
    return [vllm_subject(arguments.model, arguments.case, arguments.engine_argument, arguments.cold_starts)]


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--engine", choices=["torch", "vllm"], default="torch")
    parser.add_argument("--gib", default="16", help="torch: GiB of weights, with commas between several cases")
    parser.add_argument("--model", type=Path, help="vllm: the model's folder")
    parser.add_argument("--case", help="vllm: the model's name in the results")
    parser.add_argument("--cold-starts", type=int, default=1, help="vllm: starts before the capture, the last captured")
    parser.add_argument("--engine-argument", action="append", default=[], help="vllm: for examples/vllm_engine.py")
    parser.add_argument("--ways", default="stock,detached,prefetched,pinned", help=", ".join(WAYS))
    parser.add_argument("--lanes", type=int, default=14)
    parser.add_argument("--pin-gib", type=int, default=41, help="pinned: the most GiB that may be pinned")
    parser.add_argument("--repeats", type=int, default=30)
    parser.add_argument("--stock-repeats", type=int)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--criu", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    if arguments.engine == "vllm" and not all(WAYS[name].detached for name in arguments.ways.split(",")):
        parser.error("vllm: --ways takes only those that keep the weights out of the image")
    result: dict[str, Any] = {"environment": await environment(), "rows": []}
    print(json.dumps(result["environment"]), flush=True)
    for subject in subjects(arguments):
        for name in arguments.ways.split(","):
            # Resident processes of its own for each series: what one keeps at hand must not help the next.
            settings = Settings(
                lanes=arguments.lanes, pinned_segment_bytes=arguments.pin_gib << 30 if WAYS[name].pin else 0
            )
            repeats = arguments.repeats if WAYS[name].detached else arguments.stock_repeats or arguments.repeats
            with huge_pages_set(WAYS[name].huge_pages):
                async with rig(arguments.folder / "node", arguments.criu, settings) as node:
                    row = await measure(node, subject, name, repeats)
            row["lanes"] = arguments.lanes
            row["limit_s"] = limit(row, result["environment"]["host_to_device_bytes_per_s"])
            result["rows"].append(row)
            print(summary(row), *row["errors"][:1], flush=True)
            arguments.out.write_text(json.dumps(result, indent=1))


if __name__ == "__main__":
    asyncio.run(main())
