"""What the machine itself allows a restore: rates to read and to copy at, and its huge pages."""

from __future__ import annotations

import mmap
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage/enabled")
MOST_FROM_DISK = 1 << 30
_BUFFER = 16 << 20
_HOST_TO_DEVICE = """
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


def limit_s(row: dict[str, Any], host_to_device: float | None) -> float | None:
    """max(image / read rate + driver time, weight bytes / host-to-device rate): what this machine allows.

    A wake has only the weights to bring.
    """
    if not row["restores"] or host_to_device is None:
        return None
    weights_s: float = row["weight_bytes"] / host_to_device
    driver = [restore["phases"]["thaw"] for restore in row["restores"] if "thaw" in restore["phases"]]
    if not driver:
        return weights_s
    image_s: float = row["image_bytes"] / row["image_read_bytes_per_s"] + statistics.median(driver)
    return max(image_s, weights_s)


def host_to_device_rate() -> float | None:
    """Bytes a second from one pinned buffer to the GPU, in a process of its own; None without torch and a GPU."""
    done = subprocess.run([sys.executable, "-c", _HOST_TO_DEVICE], capture_output=True, text=True, check=False)
    return float(done.stdout) if done.returncode == 0 else None


def read_rate(path: Path) -> float:
    """Bytes a second that one thread reads from the page cache, or the disk where the file is not cached."""
    return _read(path, os.O_RDONLY, sys.maxsize)


def disk_read_rate(path: Path) -> float | None:
    """Bytes a second that one thread reads past the page cache, 1 GiB at most; None on a file system without that."""
    try:
        return _read(path, os.O_RDONLY | os.O_DIRECT, MOST_FROM_DISK)
    except OSError:
        return None


def huge_pages_now() -> str:
    return HUGE_PAGES.read_text().split("[")[1].split("]")[0] if HUGE_PAGES.exists() else "absent"


@contextmanager
def huge_pages(always: bool) -> Iterator[None]:
    """The host's transparent huge pages `always` if so wanted, and then as they were."""
    before = huge_pages_now()
    if not always or before in ("always", "absent"):
        yield
        return
    HUGE_PAGES.write_text("always")
    try:
        yield
    finally:
        HUGE_PAGES.write_text(before)


def _read(path: Path, flags: int, most: int) -> float:
    # A mapping, for direct I/O needs an aligned buffer; mapped before the clock starts.
    with mmap.mmap(-1, _BUFFER) as buffer:
        buffer.write(bytes(_BUFFER))
        descriptor = os.open(path, flags | os.O_CLOEXEC)
        try:
            began, total = time.monotonic(), 0
            while total < most and (count := os.preadv(descriptor, [buffer], total)):
                total += count
            return total / (time.monotonic() - began)
        finally:
            os.close(descriptor)
