"""One fleet on this host: brought up in order, watched, drained and taken down without a trace."""

from __future__ import annotations

import asyncio
import dataclasses
import time
from collections.abc import Callable
from pathlib import Path
from urllib.parse import urlsplit

import yaml

from dynamo_snapshot.agent.teardown import teardown
from dynamo_snapshot.bus.directory import FOLDER, DirectoryBus
from dynamo_snapshot.config import Fleet
from dynamo_snapshot.errors import SnapshotError
from dynamo_snapshot.local import leftovers, ownership, preflight, processes, servers
from dynamo_snapshot.local.etcd import Etcd
from dynamo_snapshot.local.keys import FleetKeys
from dynamo_snapshot.local.leftovers import Leftover
from dynamo_snapshot.local.service import Ready, Service, ServiceStatus, banner, http_ok
from dynamo_snapshot.local.supervisor import Supervisor
from dynamo_snapshot.model import Reason

SERVER_TIMEOUT_S = 60.0
"""How long a server that somebody else runs is waited for."""
SILENCE_S = 5.0
"""Between the first two words of a wait; doubled each time."""
ETCD_POLL_S = 1.0

Say = Callable[[str], None]


class LocalFleet:
    """A fleet of one host. ``start`` it, do what you came for, ``stop`` it: whatever happens in between.

    Args:
        fleet: validated; servers may be embedded.
        say: told in a few words what happens, for a person.
        planner_port: where Dynamo's planner takes changes of its bounds on loopback; 0: nowhere.
    """

    def __init__(self, fleet: Fleet, say: Say = lambda text: None, *, planner_port: int = 0) -> None:
        self.fleet = fleet
        self.planner_port = planner_port
        self.say = say
        self.runtime_dir = fleet.agent.runtime_dir
        self.supervisor = Supervisor(self.runtime_dir / "logs", self._service_changed)
        self.etcd_url = "" if fleet.servers.etcd == "embedded" else fleet.servers.etcd
        self.nats_url = "" if fleet.servers.nats == "embedded" else fleet.servers.nats
        self._ownership: ownership.Ownership | None = None
        self._keys: FleetKeys | None = None
        self._tasks: list[asyncio.Task[None]] = []

    @property
    def bus(self) -> DirectoryBus:
        return DirectoryBus(self.runtime_dir / FOLDER)

    @property
    def frontend_url(self) -> str:
        return f"http://{self.fleet.frontend.host}:{self.fleet.frontend.port}"

    @property
    def environment(self) -> dict[str, str]:
        return processes.fleet_environment(self.fleet, self.etcd_url, self.nats_url)

    async def start(self) -> None:
        """Checks the host, cleans up after a killed predecessor, and brings everything up.

        Raises:
            SnapshotError: nothing of this fleet runs then.
        """
        await self.start_servers()
        await self.start_workers()

    async def start_servers(self) -> None:
        """The first half of :meth:`start`: etcd and NATS answer, nothing is in them yet."""
        self._ownership = ownership.take(self.runtime_dir)
        try:
            preflight.check(self.fleet)
            for leftover in await leftovers.remove(self.runtime_dir):
                self.say(f"removed what an earlier fleet left: {leftover}")
            await self._start_servers()
            self._keys = FleetKeys(Etcd(self.etcd_url), self.fleet)
            await self._keys.remember()
        except BaseException:
            await asyncio.shield(self.stop())
            raise

    async def start_workers(self) -> None:
        """The second half of :meth:`start`: Dynamo's parts and ours run, and the fleet orders its workers."""
        try:
            await self._start_dynamo()
        except BaseException as error:
            await asyncio.shield(self.stop())
            raise first_error(error) from None

    async def stop(self) -> list[Leftover]:
        """Drains the workers, ends every process, and returns what could not be removed: nothing, if all is well."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._tasks.clear()
        left: list[Leftover] = []
        try:
            for name in ("planner", "controller", "agent"):
                await self.supervisor.stop(name)
            # Nobody makes new ones now. The frontend is there until the last worker has finished its requests.
            await teardown(self.runtime_dir, max(pool.worker.drain_timeout_s for pool in self.fleet.pools.values()))
            await self.supervisor.stop("frontend")
            left += [Leftover("key", name) for name in await self._keys_left()]
        finally:
            await self.supervisor.stop_all()
            left += leftovers.count(self.runtime_dir)
            # What is meant to be there while a fleet runs goes with it.
            await leftovers.remove(self.runtime_dir)
            if self._ownership is not None:
                self._ownership.give_up()
                self._ownership = None
        return left

    async def _start_servers(self) -> None:
        data = self.runtime_dir / "servers"
        if self.fleet.servers.etcd == "embedded":
            etcd = servers.embedded_etcd(data / "etcd")
            self.etcd_url = etcd.url
            await self.start_service(etcd.service)
        else:
            await wait_for_server("etcd", self.etcd_url, self.say)
        if self.fleet.servers.nats == "embedded":
            nats = servers.embedded_nats(data / "nats")
            self.nats_url = nats.url
            await self.start_service(nats.service)
        else:
            await wait_for_server("nats", self.nats_url, self.say)

    async def _start_dynamo(self) -> None:
        fleet_file, planner_file = self.write_fleet(), self.runtime_dir / "planner.yaml"
        planner = processes.planner_configuration(self.fleet, self.planner_port)
        planner_file.write_text(yaml.safe_dump(planner, sort_keys=False))
        temporary = self.runtime_dir / "tmp"
        temporary.mkdir(mode=0o700, exist_ok=True)
        # Dynamo's processes leave files there. Not the agent's workers: a snapshot may map a file of theirs.
        private = {**self.environment, "TMPDIR": str(temporary)}
        # The planner takes ten seconds to its first tick: it boots beside the others.
        async with asyncio.TaskGroup() as group:
            group.create_task(self.start_service(processes.frontend(self.fleet, private)))
            group.create_task(self.start_service(processes.planner(planner_file, private)))
            group.create_task(self.start_service(processes.agent(self.fleet, fleet_file, self.environment)))
            group.create_task(self.start_service(processes.controller(self.fleet, fleet_file, private)))
        self._tasks.append(asyncio.create_task(self._watch_etcd(), name="watch etcd"))

    def write_fleet(self) -> Path:
        """Writes the fleet with its servers' real addresses, for the processes that read a file; returns its path."""
        addresses = self.fleet.servers.model_copy(update={"etcd": self.etcd_url, "nats": self.nats_url})
        path = self.runtime_dir / "fleet.yaml"
        resolved = self.fleet.model_copy(update={"servers": addresses}).model_dump(mode="json")
        path.touch(mode=0o600)  # workers' environments may hold tokens
        path.write_text(yaml.safe_dump(resolved, sort_keys=False))
        return path

    async def start_service(self, service: Service) -> None:
        """Starts one service, and says when it is ready; it ends with the fleet."""
        begun = time.monotonic()
        marked = {**service.environment, processes.RUNTIME_DIR_TAG: str(self.runtime_dir)}
        await self.supervisor.start(dataclasses.replace(service, environment=marked))
        took = f"is up after {time.monotonic() - begun:.1f} s" if service.ready is not None else "has been started"
        self.say(f"{service.name} {took}")

    async def _watch_etcd(self) -> None:
        """Starts the planner again after an outage in which its lease ended: it would live on, deaf.

        The frontend exits by itself then and is started again like anything that died; the controller
        and the agent look after themselves and the workers.
        """
        answers = http_ok(f"{self.etcd_url}/health")
        silent_since = None
        while True:
            await asyncio.sleep(ETCD_POLL_S)
            if not await answers(0.0):
                if silent_since is None:
                    silent_since = time.monotonic()
                    self.say(f"etcd at {self.etcd_url} does not answer")
            elif silent_since is not None:
                outage, silent_since = time.monotonic() - silent_since, None
                self.say(f"etcd answers again after {outage:.0f} s")
                if outage >= self.fleet.lease_ttl_s:
                    self.supervisor.kill("planner")

    async def _keys_left(self) -> list[str]:
        if self._keys is None:
            return []
        try:
            left = await self._keys.workers()
            # An embedded etcd takes all else with it.
            return left if self.fleet.servers.etcd == "embedded" else await self._keys.clear(self.say)
        except SnapshotError as error:
            return [f"not known: {error.message}"]

    def _service_changed(self, status: ServiceStatus) -> None:
        if status.detail:
            self.say(f"{status.name} {status.detail}")


def first_error(error: BaseException) -> BaseException:
    """The error itself, or the first one in a group that may be nested."""
    return first_error(error.exceptions[0]) if isinstance(error, BaseExceptionGroup) else error


async def wait_for_server(name: str, url: str, say: Say, timeout_s: float = SERVER_TIMEOUT_S) -> None:
    """Waits until a server that somebody else runs answers, and says so at once and then more and more seldom.

    Raises:
        SnapshotError: ``server_unreachable`` when it has not after ``timeout_s``.
    """
    address = urlsplit(url)
    ready = http_ok(f"{url}/health") if name == "etcd" else banner(address.hostname or "", address.port or 0, b"INFO")
    await wait_until_ready(name, url, ready, say, timeout_s)


async def wait_until_ready(name: str, url: str, ready: Ready, say: Say, timeout_s: float) -> None:
    """The same with ``ready``, which is asked every second whether the server answers."""
    clock = asyncio.get_running_loop().time
    begun = spoken = clock()
    silence_s = 0.0
    while not await ready(0.0):
        left = begun + timeout_s - clock()
        if left <= 0:
            raise SnapshotError(
                Reason.SERVER_UNREACHABLE,
                f"{name} at {url} did not answer within {timeout_s:.0f} s",
                f"Start it, correct servers.{name} in fleet.yaml, or write 'embedded' there.",
            )
        if clock() - spoken >= silence_s:
            say(f"waiting for {name} at {url}: {left:.0f} s left")
            spoken, silence_s = clock(), 2 * silence_s or SILENCE_S
        await asyncio.sleep(min(1.0, left))
