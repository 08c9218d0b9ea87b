"""Controller, agent, CRIU, mocker, etcd, NATS and Dynamo's connector together: kept parked, woken, replaced."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable
from contextlib import ExitStack
from pathlib import Path

import pytest
from support.dynamo_world import environment, instances
from support.fleet_stand_ins import PlannerSide, planner_side

from dynamo_snapshot.agent.teardown import teardown
from dynamo_snapshot.bus.directory import DirectoryBus
from dynamo_snapshot.model import FleetStatus, OrderKind, ReplicaState, ReplicaStatus, Way, decode

FLEET = """
name: parked
namespace: {namespace}
model: {{name: tiny, path: {model}}}
agent: {{runtime_dir: {folder}/run, store_dir: {folder}/store, criu: {criu}, minimum_free_bytes: 0,
         rpc_ports: [{port}, {last}]}}
servers: {{etcd: "{etcd}", nats: "{nats}"}}
pools:
  decode:
    worker:
      command: [dynamo-snapshot-worker, run, --, python, -m, dynamo.mocker,
                --model-path, "{{model_path}}", --model-name, "{{model_name}}"]
      environment: {{MOCKER_RESIDENT_MIB: "40"}}
    parked: 1
    max_replicas: 4
"""


class Trial:
    def __init__(self, folder: Path, namespace: str, variables: dict[str, str], side: PlannerSide) -> None:
        self.folder, self.namespace, self.variables, self.side = folder, namespace, variables, side
        self.bus = DirectoryBus(folder / "run" / "bus")
        self.processes: dict[str, subprocess.Popen[bytes]] = {}

    def start(self, what: str, *arguments: str) -> None:
        with (self.folder / f"{what}.log").open("ab") as log:
            self.processes[what] = subprocess.Popen(
                [sys.executable, "-m", "dynamo_snapshot.cli.main", what, str(self.folder / "fleet.yaml"), *arguments],
                env={**os.environ, **self.variables}, stdin=subprocess.DEVNULL, stdout=log, stderr=log,
            )  # fmt: skip

    def status(self) -> FleetStatus | None:
        path = self.folder / "run" / "fleet-status.json"
        return decode(path.read_bytes(), FleetStatus) if path.exists() else None

    def replicas(self, state: ReplicaState) -> list[ReplicaStatus]:
        status = self.status()
        return [replica for replica in (status.replicas if status else ()) if replica.state is state]

    async def until(self, what: Callable[[], object], within_s: float = 60) -> None:
        end = time.monotonic() + within_s
        while not what():
            if time.monotonic() > end:
                logs = "".join((self.folder / f"{name}.log").read_text()[-2500:] for name in self.processes)
                pytest.fail(f"did not come true in {within_s} s: {self.status()}\n{logs}")
            await asyncio.sleep(0.01)

    def numbers(self) -> tuple[int, int]:
        return len(self.replicas(ReplicaState.SERVING)), len(self.replicas(ReplicaState.PARKED))

    async def pid_of(self, replica_id: str) -> int:
        report = (await self.bus.read_reported())["local"]
        return next(one.pid or 0 for one in report.replicas if one.replica_id == replica_id)


@pytest.fixture
async def trial(
    tmp_path: Path, etcd_url: str, nats_url: str, tiny_model: Path, criu: Path, free_port: Callable[[], int]
) -> AsyncIterator[Trial]:
    namespace = f"parked-{os.getpid()}-{time.monotonic_ns()}"
    port = free_port()
    (tmp_path / "fleet.yaml").write_text(
        FLEET.format(
            namespace=namespace, folder=tmp_path, etcd=etcd_url, nats=nats_url, model=tiny_model, criu=criu, port=port,
            last=port + 30,
        )
    )  # fmt: skip
    variables = environment(etcd_url, nats_url, namespace)
    with ExitStack() as stack:
        async with planner_side(namespace, {**os.environ, **variables}) as side:
            made = Trial(tmp_path, namespace, variables, side)
            for what, arguments in (("controller", ()), ("agent", ("--node", "local"))):
                made.start(what, *arguments)
            yield made
        for process in made.processes.values():
            process.send_signal(signal.SIGTERM)
            stack.callback(process.wait, 30)
    assert await teardown(tmp_path / "run") == []


async def test_parked_replicas_are_kept_woken_and_replaced(trial: Trial, etcd_url: str) -> None:
    await trial.until(lambda: trial.numbers() == (1, 1))
    (spare,) = trial.replicas(ReplicaState.PARKED)
    assert len(instances(etcd_url, trial.namespace)) == 1, "only what serves is in discovery"

    # One that dies is replaced, and is nobody that could be woken.
    os.kill(await trial.pid_of(spare.replica_id), signal.SIGKILL)
    await trial.until(
        lambda: trial.numbers() == (1, 1) and trial.replicas(ReplicaState.PARKED)[0].replica_id != spare.replica_id,
        within_s=90,
    )
    (spare,) = trial.replicas(ReplicaState.PARKED)

    assert "error" not in await trial.side.decide(2)
    await trial.until(lambda: len(trial.replicas(ReplicaState.SERVING)) == 2)
    woken = next(one for one in trial.replicas(ReplicaState.SERVING) if one.replica_id == spare.replica_id)
    assert woken.way is Way.WAKE
    assert woken.instance_id in instances(etcd_url, trial.namespace)
    status = trial.status()
    assert status is not None
    assert [len(times.seconds) for times in status.start_times if times.way is Way.WAKE] == [1]
    assert any(record.what.startswith("wake of") for record in status.decisions)

    # Its place among the parked is taken again, by a restore that nobody waited for.
    await trial.until(lambda: trial.numbers() == (2, 1))
    wanted = await trial.bus.read_wanted("local")
    assert wanted is not None
    assert OrderKind.RESTORE not in {order.kind for order in wanted.orders}
