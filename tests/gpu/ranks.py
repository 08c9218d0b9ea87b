"""A worker of several ranks, each a process with a GPU of its own, that meet in a communicator.

Run under an agent: python ranks.py --ranks 2 [--keep] [--device cpu]
Quiesce destroys the communicator and resume makes another one; with --keep it lives on, which no capture takes.
Rank n holds n + 1 GiB, by which one can tell from outside which GPU it is on. `--device cpu` needs no GPU.
"""

from __future__ import annotations

import argparse
import asyncio
import multiprocessing
import os
import signal
import tempfile
import time
from multiprocessing.connection import Connection
from typing import Any

from worker_hooks.hooks import Hooks, run
from worker_hooks.reasons import HookError, HookReason
from worker_hooks.seccomp import block_io_uring

ENVIRONMENT = {"NCCL_IB_DISABLE": "1", "NCCL_NVLS_ENABLE": "0", "NCCL_RAS_ENABLE": "0", "NCCL_SOCKET_IFNAME": "lo"}
BACKENDS = {"cuda": "nccl", "cpu": "gloo"}
WIDTH = 1024
ANSWER_S = 120.0


def rank_main(rank: int, ranks: int, kind: str, asked: Connection) -> None:
    """Does what it is told: `meet FOLDER`, `part`, `answer`; each is answered."""
    import torch
    from torch import distributed

    device = torch.device(kind, rank if kind == "cuda" else None)
    if kind == "cuda":
        torch.cuda.set_device(device)
    torch.manual_seed(rank)
    weights = torch.randn(WIDTH, WIDTH, device=device)
    held = torch.full(((rank + 1) << (28 if kind == "cuda" else 10),), rank + 1.0, device=device)
    while True:
        word, *arguments = asked.recv()
        answer: Any = None
        if word == "meet":
            distributed.init_process_group(
                BACKENDS[kind],
                init_method=f"file://{arguments[0]}/meeting",
                rank=rank,
                world_size=ranks,
                device_id=device if kind == "cuda" else None,
            )
        elif word == "part":
            distributed.destroy_process_group()
        else:
            total = torch.stack([(weights @ weights).abs().sum(), held.mean()])
            distributed.all_reduce(total)
            answer = total.tolist()
        asked.send(answer)


class Ranks:
    """The ranks, from the process that serves them and has no GPU."""

    def __init__(self, ranks: int, kind: str, keep: bool, evidence: dict[str, str]) -> None:
        spawn = multiprocessing.get_context("spawn")
        self._keep, self._evidence = keep, evidence
        self._ask: list[Connection] = []
        for rank in range(ranks):
            ours, theirs = spawn.Pipe()
            spawn.Process(target=rank_main, args=(rank, ranks, kind, theirs), daemon=True).start()
            theirs.close()
            self._ask.append(ours)
        self._meet()
        self._expected = self._answer()

    def quiesce(self) -> None:
        if not self._keep:
            self._tell("part")

    def resume(self) -> None:
        if not self._keep:
            began = time.monotonic()
            self._meet()
            self._evidence["meet_s"] = f"{time.monotonic() - began:.4f}"

    def self_test(self) -> None:
        self._evidence["answer"] = answer = self._answer()
        if answer != self._expected:
            raise HookError(HookReason.SELF_TEST_FAILED, f"all-reduce gave {answer} instead of {self._expected}")

    def _meet(self) -> None:
        self._tell("meet", tempfile.mkdtemp(prefix="ranks-"))

    def _answer(self) -> str:
        (answer,) = {str(answer) for answer in self._tell("answer")}
        return answer

    def _tell(self, *words: str) -> list[Any]:
        for ask in self._ask:
            ask.send(words)
        for ask in self._ask:
            if not ask.poll(ANSWER_S):
                raise TimeoutError(f"a rank does not {words[0]}")
        return [ask.recv() for ask in self._ask]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--keep", action="store_true", help="the communicator, over the capture")
    parser.add_argument("--device", choices=BACKENDS, default="cuda")
    arguments = parser.parse_args()
    os.environ.update(ENVIRONMENT)
    block_io_uring()

    async def alone(hooks: Hooks) -> None:
        ranks = Ranks(arguments.ranks, arguments.device, arguments.keep, hooks.lifecycle.evidence)
        hooks.booted()
        await hooks.snapshot_point(ranks.quiesce, ranks.resume)
        await hooks.self_test(ranks.self_test)
        hooks.registered()
        stopped = asyncio.Event()
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stopped.set)
        await stopped.wait()

    return run(alone, Hooks.from_environment())


if __name__ == "__main__":
    os._exit(main())
