"""One replica of ``dynamo.vllm``, captured, restored, drained and killed by the pipelines of a node of its own."""

from __future__ import annotations

import asyncio
import os
import re
import time
from pathlib import Path
from typing import Any

from gpu.dynamo_deployment import SOON_S, World
from support.dynamo_world import models

from dynamo_snapshot.agent.direct import Direct
from dynamo_snapshot.agent.replica import Replica
from dynamo_snapshot.model import OrderKind, Outcome
from worker_hooks.control import WorkerState
from worker_hooks.guard import tree
from worker_hooks.proc_net import connections

BOOT_S, ORDER_S = 400.0, 120.0
_SOCKET = re.compile(r"socket:\[(\d+)\]")


class VllmReplica:
    """The only replica of ``direct``'s node; what it does returns rows of figures."""

    def __init__(self, direct: Direct, world: World) -> None:
        self._direct, self._world = direct, world
        self.greedy: list[str] | None = None
        """What the source said."""

    async def warm(self) -> None:
        """The node's resident processes are up."""
        if self._direct.node.gpus is not None:
            await self._direct.node.gpus.warm()

    async def capture(self) -> tuple[str, dict[str, Any]]:
        """Cold start, capture, and a source that serves on; returns the snapshot's id."""
        direct, world = self._direct, self._world
        there, listed = world.instances(), models(world.frontend)
        began = direct.node.clock()
        start = direct.begin(OrderKind.COLD_START, BOOT_S, capture=True)
        if not await direct.waits_for_capture(start):
            await direct.done(start)  # raises what it failed of
            raise AssertionError(f"it waited for no capture: {self._state().evidence}")
        cold_start_s = direct.node.clock() - began
        assert world.instances() == there, "in discovery before its release"
        assert models(world.frontend) == listed, "a model before its release"
        listeners = await self.listeners()
        captured = await direct.done(direct.begin(OrderKind.CAPTURE, ORDER_S))
        assert captured.snapshot_id is not None
        released = direct.node.clock()
        started = await direct.done(start)
        instance, evidence = self._registered()
        await world.first_answer(released)
        self.greedy = await world.greedy(instance)
        row = {
            "cold_start_s": cold_start_s,
            "cold_start": _seconds(started),
            "capture_s": captured.finished_at - captured.started_at,
            "capture": _seconds(captured),
            "image_bytes": direct.node.store.manifest(captured.snapshot_id).size_bytes,
            "listeners_at_ready": listeners,
            "evidence": evidence,
            **await world.pinned(instance),
        }
        return captured.snapshot_id, row

    async def drain(self) -> float:
        """Returns how long it took, in seconds."""
        instance, _ = self._registered()
        drained = await self._direct.done(self._direct.begin(OrderKind.DRAIN, SOON_S))
        await self._direct.remove()
        await self._world.forgotten(instance)
        return drained.finished_at - drained.started_at

    async def prefetch(self, snapshot_id: str) -> float:
        """Has the weights read before the first restore; returns seconds."""
        gpus, captured = self._direct.node.gpus, self._direct.node.store.manifest(snapshot_id).capture
        if gpus is None or captured.cuda is None or not captured.weights:
            return 0.0
        return (await gpus.prefetch(captured.cuda.devices[0].uuid, captured.weights, pin=False)).seconds

    async def restore(self, snapshot_id: str, *, alone: bool = True) -> tuple[int, dict[str, Any]]:
        """One restore that serves; returns its instance id. ``alone``: nobody else could give the first answer."""
        direct, world = self._direct, self._world
        await direct.node.houses.ready()
        assert not (alone and world.instances())
        began = time.time()
        order = direct.begin(OrderKind.RESTORE, ORDER_S, snapshot_id=snapshot_id)
        asking = asyncio.create_task(world.first_answer(began)) if alone else None
        try:
            outcome = await direct.done(order)
            answered = await asking if asking is not None else {}
        finally:
            if asking is not None:
                asking.cancel()
        instance, evidence = self._registered()
        return instance, {
            **answered,
            "restored_s": outcome.finished_at - began,
            "phases": _seconds(outcome),
            "evidence": evidence,
            **await world.pinned(instance),
            "same_words": await world.greedy(instance) == self.greedy,
            "listeners": await self.listeners(),
        }

    async def kill(self, instance: int) -> None:
        await self._direct.remove()
        await self._world.gone(instance)

    async def listeners(self) -> list[str]:
        """Every TCP port that a process of the worker's listens on, and which."""
        house = self._replica().house
        assert house is not None
        inner = await house.holder.worker()
        root = house.host_pid(inner) if inner is not None else None
        assert root is not None
        found = set()
        for pid in tree(root):
            process = Path(f"/proc/{pid}")
            held = {match[1] for fd in (process / "fd").iterdir() if (match := _SOCKET.fullmatch(_link(fd)))}
            title = (process / "comm").read_text().strip()
            for each in connections(process / "net"):
                if str(each.inode) in held and each.protocol == "tcp" and each.remote is None:
                    found.add(f"{title}: {each.local}")
        return sorted(found)

    def _registered(self) -> tuple[int, dict[str, str]]:
        evidence = dict(self._state().evidence)
        return int(evidence["instance_id"]), evidence

    def _state(self) -> WorkerState:
        state = self._replica().state
        assert state is not None
        return state

    def _replica(self) -> Replica:
        assert self._direct.replica is not None
        return self._direct.replica


def _seconds(outcome: Outcome) -> dict[str, float]:
    return {phase.name: phase.seconds for phase in outcome.phases} | {"unaccounted": outcome.unaccounted_s}


def _link(path: Path) -> str:
    try:
        return os.readlink(path)
    except OSError:
        return ""
