"""The plugin in Dynamo's own planner, in process and over gRPC, with real workers, etcd and NATS."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import signal
import sys
import time
import uuid
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
import yaml
from support.dynamo_world import environment, inherited, instances, models

from dynamo_snapshot.fleet.hints import NatsHints
from dynamo_snapshot.model import (
    FleetStatus,
    PoolStatus,
    ReplicaState,
    ReplicaStatus,
    ScalingHint,
    StartTimes,
    Way,
    encode,
)
from dynamo_snapshot.replay.chat import Endpoint
from dynamo_snapshot.replay.decisions.anew import verify
from dynamo_snapshot.replay.load import LoadGenerator
from dynamo_snapshot.replay.trace import TraceRequest
from planner.config import RoleBounds, external_planner_config, planner_config, plugin_options

START_S = 60.0
"""Dynamo's planner takes 13 to 25 seconds: imports, and ten seconds of waiting for an optional endpoint."""


@asynccontextmanager
async def process(command: list[str], variables: dict[str, str], log: Path, **pipes: Any) -> AsyncIterator[Any]:
    """Runs ``command`` until the block ends, then SIGTERM and, after a while, SIGKILL."""
    with log.open("ab") as output:
        child = await asyncio.create_subprocess_exec(
            *command, env={**inherited(), **variables}, stderr=output, **{"stdout": output, **pipes}
        )
    try:
        yield child
    finally:
        if child.returncode is None:
            child.terminate()
            try:
                async with asyncio.timeout(10):
                    await child.wait()
            except TimeoutError:
                child.kill()
                await child.wait()


class World:
    """A namespace with workers, and the other end of the planner's decisions."""

    def __init__(
        self, stack: AsyncExitStack, variables: dict[str, str], etcd_url: str, model: Path, folder: Path
    ) -> None:
        self.stack = stack
        self.variables = variables
        self.etcd_url = etcd_url
        self.namespace = variables["DYN_NAMESPACE"]
        self.model = model
        self.folder = folder
        self.workers: list[Any] = []
        self.bridge: Any = None

    async def start(self, name: str, command: list[str], **pipes: Any) -> Any:
        log = self.folder / f"{name}.log"
        return await self.stack.enter_async_context(process(command, self.variables, log, **pipes))

    async def add_worker(self) -> None:
        command = [sys.executable, "-m", "dynamo.mocker", "--model-path", str(self.model)]
        command += ["--model-name", self.namespace, "--endpoint", f"dyn://{self.namespace}.backend.generate"]
        self.workers.append(await self.start(f"worker-{len(self.workers)}", [*command, "--speedup-ratio", "0.2"]))
        await self.until(lambda: len(instances(self.etcd_url, self.namespace)) == len(self.workers))

    async def remove_worker(self) -> None:
        worker = self.workers.pop()
        worker.terminate()
        async with asyncio.timeout(20):
            await worker.wait()

    async def open_bridge(self) -> None:
        command = [sys.executable, "-m", "dynamo_snapshot.fleet.dynamo_bridge", "--namespace", self.namespace]
        self.bridge = await self.start("bridge", command, stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE)

    async def decision(self, timeout: float = 20) -> int:
        """The next decision's decode replicas, acknowledged."""
        async with asyncio.timeout(timeout):
            while line := await self.bridge.stdout.readline():
                message = json.loads(line)
                if "decode" in message:
                    self.bridge.stdin.write(json.dumps({"id": message["id"]}).encode() + b"\n")
                    return int(message["decode"])
        raise AssertionError("the bridge ended")

    async def until(self, condition: Callable[[], bool], timeout: float = 30) -> None:
        async with asyncio.timeout(timeout):
            while True:
                if await asyncio.to_thread(condition):
                    return
                await asyncio.sleep(0.05)


@pytest.fixture
async def world(
    tmp_path: Path, etcd_url: str, nats_url: str, tiny_model: Path, frontend_url: str
) -> AsyncIterator[World]:
    """One worker, seen by the shared frontend under the namespace's name."""
    namespace = f"planner-{uuid.uuid4().hex[:8]}"
    variables = environment(etcd_url, nats_url, namespace, SCALING_CHECK_INTERVAL="1", SCALING_MAX_WAIT_TIME="10")
    async with AsyncExitStack() as stack:
        made = World(stack, variables, etcd_url, tiny_model, tmp_path)
        await made.add_worker()
        await made.open_bridge()
        await made.until(lambda: namespace in models(frontend_url))
        yield made


def configuration(world: World) -> dict[str, Any]:
    return planner_config(
        namespace=world.namespace,
        model_name=world.namespace,
        roles={"decode": RoleBounds(1, 3)},
        tick_s=0.25,
        target_requests_per_replica=3,
        scale_down_after_s=3,
        cooldown_s=0.5,
        decision_log_path=str(world.folder / "decisions.jsonl"),
    )


async def start_planner(world: World, config: dict[str, Any]) -> Any:
    path = world.folder / "planner.yaml"
    path.write_text(yaml.safe_dump(config))
    return await world.start("planner", [sys.executable, "-m", "dynamo.planner", "--config", str(path)])


def decisions(world: World) -> list[dict[str, Any]]:
    path = world.folder / "decisions.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    return [entry for entry in map(json.loads, lines) if "role" in entry]


def spike(frontend_url: str, world: World) -> LoadGenerator:
    """Six requests at once, for some 2.5 s."""
    return LoadGenerator([TraceRequest(0.0, 16, 80)] * 6, Endpoint(frontend_url, world.namespace))


@pytest.mark.timeout(180)
async def test_a_spike_becomes_a_decision_and_its_end_another(world: World, frontend_url: str) -> None:
    await start_planner(world, configuration(world))
    await world.until(lambda: bool(decisions(world)), START_S)
    assert decisions(world)[0]["action"] == "start"

    load = asyncio.create_task(spike(frontend_url, world).run())
    assert await world.decision() == 2
    await world.add_worker()
    assert (await load).failed == 0

    assert await world.decision() == 1
    await world.remove_worker()
    acted = {entry["action"]: entry for entry in decisions(world)}
    # The tick may fall between the first and the last of the six.
    assert re.match(
        r"raise 1 -> 2: [456] running \+ 0 queued on 1 of 1 ready workers, 3 a rep", acted["raise"]["reason"]
    )
    assert "lower 2 -> 1: 0 running + 0 queued on 2 of 2 ready workers" in acted["lower"]["reason"]


@pytest.mark.timeout(180)
async def test_the_same_over_grpc_and_again_after_the_plugin_was_killed(world: World, frontend_url: str) -> None:
    config = configuration(world)
    gateway = f"unix://{world.folder}/gateway.sock"
    options, token = world.folder / "plugin.yaml", world.folder / "token"
    options.write_text(yaml.safe_dump(plugin_options(config)))
    token.write_text("a secret\n")
    await start_planner(world, external_planner_config(config, gateway, "a secret"))
    command = [sys.executable, "-m", "planner.grpc_server", "--listen", "127.0.0.1:0", "--config", str(options)]
    command += ["--register", gateway, "--token-file", str(token)]

    first = await world.start("plugin-1", command)
    await world.until(lambda: bool(decisions(world)), START_S)
    first.send_signal(signal.SIGKILL)
    await first.wait()

    before = len(decisions(world))
    second = await world.start("plugin-2", command)
    await world.until(lambda: len(decisions(world)) > before)
    assert decisions(world)[before]["action"] == "start"

    load = asyncio.create_task(spike(frontend_url, world).run())
    assert await world.decision() == 2
    await load

    second.send_signal(signal.SIGTERM)
    async with asyncio.timeout(10):
        assert await second.wait() == 0
    assert "unregistered" in (world.folder / "plugin-2.log").read_text()


@pytest.mark.timeout(240)
async def test_a_planner_that_was_killed_goes_on_with_what_it_learnt(world: World, frontend_url: str) -> None:
    log, learnt = world.folder / "decisions.jsonl", world.folder / "learnt.json"
    config = planner_config(
        namespace=world.namespace,
        model_name=world.namespace,
        roles={"decode": RoleBounds(1, 3)},
        tick_s=0.25,
        ttft_objective_s=2.0,
        decision_log_path=str(log),
        learnt_path=str(learnt),
    )
    first = await start_planner(world, config)
    await world.until(lambda: bool(decisions(world)), START_S)
    assert decisions(world)[0]["forecast"] is None
    requests = [TraceRequest(0.25 * number, 1500, 8) for number in range(150)]
    async with meanwhile(acknowledge(world)):
        assert (await LoadGenerator(requests, Endpoint(frontend_url, world.namespace)).run()).failed == 0
        await world.until(learnt.exists)
        first.send_signal(signal.SIGKILL)
        await first.wait()
        before = len(decisions(world))
        second = await start_planner(world, config)
        await world.until(lambda: len(decisions(world)) > before + 20, START_S)
    second.send_signal(signal.SIGKILL)
    await second.wait()

    begins = decisions(world)[before]
    assert (begins["action"], begins["tick"]) == ("start", 1)
    assert begins["forecast"]["alike"] > 0
    assert "going on with what was learnt until" in (world.folder / "planner.log").read_text()
    found = verify(log)
    assert found.holds, found.first
    assert found.same == len(decisions(world))


async def tell_of_the_fleet(path: Path) -> None:
    """A fleet controller's status, three times a second, as of a fleet that restores one replica after another."""
    while True:
        at = time.time()
        pool = PoolStatus(pool="main", role="decode", target=2, achievable=2, serving=1, pending=1, draining=0)
        replica = ReplicaStatus(
            replica_id="r", pool="main", node="n", state=ReplicaState.RESTORING, since=at - at % 2, way=Way.RESTORE
        )
        times = StartTimes(pool="main", way=Way.RESTORE, seconds=(0.7, 0.9, 1.1))
        status = FleetStatus(fleet="f", at=at, fence=1, pools=(pool,), replicas=(replica,), start_times=(times,))
        path.with_suffix(".new").write_bytes(encode(status))
        path.with_suffix(".new").replace(path)
        await asyncio.sleep(0.3)


@asynccontextmanager
async def meanwhile(*work: Coroutine[Any, Any, None]) -> AsyncIterator[None]:
    tasks = [asyncio.create_task(each) for each in work]
    try:
        yield
    finally:
        for task in tasks:
            task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.gather(*tasks)


async def acknowledge(world: World) -> None:
    while True:
        await world.decision(60)


@asynccontextmanager
async def hints_heard(nats_url: str, namespace: str) -> AsyncIterator[list[ScalingHint]]:
    """What a fleet controller would hear."""
    heard: list[ScalingHint] = []
    listening = asyncio.create_task(NatsHints(nats_url, namespace).run(heard.append))
    try:
        yield heard
    finally:
        listening.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await listening


async def verified(log: Path) -> tuple[int | None, str]:
    command = [sys.executable, "-m", "dynamo_snapshot.cli.main", "policy", "verify", str(log)]
    child = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE, env=inherited())
    output, _ = await child.communicate()
    return child.returncode, output.decode()


@pytest.mark.timeout(120)
async def test_what_a_live_planner_saw_is_decided_again_the_same_and_its_hints_are_heard(
    world: World, frontend_url: str, nats_url: str
) -> None:
    log, status = world.folder / "decisions.jsonl", world.folder / "fleet-status.json"
    config = planner_config(
        namespace=world.namespace,
        model_name=world.namespace,
        roles={"decode": RoleBounds(1, 3)},
        tick_s=0.25,
        ttft_objective_s=0.5,
        miss_cost_s=1.0,
        hints="park",
        scale_down_after_s=2,
        fleet_status_path=str(status),
        decision_log_path=str(log),
    )
    requests = [TraceRequest(0.5 * (number // 12), 3000, 12) for number in range(24)]
    async with (
        meanwhile(tell_of_the_fleet(status), acknowledge(world)),
        hints_heard(nats_url, world.namespace) as hints,
    ):
        planner = await start_planner(world, config)
        await world.until(lambda: bool(decisions(world)), START_S)
        load = asyncio.create_task(LoadGenerator(requests, Endpoint(frontend_url, world.namespace)).run())
        await world.add_worker()
        assert (await load).failed == 0
        await world.remove_worker()
        await world.until(lambda: any(entry["action"] == "lower" for entry in decisions(world)))
    planner.terminate()
    async with asyncio.timeout(20):
        await planner.wait()

    made = decisions(world)
    assert {"start", "raise", "hold", "lower"} <= {entry["action"] for entry in made}
    assert any(entry["forecast"] for entry in made)
    assert any(entry["observation"]["pool"]["starting"] for entry in made)
    assert any(len(entry["observation"]["samples"]) == 2 for entry in made)
    said = [entry["hint"] for entry in made if entry["hint"]]
    heard = [msgspec.to_builtins(hint.decode) for hint in hints]
    assert heard
    assert all({"parked": None, "prefetch": False, **each} in said for each in heard)
    found = verify(log)
    assert found.holds, found.first
    assert found.same == len(made)
    status_code, said = await verified(log)
    assert status_code == 0
    assert f"{len(made)} of {len(made)} decisions came out the same when they were decided anew." in said

    lines = log.read_bytes().splitlines()
    for index, line in enumerate(lines):
        if b'"action":"raise"' in line:
            lines[index] = line.replace(b'"action":"raise","replicas":', b'"action":"raise","replicas":1')
    log.write_bytes(b"\n".join(lines) + b"\n")
    status_code, said = await verified(log)
    assert status_code == 1
    assert "decode: replicas is 1" in said
