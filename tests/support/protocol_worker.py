"""A worker that speaks Dynamo's snapshot protocol by itself, in the order of Dynamo's own engines.

Run as a module under ``dynamo-snapshot-worker run``. It knows nothing of the hooks. Environment:
``ENGINE_FLAW`` (``self_test``: answers the health check with an error; ``socket``: keeps a connection open
at the capture), ``ENGINE_ORDER`` (``card-first``, as dynamo.vllm; ``serve-first``, as dynamo.sglang).
"""

import asyncio
import os
import random
import signal
import socket
import sys

from dynamo.common.snapshot import lifecycle
from dynamo.common.snapshot.restore_context import apply_snapshot_restore_env
from dynamo.common.utils.graceful_shutdown import install_signal_handlers
from dynamo.common.utils.runtime import create_runtime
from dynamo.llm import ModelInput, ModelType, WorkerType, register_model

MODEL, NAME = sys.argv[1:3]
FLAW = os.environ.get("ENGINE_FLAW", "")


class Engine:
    def __init__(self) -> None:
        self.paused = False
        self.resumed = 0
        self.asked = 0
        self.connection = None
        if FLAW == "socket":
            host, port = os.environ["ETCD_ENDPOINTS"].removeprefix("http://").split(":")
            self.connection = socket.create_connection((host, int(port)))

    async def pause(self, *arguments):
        self.paused = True

    async def resume(self, *arguments):
        self.paused = False
        self.resumed += 1

    def mark_resumed(self):
        pass

    async def generate(self, request, context):
        if self.paused:
            raise RuntimeError("asked while paused")
        self.asked += 1
        if request.get("health") and FLAW == "self_test":
            yield {"status": "error", "message": "wrong weights"}
            return
        for index in range(4):
            yield {"token_ids": [1000 + index], "finish_reason": "length" if index == 3 else None}


async def main():
    engine = Engine()
    config = lifecycle.SnapshotConfig.from_env()
    if config is not None:
        controller = lifecycle.EngineSnapshotController(
            engine=engine, pause_controller=engine, snapshot_config=config, pause_args=(None,)
        )
        if not await controller.wait_for_restore():
            os._exit(0)
        apply_snapshot_restore_env()
    runtime, loop = create_runtime(os.environ["DYN_DISCOVERY_BACKEND"], "tcp", os.environ.get("DYN_EVENT_PLANE"))
    if config is not None and hasattr(lifecycle, "elect_and_wake"):
        await lifecycle.elect_and_wake(engine, runtime)
    print(f"resumed={engine.resumed} random={random.random()}", flush=True)
    endpoint = runtime.endpoint(f"{os.environ['DYN_NAMESPACE']}.backend.generate")
    control = runtime.endpoint(f"{os.environ['DYN_NAMESPACE']}.backend.clear")
    install_signal_handlers(loop, runtime, [endpoint, control], grace_period_s=0.2)

    async def register():
        await register_model(
            ModelInput.Tokens, ModelType.Chat, endpoint, MODEL, NAME, worker_type=WorkerType.Aggregated,
            kv_cache_block_size=16,
        )  # fmt: skip

    async def clear(request, context):
        yield {}

    serving = [
        endpoint.serve_endpoint(engine.generate, health_check_payload={"token_ids": [1], "health": True}),
        control.serve_endpoint(clear),
    ]
    if os.environ.get("ENGINE_ORDER") == "serve-first":
        await asyncio.gather(*serving, register())
    else:
        await register()
        await asyncio.gather(*serving)


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    asyncio.run(main())
