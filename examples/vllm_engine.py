"""vLLM, in its normal process tree, as a worker whose weights stay out of its snapshot.

Run: python examples/vllm_engine.py --model FOLDER --segments FOLDER
It registers nowhere: it says REGISTERED in worker-state.json once its self-test has passed. To serve through Dynamo
give its own vLLM worker the same executor: `dynamo-snapshot-worker run -- python -m dynamo.vllm --model FOLDER
--enable-sleep-mode --distributed-executor-backend worker_hooks.engines.vllm.SnapshotExecutor`.
"""

import argparse
import asyncio
import logging
import os
import signal
from pathlib import Path

from worker_hooks.engines.vllm import EXECUTOR, VllmEngine, set_environment
from worker_hooks.hooks import Hooks, run
from worker_hooks.seccomp import block_io_uring
from worker_hooks.weights.segment import SEGMENTS_ENV


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="folder with configuration and safetensors; no tokenizer needed")
    parser.add_argument("--segments", type=Path, required=True, help="where weight segments are kept")
    parser.add_argument("--kv-cache-gib", type=float, default=8.0)
    parser.add_argument("--max-model-len", type=int, default=4096)
    parser.add_argument("--max-num-seqs", type=int, default=256, help="bounds the CUDA graphs that are captured")
    arguments = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    os.environ[SEGMENTS_ENV] = str(arguments.segments)
    set_environment()
    block_io_uring()

    async def alone(hooks: Hooks) -> None:
        from vllm import LLM

        llm = LLM(
            model=arguments.model,
            skip_tokenizer_init=True,
            enable_sleep_mode=True,
            distributed_executor_backend=EXECUTOR,
            kv_cache_memory_bytes=int(arguments.kv_cache_gib * (1 << 30)),
            max_model_len=arguments.max_model_len,
            max_num_seqs=arguments.max_num_seqs,
            disable_log_stats=True,
            seed=0,
        )
        engine = VllmEngine(llm, hooks.lifecycle.evidence)
        hooks.booted()
        await hooks.snapshot_point(engine.quiesce, engine.resume)
        await hooks.self_test(engine.self_test)
        hooks.registered()
        stopped = asyncio.Event()
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stopped.set)
        await stopped.wait()

    return run(alone, Hooks.from_environment())


if __name__ == "__main__":
    os._exit(main())
