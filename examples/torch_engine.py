"""The torch reference engine: a stack of linear layers behind a CUDA graph, whose weights stay out of its snapshot.

It shows all that an engine has to do to come back at the speed of the hardware: move the weights into an arena with
one call, give it up at quiesce, take it back at resume, and prove with a fixed prompt that nothing has changed.

Run: python examples/torch_engine.py --weights-gib 2 --segments FOLDER [--serve MODEL_FOLDER]
Without --serve it registers nowhere: it says REGISTERED in worker-state.json once its self-test has passed.
"""

import argparse
import asyncio
import hashlib
import logging
import os
import signal
import time
from pathlib import Path

import worker_hooks
from worker_hooks.hooks import Hooks, run
from worker_hooks.reasons import HookError, HookReason
from worker_hooks.seccomp import block_io_uring
from worker_hooks.weights.handover import SOCKET
from worker_hooks.weights.segment import SEGMENTS_FILE, SegmentStore, encode_segments

WIDTH = 8192
ROWS = 8
LAYER_BYTES = WIDTH * WIDTH * 2
VOCABULARY = 512


class TorchEngine:
    """Random weights of a real engine's size; one forward pass is one graph launch.

    Args:
        weights_gib: GiB of parameters, in layers of 128 MiB.
        segments: where weight segments are kept; None: the weights stay in the process image.
        house: the replica's house, where a loader hands weights over.
    """

    def __init__(self, weights_gib: float, segments: Path | None, house: Path | None) -> None:
        import torch

        self.torch = torch
        self.house = house
        self.store = SegmentStore(segments) if segments else None
        self.evidence: dict[str, str] = {}
        layers = max(1, round(weights_gib * (1 << 30) / LAYER_BYTES))
        with torch.device("cuda"), torch.inference_mode(False):
            torch.manual_seed(0)
            linear = [torch.nn.Linear(WIDTH, WIDTH, bias=False, dtype=torch.bfloat16) for _ in range(layers)]
            self.model = torch.nn.Sequential(*linear).requires_grad_(False)
            self.prompt = torch.randn(ROWS, WIDTH, dtype=torch.bfloat16)
        self.arena = None
        if self.store is not None:
            from worker_hooks.weights.torch_arena import TorchArena

            self.arena = TorchArena(self.model)
        self._capture_graph()
        self.expected = self.answer()

    def _forward(self):
        hidden = self.prompt
        for layer in self.model:
            hidden = self.torch.nn.functional.rms_norm(layer(hidden), (WIDTH,))
        return hidden

    def _capture_graph(self) -> None:
        stream = self.torch.cuda.Stream()
        with self.torch.cuda.stream(stream):
            self._forward()
        stream.synchronize()
        self.graph = self.torch.cuda.CUDAGraph()
        with self.torch.cuda.graph(self.graph):
            self.output = self._forward()

    def answer(self) -> str:
        """Runs the prompt through and returns the digest of every bit that comes out."""
        self.output.zero_()
        self.graph.replay()
        return hashlib.sha256(self.output.view(self.torch.int16).cpu().numpy().tobytes()).hexdigest()

    def quiesce(self) -> None:
        if self.arena is not None:
            segments = self.arena.quiesce(self.store)
            if self.house is not None:
                (self.house / "control" / SEGMENTS_FILE).write_bytes(encode_segments(segments))

    def resume(self) -> None:
        if self.arena is None or self.arena.attached:
            return
        began = time.monotonic()
        socket = self.house / SOCKET if self.house is not None else None
        attached = self.arena.resume(self.store, socket if socket is not None and socket.exists() else None)
        self.evidence["weights"] = f"by_loader={attached.by_loader} {attached.why}".strip()
        self.evidence["weights_s"] = f"{time.monotonic() - began:.4f}"

    def self_test(self) -> None:
        began = time.monotonic()
        answer = self.answer()
        self.evidence["answer"] = answer
        self.evidence["answer_s"] = f"{time.monotonic() - began:.4f}"
        if answer != self.expected:
            raise HookError(HookReason.SELF_TEST_FAILED, f"the prompt gave {answer} instead of {self.expected}")

    async def generate(self, request, context):
        for index in range(request["stop_conditions"].get("max_tokens") or 16):
            token = int(self.answer()[:8], 16) % VOCABULARY
            last = index + 1 == (request["stop_conditions"].get("max_tokens") or 16)
            yield {"token_ids": [token], "finish_reason": "length" if last else None}
            await asyncio.sleep(0)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--weights-gib", type=float, default=2.0)
    parser.add_argument("--segments", type=Path, help="keep the weights out of the snapshot, in this folder")
    parser.add_argument("--house", type=Path, help="the replica's house; without it no loader is asked")
    parser.add_argument("--serve", type=Path, metavar="MODEL_FOLDER", help="register with Dynamo as this model")
    arguments = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")

    def build() -> TorchEngine:
        return TorchEngine(arguments.weights_gib, arguments.segments, arguments.house)

    if arguments.serve:
        worker_hooks.serve(build, model_path=str(arguments.serve), model_name=arguments.serve.name)

    async def alone(hooks: Hooks) -> None:
        engine = build()
        engine.evidence = hooks.lifecycle.evidence
        hooks.booted()
        await hooks.snapshot_point(engine.quiesce, engine.resume)
        await hooks.self_test(engine.self_test)
        hooks.registered()
        stopped = asyncio.Event()
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stopped.set)
        await stopped.wait()

    block_io_uring()
    return run(alone, Hooks.from_environment())


if __name__ == "__main__":
    os._exit(main())
