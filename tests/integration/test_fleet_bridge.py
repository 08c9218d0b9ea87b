"""The Dynamo child and its keeper: children that misbehave, and the real one with a real worker."""

from __future__ import annotations

import asyncio
import os
import sys
import textwrap
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from dynamo_snapshot.discovery.client import connected
from dynamo_snapshot.fleet import decisions
from dynamo_snapshot.fleet.decisions import DynamoPlanner
from dynamo_snapshot.fleet.dynamo_bridge import LoadReader
from dynamo_snapshot.local.tiny_model import write_tiny_model
from dynamo_snapshot.model import Decision, WorkerLoad

DECIDES = """
import json, sys
print(json.dumps({"type": "alive"}), flush=True)
print(json.dumps({"type": "decided", "id": 3, "prefill": None, "decode": 4}), flush=True)
line = sys.stdin.readline()
open(sys.argv[0] + ".heard", "a").write(line)
sys.stdin.readline()
"""


class Heard:
    def __init__(self) -> None:
        self.decisions: list[Decision] = []
        self.loads: dict[int, WorkerLoad] = {}

    def on_loads(self, loads: dict[int, WorkerLoad]) -> None:
        self.loads = loads


@asynccontextmanager
async def listening(planner: DynamoPlanner) -> AsyncIterator[Heard]:
    heard = Heard()
    task = asyncio.create_task(planner.run(heard.decisions.append, heard.on_loads))
    try:
        yield heard
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def until(what: Callable[[], bool], timeout_s: float = 20.0) -> None:
    async with asyncio.timeout(timeout_s):
        while not what():  # noqa: ASYNC110  processes bring it about
            await asyncio.sleep(0.01)


def running(pids: Path) -> list[str]:
    return [pid for pid in pids.read_text().split() if Path("/proc", pid).exists()]


def keeper(url: str, folder: Path, code: str, namespace: str = "bridge") -> DynamoPlanner:
    script = folder / "child.py"
    script.write_text(textwrap.dedent(code))
    return DynamoPlanner(url, namespace, [], command=[sys.executable, str(script)])


async def test_a_decision_has_the_revision_of_its_key_and_is_acknowledged(etcd_url: str, tmp_path: Path) -> None:
    namespace = f"bridge-{time.monotonic_ns()}"
    key = f"v1/{namespace}/planner/decision_id".encode()
    async with connected(etcd_url) as client:
        await client.put(key, b"2")
        await client.put(key, b"3")
        present = await client.get(key)
    assert present is not None
    planner = keeper(etcd_url, tmp_path, DECIDES, namespace)
    async with listening(planner) as heard:
        await until(lambda: bool(heard.decisions))
        decision = Decision(revision=present.create_revision, id=3, decode=4)
        assert heard.decisions == [decision]
        planner.complete(decision)
        await until((tmp_path / "child.py.heard").exists)
        await until(lambda: '"id":3' in (tmp_path / "child.py.heard").read_text())


async def test_a_decision_comes_through_though_etcd_does_not_answer(
    free_port: Callable[[], int], tmp_path: Path
) -> None:
    async with listening(keeper(f"http://127.0.0.1:{free_port()}", tmp_path, DECIDES)) as heard:
        await until(lambda: bool(heard.decisions))
        assert heard.decisions[0].decode == 4


async def test_an_id_of_which_nobody_can_tell_whether_it_is_new_is_heard_again_later(
    free_port: Callable[[], int], tmp_path: Path
) -> None:
    code = """
    import os, sys, time
    for number in (4, 6):  # a planner was restarted in between, and uses its id again
        os.write(1, b'{"type":"decided","id":0,"prefill":null,"decode":%d}\\n' % number)
    time.sleep(60)
    """
    async with listening(keeper(f"http://127.0.0.1:{free_port()}", tmp_path, code)) as heard:
        await until(lambda: bool(heard.decisions))
        await asyncio.sleep(1.0)
        assert [decision.decode for decision in heard.decisions] == [4], "the second would count as a repetition"


PLANNER = """
import asyncio, os, sys

async def main():
    from dynamo._core import VirtualConnectorCoordinator
    from dynamo.runtime import DistributedRuntime

    runtime = DistributedRuntime(asyncio.get_running_loop(), "etcd", "tcp", event_plane="nats")
    connector = VirtualConnectorCoordinator(runtime, sys.argv[1], 1, 10, 3)
    await connector.async_init()
    for number in sys.argv[2:]:
        await connector.update_scaling_decision(None, int(number))
        await asyncio.sleep(1.2)  # the connector looks once a second whether its last decision was acknowledged
    os._exit(0)

asyncio.run(main())
"""


async def decide(namespace: str, numbers: list[int], environment: dict[str, str]) -> None:
    """One life of a planner: Dynamo's own connector publishes ``numbers`` with ids from 0."""
    planner = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", PLANNER, namespace, *map(str, numbers)),
        env=environment,
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.DEVNULL,
    )
    assert await planner.wait() == 0


async def test_a_planner_that_was_restarted_and_counts_from_0_again_is_heard(
    etcd_url: str, nats_url: str, tmp_path: Path
) -> None:
    namespace = f"anew{time.monotonic_ns()}"
    environment = {**os.environ, "ETCD_ENDPOINTS": etcd_url, "NATS_SERVER": nats_url, "DYN_TCP_RPC_HOST": "127.0.0.1"}
    planner = DynamoPlanner(etcd_url, namespace, [], environment=environment)
    decided: list[Decision] = []

    def take(decision: Decision) -> None:
        decided.append(decision)
        planner.complete(decision)

    listener = asyncio.create_task(planner.run(take, lambda loads: None))
    try:
        await decide(namespace, [1, 4, 3], environment)
        await until(lambda: [decision.decode for decision in decided] == [1, 4, 3])
        async with connected(etcd_url) as client:
            await client.delete_prefix(f"v1/{namespace}/planner/num".encode())
            await client.delete(f"v1/{namespace}/planner/decision_id".encode())  # as the end of its lease does
        await decide(namespace, [5], environment)
        await until(lambda: decided[-1].decode == 5)
        assert decided[-1].id == 0
        assert decided[-1].revision > decided[-2].revision, "so it is no repetition"
        await decide(namespace, [2], environment)
        await until(lambda: decided[-1].decode == 2)
        assert [decision.decode for decision in decided] == [1, 4, 3, 5, 2], "each is heard once"
    finally:
        listener.cancel()
        await asyncio.gather(listener, return_exceptions=True)


@pytest.mark.parametrize(
    "ending",
    ["sys.exit(1)", "print('nonsense', flush=True); time.sleep(60)", "time.sleep(60)", "sys.stdout.write('x' * 2**21)"],
)
async def test_a_child_that_ends_babbles_or_hangs_is_replaced(
    ending: str, etcd_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(decisions, "SILENT_S", 1.0)
    code = f"""
    import json, os, sys, time
    with open(sys.argv[0] + ".lives", "a") as lives:
        lives.write(str(os.getpid()) + chr(10))
    {ending}
    """
    async with listening(keeper(etcd_url, tmp_path, code)):
        lives = tmp_path / "child.py.lives"
        await until(lambda: lives.exists() and len(lives.read_text().split()) >= 3)
    assert running(lives) == [], "a child outlives its keeper"


async def test_a_child_that_cannot_be_started_is_tried_again(etcd_url: str, tmp_path: Path) -> None:
    program, later = tmp_path / "child", tmp_path / "later"
    later.write_text(f"#!{sys.executable}\n{DECIDES}")
    later.chmod(0o755)
    planner = DynamoPlanner(etcd_url, "bridge", [], command=[str(program)])
    with capture_logs() as logs:
        async with listening(planner) as heard:
            await until(lambda: "bridge_not_started" in {entry["event"] for entry in logs})
            planner.complete(Decision(revision=1, id=1))
            later.rename(program)
            await until(lambda: bool(heard.decisions))


async def test_the_real_child_tells_the_load_of_a_real_worker(
    etcd_url: str, nats_url: str, tmp_path: Path, free_port: Callable[[], int]
) -> None:
    namespace = f"loads{time.monotonic_ns()}"
    model = tmp_path / "model"
    write_tiny_model(model)
    environment = {
        **os.environ,
        "ETCD_ENDPOINTS": etcd_url,
        "NATS_SERVER": nats_url,
        "DYN_NAMESPACE": namespace,
        "DYN_DISCOVERY_BACKEND": "etcd",
        "DYN_REQUEST_PLANE": "tcp",
        "DYN_EVENT_PLANE": "nats",
        "DYN_TCP_RPC_HOST": "127.0.0.1",
        "DYN_TCP_RPC_PORT": str(free_port()),
        "DYN_TCP_RESPONSE_STREAM_HOST": "127.0.0.1",
        "HF_HUB_OFFLINE": "1",
    }
    worker = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "dynamo.mocker", "--model-path", str(model), "--model-name", "tiny"),
        *("--event-plane", "nats", "--endpoint", f"dyn://{namespace}.backend.generate"),
        env=environment,
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.DEVNULL,
    )
    child = {**environment}
    child.pop("DYN_TCP_RPC_PORT")
    planner = DynamoPlanner(etcd_url, namespace, [f"{namespace}.backend.generate"], environment=child)
    try:
        async with listening(planner) as heard:
            await until(lambda: bool(heard.loads), 40)
            async with connected(etcd_url) as client:
                prefix = f"v1/instances/{namespace}/backend/generate/".encode()
                ids = {int(item.key.rsplit(b"/", 1)[1], 16) for item in await client.get_prefix(prefix)}
            assert set(heard.loads) == ids
            load = next(iter(heard.loads.values()))
            assert (load.running, load.queued) == (0, 0)
            await asyncio.sleep(4)
            assert time.time() - next(iter(heard.loads.values())).at < 3, "an idle worker goes on telling its load"
    finally:
        worker.kill()
        await worker.wait()


def test_loads_are_summed_over_ranks_and_as_old_as_their_oldest_message() -> None:
    from dynamo.common.forward_pass_metrics import (
        ForwardPassMetrics,
        QueuedRequestMetrics,
        ScheduledRequestMetrics,
        encode,
    )

    def message(rank: int, counter: int, running: int, queued: int) -> bytes:
        data: bytes = encode(
            ForwardPassMetrics(
                worker_id="7",
                dp_rank=rank,
                counter_id=counter,
                scheduled_requests=ScheduledRequestMetrics(num_prefill_requests=1, num_decode_requests=running),
                queued_requests=QueuedRequestMetrics(num_prefill_requests=queued),
            )
        )
        return data

    reader = LoadReader()
    first = {("7", 0): message(0, 1, 2, 0), ("7", 1): message(1, 1, 3, 4)}
    assert reader.read(first, 10.0) == {"7": WorkerLoad(running=7, queued=4, at=10.0)}
    second = {**first, ("7", 1): message(1, 2, 3, 4)}
    assert reader.read(second, 11.0)["7"].at == 10.0
    assert reader.read({("", 0): message(0, 1, 1, 1)}, 12.0) == {}
