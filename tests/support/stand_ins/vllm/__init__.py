"""What ``examples/vllm_engine.py`` uses of vLLM, on the toy worker's GPU: put this folder's parent on PYTHONPATH."""

from __future__ import annotations

import os
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from support.toy_gpu import ToyGpu


class SamplingParams:
    def __init__(self, **options: Any) -> None:
        assert options["temperature"] == 0


class LLM:
    def __init__(self, model: str, **options: Any) -> None:
        assert options["enable_sleep_mode"]
        assert list(Path(model).glob("*.safetensors"))
        self.gpu = ToyGpu("{}", Path(os.environ["DYNAMO_SNAPSHOT_STATE_DIR"]))
        self.asleep = False
        self.evidence: dict[str, str] = {}

    def generate(self, prompts: Any, sampling_params: SamplingParams, *, use_tqdm: bool) -> list[Any]:
        assert not self.asleep
        return [SimpleNamespace(outputs=[SimpleNamespace(token_ids=[5, 6, 7], cumulative_logprob=-1.5)])]

    def sleep(self, level: int = 1) -> None:
        self.gpu.quiesce()
        self.asleep = True

    def wake_up(self) -> None:
        began = time.monotonic()
        self.gpu.resume()
        self.asleep = False
        self.evidence = {
            "weights": f"by_loader={self.gpu.by_loader}",
            "weights_s": f"{time.monotonic() - began:.4f}",
        }

    def collective_rpc(self, method: str) -> list[dict[str, str]]:
        assert method == "snapshot_evidence"
        return [self.evidence]
