"""Makes and removes a replica's house on this host.

A house is a folder, a fresh pid and mount namespace with the folder bound at a fixed path, a private
``/proc`` and ``/dev/shm``, a cgroup where there are any, and a holder as pid 1. :class:`Houses` is all
that the pipelines know of it: on Kubernetes the kubelet makes the house instead.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from dynamo_snapshot.agent.cgroups import Cgroups
from dynamo_snapshot.agent.control import ControlDirectory
from dynamo_snapshot.agent.criu.own_images import own_images, pid_namespace
from dynamo_snapshot.agent.holder_client import HolderClient
from dynamo_snapshot.agent.process import Process, children, inner_pid, marked_processes, spawn, wait_pid
from dynamo_snapshot.agent.standby import Standby
from dynamo_snapshot.errors import SnapshotError
from dynamo_snapshot.model import Exit, Reason, decode
from worker_hooks import holder

MOUNT_POINT = Path(holder.HOUSE)
CONTROL_INSIDE = f"{holder.HOUSE}/{holder.CONTROL}"
LOG_INSIDE = f"{holder.HOUSE}/{holder.WORKER_LOG}"
MARK = "DYNAMO_SNAPSHOT_HOUSE"
"""Names the house's folder in the environment of every process that serves it; a worker has its own environment."""

IMAGES = "images"
"""In a house: its own images, where it needs any."""
STANDBY = "standby"
"""The folder, beside the replicas', of houses made ahead."""
_MARKED = "mark"
"""In a house that was made ahead: what its first processes have as :data:`MARK`."""
_END_S = 10.0
_ENTER = '[ -z "$1" ] || echo 0 >"$1/cgroup.procs" || exit; shift; exec "$@"'
_SET_UP = 'mount --bind "$1" "$2" && mount -t tmpfs -o nosuid,nodev,mode=1777 tmpfs /dev/shm && exec "$3" -I -S "$4"'


@dataclass
class House:
    """One replica's house, with its holder listening."""

    path: Path
    holder: HolderClient
    cgroup: Path | None = None
    process: Process | None = field(default=None, repr=False)
    """What started it; None if it was found after the agent's own start."""

    @property
    def usable(self) -> bool:
        """Whether its holder still stands by."""
        return not self.holder.lost.done() and not self.holder.exited.done()

    @property
    def control(self) -> ControlDirectory:
        return ControlDirectory(self.path / holder.CONTROL)

    @property
    def log(self) -> Path:
        return self.path / holder.WORKER_LOG

    @property
    def shm(self) -> Path:
        """The private ``/dev/shm``, seen from the host."""
        return Path(f"/proc/{self.holder.pid}/root", "dev", "shm")

    def host_pid(self, inner: int) -> int | None:
        """How the host numbers the holder's child ``inner``; None if there is none."""
        return next((pid for pid in children(self.holder.pid) if inner_pid(pid) == inner), None)

    async def images(self, shared: Path) -> Path:
        """Returns the folder to restore a snapshot's images from; see :func:`own_images`.

        Raises:
            SnapshotError: ``holder_failed``: the house has ended meanwhile.
        """
        try:
            namespace = pid_namespace(self.holder.pid)
        except OSError as error:
            raise SnapshotError(
                Reason.HOLDER_FAILED, f"the holder of {self.path} (pid {self.holder.pid}) has ended"
            ) from error
        return await asyncio.to_thread(own_images, shared, self.path / IMAGES, namespace)

    def command(self, *command: str) -> list[str]:
        """``command`` run as root of the host, but in the house's namespaces and cgroup."""
        inside = ["nsenter", f"--target={self.holder.pid}", "--mount", "--pid", "--", *command]
        return ["sh", "-c", _ENTER, "sh", str(self.cgroup or ""), *inside]

    def environment(self) -> dict[str, str]:
        """For processes that serve this house, so that they can be found if the agent dies beside them."""
        return {"PATH": os.environ.get("PATH", os.defpath), MARK: str(self.path)}


class Houses(Protocol):
    """Who makes houses, and takes them away."""

    def prepare(self, replica_id: str) -> Path:
        """Makes the folder of a house that is about to be made, for what must be in it before; returns it."""

    async def make(self, replica_id: str, memory_limit_bytes: int | None) -> House:
        """Returns a new house with its holder in stand-by; raises ``holder_failed`` and leaves nothing otherwise."""

    async def find(self, replica_id: str) -> House | None:
        """Returns the house of an earlier agent whose holder still lives; None if there is none.

        Raises:
            OSError: nobody can tell; a replica that serves is not to be taken for dead.
        """

    def path(self, replica_id: str) -> Path:
        """The folder of a house, whether it is there or not."""

    def exit_of(self, replica_id: str) -> Exit | None:
        """How the worker of a house ended, by its holder's record."""

    async def remove(self, replica_id: str) -> None:
        """Ends every process of the house and removes all of it; does nothing if there is none."""

    def existing(self) -> list[str]:
        """The replicas of which anything is left here."""

    async def begin(self) -> None:
        """Removes what an earlier agent kept ready, and begins to keep houses ready."""

    async def ready(self) -> None:
        """Returns once as many houses are ready as can be; at once where none are made ahead."""

    async def close(self) -> None:
        """Keeps nothing ready any more; houses of replicas stay."""

    async def quiet(self, house: House, timeout_s: float) -> None:
        """Returns once nothing of an earlier agent works on ``house`` any more; kills that after the timeout."""


class HostHouses:
    """Houses in ``<runtime_dir>/replicas`` of this host.

    Args:
        standby: how many are made ahead, in ``<runtime_dir>/standby``, once :meth:`begin` was called.
    """

    def __init__(self, runtime_dir: Path, standby: int = 0) -> None:
        self._replicas = runtime_dir / "replicas"
        self._ahead = runtime_dir / STANDBY
        self._standby = Standby(standby, self._make_ahead, self._discard)
        self._prepared: dict[str, House] = {}
        """By replica: a house made ahead that is to become its."""
        self._cgroups = Cgroups(runtime_dir)
        self._processes: dict[str, Process] = {}

    def path(self, replica_id: str) -> Path:
        return self._replicas / replica_id

    def prepare(self, replica_id: str) -> Path:
        path = self.path(replica_id)
        with _named(path):
            if not self._settle_one(replica_id, path):
                path.mkdir(parents=True)
        return path

    async def make(self, replica_id: str, memory_limit_bytes: int | None) -> House:
        path = self.path(replica_id)
        with _named(path):
            self._settle_one(replica_id, path)
        group = self._cgroups.make(replica_id, memory_limit_bytes)
        house = self._prepared.pop(replica_id, None)
        if house is None:
            house = await self._build(replica_id, path, group)
        assert house.process is not None
        self._processes[replica_id] = house.process
        if group is not None and house.cgroup is None:
            house.cgroup = group
            # Some milliseconds: the kernel waits for every processor.
            await asyncio.to_thread(Cgroups.move, group, (house.process.pid, house.holder.pid))
        return house

    async def begin(self) -> None:
        await self.clear()
        self._standby.begin()

    async def ready(self) -> None:
        await self._standby.full()

    async def clear(self) -> None:
        """Removes every house made ahead, also those of an agent that died."""
        await self._standby.end()
        for path in self._ahead.iterdir() if self._ahead.is_dir() else ():
            await self._remove(path, None, None)
        with contextlib.suppress(OSError):
            self._ahead.rmdir()

    async def close(self) -> None:
        await self.clear()

    async def _make_ahead(self, name: str) -> House:
        path, house = self._ahead / name, None
        try:
            house = await self._build(name, path, None)
            (path / _MARKED).write_text(str(path))
        except OSError as error:  # such as a full disk: nobody waits for it, and it is tried again
            if house is not None:
                await house.holder.close()
            await self._remove(path, None, house.process if house else None)
            raise SnapshotError(Reason.HOLDER_FAILED, f"{path}: {error.strerror}") from error
        return house

    async def _discard(self, house: House) -> None:
        await house.holder.close()
        await self._remove(house.path, None, house.process)

    def _settle_one(self, replica_id: str, path: Path) -> bool:
        """Gives a house made ahead the replica's folder: what is bound inside is the same folder, renamed."""
        if _exists(path) or (house := self._standby.take()) is None:
            return False
        self._replicas.mkdir(exist_ok=True)
        house.path.rename(path)
        house.path = path
        self._prepared[replica_id] = house
        return True

    async def _build(self, name: str, path: Path, cgroup: Path | None) -> House:
        with _named(path):
            (path / holder.CONTROL).mkdir(parents=True)
            (path / holder.LOGS).mkdir()
            lock = _lock_mount_point()
        errors = path / holder.LOGS / "holder.log"
        try:
            with errors.open("wb") as stderr:
                process = spawn(
                    [
                        "sh", "-c", _ENTER, "sh", str(cgroup or ""),
                        "unshare", "--fork", "--pid", "--mount", "--propagation", "private", "--mount-proc",
                        "sh", "-c", _SET_UP, "sh", str(path), str(MOUNT_POINT), sys.executable, holder.__file__,
                    ],
                    environment={"PATH": os.environ.get("PATH", os.defpath), MARK: str(path)},
                    stdout=subprocess.PIPE,
                    stderr=stderr.fileno(),
                    keep=[lock],
                )  # fmt: skip
        finally:
            os.close(lock)
        try:
            await _wait_ready(process)
            client = await HolderClient.connect(path)
        except OSError as error:
            text = errors.read_text(errors="replace").strip() or str(error)
            await self._remove(path, cgroup, process)
            if "Operation not permitted" in text or "Permission denied" in text:
                raise _not_privileged(text.splitlines()[0]) from error
            raise SnapshotError(Reason.HOLDER_FAILED, f"the house of {name} could not be made: {text}") from error
        except BaseException:
            await asyncio.shield(self._remove(path, cgroup, process))
            raise
        return House(path, client, cgroup, process)

    async def find(self, replica_id: str) -> House | None:
        path = self.path(replica_id)
        try:
            client = await HolderClient.connect(path)
        except (FileNotFoundError, NotADirectoryError, ConnectionRefusedError):  # nothing else says that it has ended
            return None
        return House(path, client, self._cgroups.find(replica_id))

    def exit_of(self, replica_id: str) -> Exit | None:
        return read_exit(self.path(replica_id))

    async def remove(self, replica_id: str) -> None:
        path = self.path(replica_id)
        group = self._cgroups.find(replica_id)
        house = self._prepared.pop(replica_id, None)
        if house is not None:
            await house.holder.close()
        process = self._processes.pop(replica_id, None) or (house.process if house else None)
        await self._remove(path, group, process)

    async def _remove(self, path: Path, group: Path | None, process: Process | None) -> None:
        if _exists(path) or group is not None:
            await self._end(path, group)
        if process is not None:
            with contextlib.suppress(TimeoutError):  # what is stuck in the kernel is left to it
                async with asyncio.timeout(_END_S):
                    await process.wait()
        if group is not None:
            await self._remove_group(group)
        await asyncio.to_thread(shutil.rmtree, path, ignore_errors=True)

    def existing(self) -> list[str]:
        folders = {path.name for path in self._replicas.iterdir()} if self._replicas.is_dir() else set()
        return sorted(folders | {group.name for group in self._cgroups.existing()})

    async def quiet(self, house: House, timeout_s: float) -> None:
        helpers = _helpers(house)
        try:
            # A CRIU that is killed in the middle of a dump may leave its worker broken: it is waited for first.
            async with asyncio.timeout(timeout_s):
                await asyncio.gather(*(wait_pid(pid) for pid in helpers))
        except TimeoutError:
            for pid in _helpers(house):  # asked again: another process may have the number of one that has ended
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(os.getpgid(pid), signal.SIGKILL)

    def dismantle(self) -> None:
        """Removes what all houses share, unless another agent's houses still use it."""
        self._cgroups.remove_base()
        with contextlib.suppress(OSError):
            self._replicas.rmdir()
        remove_mount_point()

    async def _end(self, path: Path, group: Path | None) -> None:
        # Twice: what was just being forked by a process is found once its maker is dead.
        for _ in range(2):
            pids = {pid for mark in _marks(path) for pid in marked_processes(MARK, mark)}
            if group is not None:
                pids.update(Cgroups.processes(group))
            if not pids:
                return
            # The holder is among them: with pid 1 of the namespace goes everything in it.
            for pid in pids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            if group is not None:
                Cgroups.kill(group)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_END_S):
                    await asyncio.gather(*(wait_pid(pid) for pid in pids))

    async def _remove_group(self, group: Path) -> None:
        deadline = asyncio.get_running_loop().time() + _END_S
        while True:
            try:
                self._cgroups.remove(group)
                return
            except OSError:  # the kernel counts a process in for a moment after its end
                if asyncio.get_running_loop().time() > deadline:
                    return
                await asyncio.sleep(0.005)


def _exists(path: Path) -> bool:
    return path.exists()


def _marks(path: Path) -> set[str]:
    """What the processes that serve the house in ``path`` have as :data:`MARK`."""
    try:
        return {str(path), (path / _MARKED).read_text()}
    except FileNotFoundError:
        return {str(path)}


def read_exit(house: Path) -> Exit | None:
    """How the worker of the house in ``house`` ended, by its holder's record; None: no record."""
    try:
        return decode((house / holder.EXIT_FILE).read_bytes(), Exit)
    except FileNotFoundError:
        return None


def _lock_mount_point() -> int:
    """Returns a descriptor whose shared lock keeps :data:`MOUNT_POINT` from being removed while it is open.

    Removing a folder that is a mount point in another namespace unmounts it there: that must never
    happen to a living house, whichever agent made it. The holder inherits the lock.
    """
    while True:
        MOUNT_POINT.mkdir(parents=True, exist_ok=True)
        try:
            descriptor = os.open(MOUNT_POINT, os.O_RDONLY | os.O_DIRECTORY)
        except FileNotFoundError:
            continue  # removed between the two calls
        fcntl.flock(descriptor, fcntl.LOCK_SH)
        with contextlib.suppress(FileNotFoundError):
            if os.stat(MOUNT_POINT).st_ino == os.fstat(descriptor).st_ino:
                return descriptor
        os.close(descriptor)


def remove_mount_point() -> None:
    """Removes :data:`MOUNT_POINT` if no house on this host uses it."""
    try:
        descriptor = os.open(MOUNT_POINT, os.O_RDONLY | os.O_DIRECTORY)
    except OSError:
        return
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        MOUNT_POINT.rmdir()
        MOUNT_POINT.parent.rmdir()
    except OSError:
        pass  # in use, or the folder above holds other things
    finally:
        os.close(descriptor)


def _helpers(house: House) -> list[int]:
    """What serves ``house`` beside its holder: it was started in a session of its own."""
    found = []
    for pid in marked_processes(MARK, str(house.path)):
        with contextlib.suppress(ProcessLookupError):
            if os.getsid(pid) != os.getsid(house.holder.pid):
                found.append(pid)
    return found


async def _wait_ready(process: Process) -> None:
    """Returns when the holder says that it listens; raises ``ConnectionError`` if it ends instead."""
    assert process.stdout is not None
    loop = asyncio.get_running_loop()
    reader = asyncio.StreamReader()
    transport, _ = await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), process.stdout)
    try:
        if (await reader.readline()).decode().strip() != holder.READY_LINE:
            raise ConnectionError(f"its first process ended with status {await process.wait()}")
    finally:
        transport.close()


@contextlib.contextmanager
def _named(path: Path) -> Iterator[None]:
    """What the file system refuses below ``path``, as this project's error."""
    try:
        yield
    except PermissionError as error:
        raise _not_privileged(f"{error.filename or path}: {error.strerror}") from error
    except OSError as error:
        raise SnapshotError(Reason.HOLDER_FAILED, f"{error.filename or path}: {error.strerror}") from error


def _not_privileged(what: str) -> SnapshotError:
    return SnapshotError(
        Reason.NOT_PRIVILEGED,
        f"namespaces and mounts for a replica cannot be made: {what}",
        "Run the agent as root, or with CAP_SYS_ADMIN in a container.",
    )
