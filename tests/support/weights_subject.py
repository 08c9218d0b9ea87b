"""A worker with weights in an arena of host memory: it gives them up, waits to be restored, and takes them back.

Run as ``python weights_subject.py FOLDER``. ``FOLDER/kept`` lists the segments; ``FOLDER/attached`` says
how they came back and what they hold, once ``FOLDER/go`` appears.
"""

from __future__ import annotations

import json
import sys
import time
from dataclasses import asdict
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
from support.weights import detached, digests

from worker_hooks.weights.arena import attach
from worker_hooks.weights.handover import SOCKET
from worker_hooks.weights.host_memory import GRANULARITY, HostMemory
from worker_hooks.weights.pump import Pump
from worker_hooks.weights.segment import SegmentStore, encode_segments


def main(folder: Path) -> None:
    memory, store = HostMemory(), SegmentStore(folder / "segments")
    segments = detached(memory, store, [32 * GRANULARITY, 33 * GRANULARITY], folder / "scratch")
    (folder / "kept.new").write_bytes(encode_segments(segments))
    (folder / "kept.new").rename(folder / "kept")
    while not (folder / "go").exists():
        time.sleep(0.01)
    attached = attach(memory, segments, store, folder / SOCKET, lambda: Pump(memory, lanes=2, buffers=2), 10)
    result = {"attached": asdict(attached), "digests": digests(memory, segments)}
    (folder / "attached.new").write_text(json.dumps(result))
    (folder / "attached.new").rename(folder / "attached")
    while True:
        time.sleep(60)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
