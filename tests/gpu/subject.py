"""A process that uses CUDA, for the driver's suite: it holds values in GPU and CPU memory and in a file.

Run as ``python subject.py FOLDER MIB``. It answers files named ``FOLDER/<n>.ask`` with ``FOLDER/<n>.answer``:
``tokens`` (what it holds), ``busy SECONDS`` (keeps the GPU busy in a call), ``end``.
"""

from __future__ import annotations

import json
import os
import secrets
import sys
import time
from pathlib import Path


def answer(path: Path, content: object) -> None:
    path.with_suffix(".new").write_text(json.dumps(content))
    path.with_suffix(".new").rename(path.with_suffix(".answer"))


def main(folder: Path, mib: int) -> None:
    import torch

    in_memory = secrets.token_hex(16)
    file = (folder / "token").open("w+")
    file.write(secrets.token_hex(16))
    file.flush()
    on_gpu = torch.tensor(list(secrets.token_bytes(16)), dtype=torch.uint8, device="cuda")
    ballast = torch.full((mib << 18,), 7, dtype=torch.int32, device="cuda")
    torch.cuda.synchronize()

    def tokens() -> dict[str, str]:
        file.seek(0)
        return {
            "memory": in_memory,
            "file": file.read(),
            "gpu": bytes(on_gpu.cpu().tolist()).hex(),
            "ballast": str(sum(int(part.sum(dtype=torch.int64)) for part in ballast.split(1 << 26)) // 7),
        }

    answer(folder / "0.ask", {"pid": os.getpid(), **tokens()})
    turn = 1
    while True:
        ask = folder / f"{turn}.ask"
        if not ask.exists():
            time.sleep(0.005)
            continue
        verb, _, argument = ask.read_text().partition(" ")
        if verb == "tokens":
            answer(ask, tokens())
        elif verb == "busy":
            answer(ask, None)
            torch.cuda._sleep(int(float(argument) * 1.7e9))
            torch.cuda.synchronize()
        elif verb == "end":
            answer(ask, None)
            return
        turn += 1


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
