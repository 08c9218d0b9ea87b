"""Prints forward-pass metrics as they come: ``dynamo_metrics.py NAMESPACE.COMPONENT.ENDPOINT``, one JSON line each.

A process of its own, for Dynamo's runtime cannot be torn down.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys


async def main(endpoint: str) -> None:
    from dynamo.common.forward_pass_metrics import decode
    from dynamo.llm import FpmEventSubscriber
    from dynamo.runtime import DistributedRuntime

    runtime = DistributedRuntime(asyncio.get_running_loop(), "etcd", "tcp", event_plane="nats")
    subscriber = FpmEventSubscriber(runtime.endpoint(endpoint))
    print(json.dumps({"ready": True}), flush=True)
    while (data := await asyncio.to_thread(subscriber.recv)) is not None:
        metrics = decode(data)
        if metrics is not None:
            scheduled = metrics.scheduled_requests
            requests = scheduled.num_prefill_requests + scheduled.num_decode_requests
            print(json.dumps({"worker_id": metrics.worker_id, "requests": requests}), flush=True)


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1]))
    os._exit(0)
