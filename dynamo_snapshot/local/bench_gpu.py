"""`bench restore`: a GPU worker captured once and restored again and again, by the agent's own pipelines.

Each series has a node of its own, with its own resident processes: what one keeps at hand must not help the next.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dynamo_snapshot.agent.criu.command import find as find_criu
from dynamo_snapshot.agent.direct import Direct, one_replica
from dynamo_snapshot.agent.gpus import Gpus
from dynamo_snapshot.agent.page_cache import cached_bytes
from dynamo_snapshot.config import Agent
from dynamo_snapshot.errors import SnapshotError
from dynamo_snapshot.local import host
from dynamo_snapshot.local.bench_machine import (
    disk_read_rate,
    host_to_device_rate,
    huge_pages,
    huge_pages_now,
    limit_s,
    read_rate,
)
from dynamo_snapshot.local.bench_subjects import BOOT_S, Subject
from dynamo_snapshot.local.measures import percentile
from dynamo_snapshot.model import OrderKind, Outcome, Reason
from dynamo_snapshot.snapshots.manifest import Manifest

POOL = "bench"
ORDER_S = 300.0
PACKAGES = ("torch", "vllm", "cuda-bindings")

Say = Callable[[str], None]


@dataclass(frozen=True)
class Way:
    """How one series of restores is made."""

    detached: bool = True
    """Weights out of the image, and zero pages dropped from it."""
    loader: bool = True
    """A loader fills the weights while CRIU restores."""
    pinned: bool = False
    """The loader has them in pinned memory before the order."""
    parked: bool = False
    """What is measured is the wake of a replica that was parked before."""
    huge_pages: bool = True
    """Transparent huge pages `always` meanwhile; else as the host has them."""


WAYS = {
    "stock": Way(detached=False, loader=False, huge_pages=False),
    "hugepages": Way(detached=False, loader=False),
    "detached": Way(loader=False),
    "prefetched": Way(),
    "prefetched-small-pages": Way(huge_pages=False),
    "pinned": Way(pinned=True),
    "parked": Way(parked=True),
    "parked-pinned": Way(parked=True, pinned=True),
}


@dataclass(frozen=True)
class Repeats:
    """How often each thing is measured."""

    restores: int
    of_stock: int
    """The same, where the weights are in the image."""
    cold_starts: int = 0
    """Before the one that is captured, in each series."""


@dataclass(frozen=True)
class Series:
    """One case in one way."""

    subject: Subject
    way: str
    repeats: int
    cold_starts: int = 0
    """How often the worker is started, each time timed, before the start that is captured."""


class RestoreSeries:
    """Carries one series out in ``folder``, which is empty again afterwards."""

    def __init__(self, folder: Path, settings: Agent, say: Say) -> None:
        self._folder, self._settings, self._say = folder, settings, say

    async def measure(self, series: Series) -> dict[str, Any]:
        """Returns the row of ``series``: the summary's fields, and each restore with its phases."""
        way, subject = WAYS[series.way], series.subject
        gpu = self._settings.gpu.model_copy(
            update={
                "loader": way.loader,
                "drop_zero_pages": way.detached,
                "pinned_segment_bytes": subject.weight_bytes if way.pinned else 0,
            }
        )
        settings = self._settings.model_copy(
            update={"runtime_dir": self._folder / "run", "store_dir": self._folder / "store", "gpu": gpu}
        )
        worker = subject.worker(way.detached, settings.store_dir / ".segments")
        with huge_pages(way.huge_pages):
            async with one_replica(settings, POOL, worker, self._say) as direct:
                gpus = direct.node.gpus
                if gpus is None:
                    raise _no_gpu()
                await gpus.warm()
                inventory = await gpus.driver.inventory()
                cold_starts_s = [await self._cold_start(direct) for _ in range(series.cold_starts)]
                captured = await self._capture(direct)
                row = await self._restores(series, direct, captured.snapshot_id or "")
            pages = huge_pages_now()
        return row | {
            "cold_starts_s": [*cold_starts_s, captured.cold_start_s],
            "capture": captured.phases,
            "huge_pages": pages,
            "lanes": gpu.loader_lanes,
            "standby_houses": settings.standby_houses,
            "driver": inventory.driver_version,
            "gpus": [device.name for device in inventory.devices],
        }

    async def _cold_start(self, direct: Direct) -> float:
        """Seconds from an order to a worker that has passed its self-test."""
        began = direct.node.clock()
        outcome = await direct.done(direct.begin(OrderKind.COLD_START, BOOT_S))
        await direct.remove()
        return outcome.finished_at - began

    async def _capture(self, direct: Direct) -> _Captured:
        start = direct.begin(OrderKind.COLD_START, BOOT_S, capture=True)
        waits = await direct.waits_for_capture(start)
        outcome = await direct.done(direct.begin(OrderKind.CAPTURE, ORDER_S) if waits else start)
        if outcome.snapshot_id is None:
            raise SnapshotError(Reason.WORKER_NOT_READY, "the worker served without waiting to be captured")
        await direct.remove()
        manifest = direct.node.store.manifest(outcome.snapshot_id)
        return _Captured(outcome.snapshot_id, manifest.capture.cold_start_s, _seconds(outcome))

    async def _restores(self, series: Series, direct: Direct, snapshot_id: str) -> dict[str, Any]:
        node, way = direct.node, WAYS[series.way]
        manifest = node.store.manifest(snapshot_id)
        images = sorted(node.store.images(snapshot_id).iterdir())
        weights = [node.store.segments.folder / one.digest for one in manifest.capture.weights]
        prefetch_s = await _prefetch(direct, manifest, pin=way.pinned)
        restores: list[dict[str, Any]] = []
        failures: list[str] = []
        for number in range(series.repeats):
            cached = {
                "image_cached_bytes": sum(map(cached_bytes, images)),
                "weights_cached_bytes": sum(map(cached_bytes, weights)),
            }
            try:
                kind, held = OrderKind.RESTORE, {}
                if way.parked:
                    kind, held = OrderKind.WAKE, await self._parked(direct, snapshot_id)
                await node.houses.ready()
                began = node.clock()
                outcome = await direct.done(direct.begin(kind, ORDER_S, snapshot_id=snapshot_id))
                replica = direct.replica
                evidence = dict(replica.state.evidence) if replica and replica.state else {}
                total = outcome.finished_at - began
                restores.append({"total_s": total, "phases": _seconds(outcome), "evidence": evidence, **cached, **held})
            except SnapshotError as error:
                failures.append(f"{error.reason}: {error.message}"[:2000])
            await direct.remove()
            if number % 10 == 9:
                self._say(
                    f"{series.subject.case} {series.way}: {number + 1} of {series.repeats}, {len(failures)} failed"
                )
        totals = [restore["total_s"] for restore in restores]
        largest = max(images, key=lambda path: path.stat().st_size)
        return {
            "engine": series.subject.engine,
            "case": series.subject.case,
            "way": series.way,
            "repeats": series.repeats,
            "failures": len(failures),
            "median_s": statistics.median(totals) if totals else None,
            "p95_s": percentile(totals, 95),
            "prefetch_s": prefetch_s,
            "image_bytes": manifest.size_bytes,
            "image_read_bytes_per_s": read_rate(largest),
            "disk_read_bytes_per_s": disk_read_rate(largest),
            "weight_bytes": manifest.weights_bytes,
            "answers": sorted({restore["evidence"].get("answer", "") for restore in restores}),
            "errors": sorted(set(failures)),
            "restores": restores,
        }

    async def _parked(self, direct: Direct, snapshot_id: str) -> dict[str, Any]:
        """Parks the replica that is to be woken; returns what that took, and what it holds of the GPU meanwhile."""
        assert direct.node.gpus is not None
        before = await direct.node.gpus.driver.inventory()
        outcome = await direct.done(direct.begin(OrderKind.PARK, ORDER_S, snapshot_id=snapshot_id))
        after = await direct.node.gpus.driver.inventory()
        free = [sum(device.free_bytes or 0 for device in inventory.devices) for inventory in (before, after)]
        return {"park": _seconds(outcome), "parked_gpu_bytes": free[0] - free[1]}


@dataclass(frozen=True)
class _Captured:
    snapshot_id: str
    cold_start_s: float | None
    phases: dict[str, float]


async def restores(
    subjects: Sequence[Subject],
    ways: Sequence[str],
    repeats: Repeats,
    settings: Agent,
    say: Say,
    keep: Callable[[dict[str, Any]], None] = lambda result: None,
) -> dict[str, Any]:
    """Measures each of ``subjects`` in each of ``ways``; returns all that is written as JSON.

    Args:
        keep: gets after each series what there is by then; the next one may fail or take too long.

    Raises:
        SnapshotError: ``configuration_invalid`` for a way that a subject's engine does not have; ``cuda_missing``,
            ``criu_missing``, before anything is measured.
    """
    for subject in subjects:
        stock = [way for way in ways if not WAYS[way].detached]
        if subject.keeps_weights_apart_always and stock:
            raise SnapshotError(
                Reason.CONFIGURATION_INVALID,
                f"{subject.engine} keeps its weights out of its image: {', '.join(stock)} cannot be measured",
                f"Give --ways some of {', '.join(name for name, way in WAYS.items() if way.detached)}.",
            )
    if Gpus.of_host(settings.gpu, settings.runtime_dir, settings.store_dir) is None:
        raise _no_gpu()
    machine = host.environment(find_criu(settings.criu), PACKAGES)
    limit = host_to_device_rate()
    say(f"pinned host memory to device: {_rate(limit)}")
    machine |= {"host_to_device_bytes_per_s": limit}
    result: dict[str, Any] = {"what": __doc__, "at": time.time(), "environment": machine, "rows": []}
    for subject in subjects:
        for way in ways:
            with tempfile.TemporaryDirectory(prefix="dynamo-snapshot-bench-") as folder:
                count = repeats.restores if WAYS[way].detached else repeats.of_stock
                series = Series(subject, way, count, repeats.cold_starts)
                row = await RestoreSeries(Path(folder), settings, say).measure(series)
            row["limit_s"] = limit_s(row, limit)
            say(summary(row))
            result["rows"].append(row)
            keep(result)
    return result


def summary(row: dict[str, Any]) -> str:
    """Three lines: the totals beside the machine's limit, the median of each phase, and the machine's read rates."""
    names = dict.fromkeys(name for restore in row["restores"] for name in restore["phases"])
    medians = " ".join(
        f"{name} {statistics.median(restore['phases'].get(name, 0.0) for restore in row['restores']):.3f}"
        for name in names
    )
    head = f"{row['case']} {row['way']}: median {row['median_s'] or 0:.3f} s, p95 {row['p95_s'] or 0:.3f} s"
    limit = row.get("limit_s")
    if limit and row["median_s"]:
        head += f", {row['median_s'] / limit:.1f} times this machine's limit of {limit:.3f} s"
    head += f", {row['failures']} of {row['repeats']} failed, image {row['image_bytes'] >> 20} MiB"
    rates = f"page cache {_rate(row['image_read_bytes_per_s'])}, disk {_rate(row['disk_read_bytes_per_s'])}"
    return f"{head}\n  {medians}\n  one thread reads: {rates}"


def _no_gpu() -> SnapshotError:
    return SnapshotError(Reason.CUDA_MISSING, "there is no GPU here to measure", "`dynamo-snapshot doctor` says why.")


def _rate(bytes_per_s: float | None) -> str:
    return "not known" if bytes_per_s is None else f"{bytes_per_s / 1e9:.2f} GB/s"


async def _prefetch(direct: Direct, manifest: Manifest, *, pin: bool) -> float:
    """Has a snapshot's weights read before the first restore; returns seconds, 0 where there are none."""
    gpus, record = direct.node.gpus, manifest.capture.cuda
    if gpus is None or record is None or not manifest.capture.weights:
        return 0.0
    if not gpus.settings.loader:
        began = time.monotonic()
        for one in manifest.capture.weights:
            read_rate(direct.node.store.segments.folder / one.digest)
        return time.monotonic() - began
    return (await gpus.prefetch(record.devices[0].uuid, manifest.capture.weights, pin=pin)).seconds


def _seconds(outcome: Outcome) -> dict[str, float]:
    return {phase.name: phase.seconds for phase in outcome.phases} | {"unaccounted": outcome.unaccounted_s}
