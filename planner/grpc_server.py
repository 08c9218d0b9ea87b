"""The same plugin as an external process: ``python -m planner.grpc_server --listen 127.0.0.1:0 --config FILE``.

With ``--register GATEWAY`` it announces itself to the planner's registration gateway, Unregister first: a
plugin that crashed is still on the planner's list, and a second Register would be refused. It registers
again whenever the planner does not know it any more, and unregisters when it is told to stop.

Needs Dynamo's planner package for the protocol (``dynamo.planner.plugins.proto.v1``), nothing else of it.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import logging
import signal
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from planner.collector import set_aside_what_stays
from planner.config import NEEDS, PLUGIN_ID, PRIORITY
from planner.engine import ScalingEngine, engine_from_options

log = logging.getLogger(__name__)

PROTOCOL_VERSION = "1.0"
HEARTBEAT_INTERVAL_S = 5.0
CALL_TIMEOUT_S = 5.0
STOP_GRACE_S = 2.0


@dataclass(frozen=True)
class Registration:
    """How to announce the plugin. ``gateway`` is ``host:port`` or ``unix:/path``."""

    gateway: str
    token: str = ""
    plugin_id: str = PLUGIN_ID
    priority: int = PRIORITY


def servicer(engine: ScalingEngine) -> Any:
    """Returns a servicer for both ProposePlugin and PluginLifecycle."""
    from dynamo.planner.plugins.proto.v1 import plugin_pb2 as pb
    from dynamo.planner.plugins.proto.v1 import plugin_pb2_grpc as rpc

    class Servicer(rpc.ProposePluginServicer, rpc.PluginLifecycleServicer):  # type: ignore[misc] # generated, untyped
        async def Propose(self, request: Any, context: Any) -> Any:
            response = pb.ProposeStageResponse()
            proposals = engine.propose(request.context)
            for proposal in proposals:
                for replicas, kind in ((proposal.replicas, pb.SET), (proposal.floor, pb.AT_LEAST)):
                    if replicas is not None:
                        response.override.targets.add(
                            sub_component_type=proposal.role.value, replicas=replicas, type=kind
                        )
            if response.override.targets:
                reasons = (f"{proposal.role.value}: {proposal.reason}" for proposal in proposals)
                response.override.reason = " | ".join(reasons)
            else:
                response.accept.SetInParent()
            return response

        async def Bootstrap(self, request: Any, context: Any) -> Any:
            return pb.BootstrapResponse(ok=True, message="snapshot scaling")

        async def Reset(self, request: Any, context: Any) -> Any:
            engine.reset()
            return pb.ResetResponse(ok=True)

    return Servicer()


async def serve(
    engine: ScalingEngine,
    listen: str,
    registration: Registration | None,
    stop: asyncio.Event,
    bound: asyncio.Future[str] | None = None,
) -> None:
    """Serves until ``stop`` is set.

    Args:
        listen: ``host:port``; port 0 takes a free one.
        bound: gets the address when the server listens.

    Raises:
        OSError: ``listen`` cannot be bound.
    """
    import grpc
    from dynamo.planner.plugins.proto.v1 import plugin_pb2_grpc as rpc

    server = grpc.aio.server()
    plugin = servicer(engine)
    rpc.add_ProposePluginServicer_to_server(plugin, server)
    rpc.add_PluginLifecycleServicer_to_server(plugin, server)
    host = listen.rpartition(":")[0]
    try:
        port = server.add_insecure_port(listen)
    except RuntimeError as error:
        raise OSError(f"cannot listen on {listen}: {error}") from error
    if port == 0:
        raise OSError(f"cannot listen on {listen}: address in use or not of this host")
    await engine.start()
    set_aside_what_stays()
    await server.start()
    address = f"{host}:{port}"
    log.info("serving on %s", address)
    if bound is not None:
        bound.set_result(address)
    announcer = (
        asyncio.create_task(_stay_registered(registration, address), name="registration") if registration else None
    )
    try:
        await stop.wait()
    finally:
        if announcer is not None and registration is not None:
            announcer.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await announcer
            await _unregister(registration, "graceful_shutdown")
            log.info("unregistered from %s", registration.gateway)
        await server.stop(STOP_GRACE_S)
        await engine.close()


async def _stay_registered(registration: Registration, address: str) -> None:
    """Registers, and again when a heartbeat says that the planner does not know the plugin."""
    import grpc
    from dynamo.planner.plugins.proto.v1 import plugin_pb2 as pb
    from dynamo.planner.plugins.proto.v1 import plugin_pb2_grpc as rpc

    registered = False
    async with grpc.aio.insecure_channel(registration.gateway) as channel:
        registry = rpc.PluginRegistryStub(channel)
        while True:
            try:
                if registered:
                    beat = await registry.Heartbeat(
                        pb.HeartbeatRequest(plugin_id=registration.plugin_id, auth_token=registration.token),
                        timeout=CALL_TIMEOUT_S,
                    )
                    registered = beat.ok
                if not registered:
                    await _unregister(registration, "version_upgrade")
                    answer = await registry.Register(_request(pb, registration, address), timeout=CALL_TIMEOUT_S)
                    registered = answer.accepted
                    if registered:
                        log.info("registered as %s with %s", registration.plugin_id, registration.gateway)
                    else:
                        log.warning("%s refused the registration: %s", registration.gateway, answer.reject_reason)
            except grpc.aio.AioRpcError as error:
                registered = False
                log.info("gateway %s: %s %s", registration.gateway, error.code().name, error.details())
            await asyncio.sleep(HEARTBEAT_INTERVAL_S if registered else 1.0)


async def _unregister(registration: Registration, why: str) -> None:
    import grpc
    from dynamo.planner.plugins.proto.v1 import plugin_pb2 as pb
    from dynamo.planner.plugins.proto.v1 import plugin_pb2_grpc as rpc

    async with grpc.aio.insecure_channel(registration.gateway) as channel:
        with contextlib.suppress(grpc.aio.AioRpcError):
            await rpc.PluginRegistryStub(channel).Unregister(
                pb.UnregisterRequest(plugin_id=registration.plugin_id, reason=why, auth_token=registration.token),
                timeout=CALL_TIMEOUT_S,
            )


def _request(pb: Any, registration: Registration, address: str) -> Any:
    return pb.RegisterRequest(
        plugin_id=registration.plugin_id,
        plugin_type="propose",
        priority=registration.priority,
        endpoint=f"grpc://{address}",
        version="1",
        hold_policy=pb.HOLD_LAST,
        needs=list(NEEDS),
        protocol_version=PROTOCOL_VERSION,
        auth_token=registration.token,
    )


def main(arguments: list[str] | None = None) -> int:
    options = _parser().parse_args(arguments)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s", stream=sys.stderr)
    try:
        config = yaml.safe_load(options.config.read_text(encoding="utf-8"))
        if not isinstance(config, dict):
            raise ValueError("expected a mapping with at least 'roles'")
        engine = engine_from_options(**config)
    except (OSError, TypeError, ValueError, yaml.YAMLError) as error:
        print(f"{options.config}: {error}", file=sys.stderr)
        return 2
    registration = None
    if options.register:
        token = options.token_file.read_text(encoding="utf-8").strip() if options.token_file else ""
        registration = Registration(options.register, token, options.plugin_id, options.priority)
    try:
        asyncio.run(_main(engine, options.listen, registration))
    except OSError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


async def _main(engine: ScalingEngine, listen: str, registration: Registration | None) -> None:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop.set)
    bound: asyncio.Future[str] = loop.create_future()
    bound.add_done_callback(lambda done: print(f"listening {done.result()}", flush=True))
    await serve(engine, listen, registration, stop, bound)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m planner.grpc_server", description="The scaling plugin over gRPC.")
    parser.add_argument("--listen", required=True, help="host:port to serve on; port 0 takes a free one")
    parser.add_argument(
        "--config", required=True, type=Path, help="YAML: the arguments of SnapshotScaling, roles first"
    )
    parser.add_argument("--register", metavar="GATEWAY", help="the planner's gateway: host:port or unix:/path")
    parser.add_argument("--token-file", type=Path, help="file with the shared secret for the gateway")
    parser.add_argument("--plugin-id", default=PLUGIN_ID)
    parser.add_argument("--priority", type=int, default=PRIORITY, help="Dynamo's own propose plugins have 10 and 20")
    return parser


if __name__ == "__main__":
    sys.exit(main())
