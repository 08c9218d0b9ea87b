"""Snapshots at rest: scrubbed, admitted, removed by the pool's policy; discovery asked before a capture."""

from __future__ import annotations

import asyncio
import errno
import os
import shutil
from pathlib import Path
from typing import Any

import msgspec
import pytest

from dynamo_snapshot.agent.criu.command import Criu
from dynamo_snapshot.agent.house import HostHouses
from dynamo_snapshot.agent.journal import Journal, ReplicaRecord
from dynamo_snapshot.agent.node import Node
from dynamo_snapshot.agent.registered import asking
from dynamo_snapshot.agent.replica import Replica
from dynamo_snapshot.agent.upkeep import Upkeep
from dynamo_snapshot.config import Agent, SnapshotPolicy
from dynamo_snapshot.discovery.in_memory import InMemoryDiscovery
from dynamo_snapshot.errors import SnapshotError
from dynamo_snapshot.model import Instance, Reason, Way, WorkerSpec
from dynamo_snapshot.snapshots.compatibility import CompatibilityParts
from dynamo_snapshot.snapshots.manifest import Capture
from dynamo_snapshot.snapshots.segments import UNNAMED_FOR_S
from dynamo_snapshot.snapshots.store import SnapshotStore

PARTS = CompatibilityParts(
    engine="toy", engine_version="1", command=("toy",), environment={}, model_files=(), python="3", distributions={},
    image_digest="", architecture="x", kernel="k", cpu_features=(), criu="4", gpu_models=(), gpu_driver="",
)  # fmt: skip


def worker(replica_id: str, *, capture: bool, served: bool) -> Replica:
    record = ReplicaRecord(
        replica_id=replica_id, pool="toy", way=Way.COLD_START, incarnation="i", rpc_port=1, order_id="o", ordered_at=0,
        spec=WorkerSpec(command=("toy",)), capture=capture, served=served,
    )  # fmt: skip
    return Replica(record, lambda: 0.0, lambda: None)


class World:
    def __init__(self, folder: Path) -> None:
        self.now = 0.0
        self.changes = 0
        settings = Agent(runtime_dir=folder / "run", store_dir=folder / "store", scrub_interval_s=100)
        self.store = SnapshotStore(settings.store_dir, clock=lambda: self.now)

        async def parts(pool: str, spec: WorkerSpec) -> CompatibilityParts:
            return PARTS

        self.node = Node(
            settings=settings,
            houses=HostHouses(settings.runtime_dir),
            store=self.store,
            criu=Criu(Path("/bin/false"), "4"),
            journal=Journal(settings.runtime_dir / "journal"),
            parts=parts,
            clock=lambda: self.now,
            monotonic=lambda: self.now,
            on_change=self._count,
        )

    def _count(self) -> None:
        self.changes += 1

    def upkeep(self, keys: dict[str, str] | None = None, **policy: Any) -> Upkeep:
        """``keys``: the current one of each pool; of its only pool another than any snapshot has, unless given."""
        known = {"pool": "another"} if keys is None else keys
        return Upkeep(self.node, {"pool": SnapshotPolicy(**policy)}, lambda: known)

    def publish(self, kernel: str = "k") -> str:
        with self.store.stage("pool") as staging:
            (staging.path / "pages-1.img").write_bytes(b"p" * 5000)
            manifest = staging.publish(
                Capture(
                    pool="pool", compatibility=msgspec.structs.replace(PARTS, kernel=kernel), source_pid=300,
                    house="/h", log_path="/h/l", criu_version="4", kernel=kernel,
                )
            )  # fmt: skip
            return manifest.id


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path)


async def test_a_change_that_leaves_no_trace_is_found_by_the_scrub(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    snapshot = world.publish()
    upkeep = world.upkeep()
    await upkeep.once()
    assert [(one.id, one.admitted, one.reason) for one in upkeep.summaries] == [(snapshot, True, None)]

    def rotten(snapshot_id: str) -> None:
        raise SnapshotError(Reason.SNAPSHOT_CORRUPT, f"snapshot {snapshot_id}: pages-1.img has other content")

    monkeypatch.setattr(world.store, "verify", rotten)
    world.now = 99
    await upkeep.once()
    assert world.node.distrusted == {}, "not yet time"
    world.now = 101
    changes = world.changes
    await upkeep.once()
    assert "other content" in world.node.distrusted[snapshot]
    assert [(one.admitted, one.reason) for one in upkeep.summaries] == [(False, "snapshot_corrupt")]
    assert world.changes > changes


async def test_a_snapshot_from_elsewhere_is_digested_before_it_is_offered(world: World) -> None:
    snapshot = world.publish()
    shutil.rmtree(world.store.root / ".node")
    upkeep = world.upkeep()
    await upkeep.once()
    assert [(one.id, one.admitted) for one in upkeep.summaries] == [(snapshot, True)]
    shutil.rmtree(world.store.root / ".node")
    pages = world.store.images(snapshot) / "pages-1.img"
    pages.chmod(0o600)
    pages.write_bytes(b"q" * 5000)
    await upkeep.once()
    assert [(one.admitted, one.reason) for one in upkeep.summaries] == [(False, "snapshot_corrupt")]


async def test_retention_is_the_pools_and_spares_what_is_used(world: World) -> None:
    ids = []
    for kernel in ("k1", "k2", "k3"):
        world.now += 10
        ids.append(world.publish(kernel))
    upkeep = world.upkeep(keep=1)
    with world.store.use(ids[0]):
        await upkeep.once()
        assert {one.id for one in upkeep.summaries} == {ids[0]}
    world.now += 10
    newest = world.publish()
    await upkeep.once()
    assert [one.id for one in upkeep.summaries] == [newest]


async def test_nothing_goes_while_nobody_knows_what_is_current(world: World) -> None:
    snapshot = world.publish()
    keys: dict[str, str] = {}
    upkeep = world.upkeep(keys, keep_for_s=5)
    world.now += 100
    await upkeep.once()
    assert [one.id for one in upkeep.summaries] == [snapshot], "an agent that has just started knows no key yet"
    keys["pool"] = upkeep.summaries[0].compatibility_key
    await upkeep.once()
    assert [one.id for one in upkeep.summaries] == [snapshot], "the newest of the current key stays"
    keys["pool"] = "another"
    await upkeep.once()
    assert upkeep.summaries == ()


def instance(port: int) -> Instance:
    return Instance(
        instance_id=port, namespace="n", component="c", endpoint="generate", host="127.0.0.1", port=port
    )  # fmt: skip


async def test_discovery_says_whether_a_worker_is_registered_or_that_nobody_knows() -> None:
    discovery = InMemoryDiscovery()
    is_registered = asking(discovery)
    discovery.register(instance(20001))
    assert await is_registered(20001) is True
    assert await is_registered(20002) is False
    discovery.set_reachable(False)
    with pytest.raises(SnapshotError) as unknown:
        await is_registered(20002)
    assert unknown.value.reason is Reason.SERVER_UNREACHABLE


async def test_it_ends_when_it_is_told_to_in_the_moment_it_is_woken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """``asyncio.wait_for`` swallows that cancellation before Python 3.12, and the loop goes on for ever."""
    upkeep = World(tmp_path).upkeep()
    looked = asyncio.Event()

    async def once() -> None:
        looked.set()

    monkeypatch.setattr(upkeep, "once", once)
    running = asyncio.create_task(upkeep.run())
    await looked.wait()
    await asyncio.sleep(0.01)
    upkeep.wake()
    await asyncio.sleep(0)
    running.cancel()
    done, _ = await asyncio.wait({running}, timeout=2)
    assert done


async def test_a_disk_that_cannot_read_one_snapshot_keeps_no_other_waiting(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    bad, good = world.publish(), world.publish()
    shutil.rmtree(world.store.root / ".node" / "admitted")
    admit = world.store.admit

    def reads(snapshot_id: str) -> object:
        if snapshot_id == bad:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return admit(snapshot_id)

    monkeypatch.setattr(world.store, "admit", reads)
    upkeep = world.upkeep()
    await upkeep.once()
    found = {summary.id: summary for summary in upkeep.summaries}
    assert found[good].admitted
    assert not found[bad].admitted
    assert found[bad].reason == Reason.SNAPSHOT_CORRUPT


async def test_segments_that_nobody_names_go_but_not_while_a_worker_may_rely_on_them(tmp_path: Path) -> None:
    world = World(tmp_path)
    folder = world.store.segments.folder
    folder.mkdir(parents=True)
    world.store.stage("toy").discard()
    world.now = UNNAMED_FOR_S + 10
    for name in ("a" * 64, ".half-written"):
        (folder / name).write_bytes(b"weights")
        os.utime(folder / name, (5, 5))
    upkeep = world.upkeep()
    world.node.replicas["r"] = worker("r", capture=True, served=False)
    await upkeep.once()
    assert len(list(folder.iterdir())) == 2
    world.node.replicas["r"] = worker("r", capture=True, served=True)
    await upkeep.once()
    assert list(folder.iterdir()) == []
