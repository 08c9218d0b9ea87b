"""What tests say of a captured worker, where it does not matter which."""

from __future__ import annotations

from dynamo_snapshot.snapshots.compatibility import CompatibilityParts
from dynamo_snapshot.snapshots.manifest import Capture

PARTS = CompatibilityParts(
    engine="mocker",
    engine_version="1.6.1",
    command=("python", "-m", "worker"),
    environment={},
    model_files=(),
    python="3.11.7",
    distributions={},
    image_digest="",
    architecture="x86_64",
    kernel="6.18",
    cpu_features=("sse2",),
    criu="4.2.1",
    gpu_models=(),
    gpu_driver="",
)
CAPTURE = Capture(
    pool="decode",
    compatibility=PARTS,
    source_pid=300,
    house="/run/dynamo-snapshot/house",
    log_path="/run/dynamo-snapshot/house/logs/worker.log",
    criu_version="4.2.1",
    kernel="6.18",
)
