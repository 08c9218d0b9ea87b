"""Child processes of the agent: each in a session of its own, killable as a group, awaited by pidfd."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

KILL_GRACE_S = 5.0
"""A killed process group that is not gone by then is stuck in the kernel; nobody waits longer for it."""


class Process:
    """A running command. ``wait`` never blocks the event loop and starts no thread."""

    def __init__(self, popen: subprocess.Popen[bytes]) -> None:
        self._popen = popen
        self.pid = popen.pid
        self.stdout = popen.stdout

    async def wait(self) -> int:
        """Returns the exit status, negative for a signal."""
        if self._popen.poll() is None:
            await wait_pid(self.pid)
        return self._popen.wait()

    def signal_group(self, number: int) -> None:
        if self._popen.poll() is None:
            os.killpg(self.pid, number)

    async def kill(self) -> None:
        """Kills the whole group and reaps the process; what is stuck in the kernel is left after a grace."""
        try:
            self.signal_group(signal.SIGKILL)
            async with asyncio.timeout(KILL_GRACE_S):
                await self.wait()
        except (ProcessLookupError, TimeoutError):
            self._popen.poll()


def spawn(
    command: Sequence[str],
    *,
    environment: Mapping[str, str],
    stdout: int = subprocess.DEVNULL,
    stderr: int = subprocess.DEVNULL,
    keep: Sequence[int] = (),
) -> Process:
    """Starts ``command`` in a session of its own with standard input from nowhere.

    No ``preexec_fn``: that would rule out vfork, and a fork of a large agent is slow.
    """
    return Process(
        subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=stdout,
            stderr=stderr,
            env=dict(environment),
            cwd="/",
            start_new_session=True,
            pass_fds=tuple(keep),
        )
    )


async def wait_pid(pid: int) -> None:
    """Returns when process ``pid`` has ended; at once if there is none. It need not be a child."""
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    loop = asyncio.get_running_loop()
    ended = asyncio.Event()
    loop.add_reader(descriptor, ended.set)
    try:
        await ended.wait()
    finally:
        loop.remove_reader(descriptor)
        os.close(descriptor)


def children(pid: int) -> list[int]:
    """The children of ``pid``; empty if it has gone."""
    found: list[int] = []
    try:
        for task in Path(f"/proc/{pid}/task").iterdir():
            found += [int(child) for child in (task / "children").read_text().split()]
    except (FileNotFoundError, ProcessLookupError):
        pass
    return found


def inner_pid(pid: int) -> int | None:
    """How ``pid`` is numbered in its own pid namespace; None if it has gone."""
    try:
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith("NSpid:"):
                return int(line.split()[-1])
    except (FileNotFoundError, ProcessLookupError):
        pass
    return None


def marked_processes(name: str, value: str, *, prefix: bool = False) -> list[int]:
    """Every process that was started with ``name=value`` in its environment; ``prefix``: or with more after it."""
    wanted = f"{name}={value}".encode()
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                variables = (entry / "environ").read_bytes().split(b"\0")
                if any(one == wanted or (prefix and one.startswith(wanted)) for one in variables):
                    found.append(int(entry.name))
            except OSError:  # gone, a kernel thread, or not ours to read
                continue
    return found
