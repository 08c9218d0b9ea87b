"""pid 1 of a replica's house: starts the worker or stands by for a restored one, reaps it, tells how it ended.

Needs a Python's standard library and no privilege, so the same file serves a host and a pod::

    python -I -S holder.py [--house DIR]

It listens on ``<house>/holder.sock`` and outlives whoever talks to it. Requests and answers are lines of
JSON; an answer carries the request's ``do`` back as ``answer``, an event has ``event``:

====================================================================  ===========================================
request                                                               answer
====================================================================  ===========================================
``{"do": "start", "command": […], "env": {…}, "cwd": …, "log": …}``   ``{"answer": "start", "pid": N}``
``{"do": "expect", "pid": N}``: a restore will make N the worker      ``{"answer": "expect", "pid": N}``
``{"do": "signal", "signal": N}``: to the worker                      ``{"answer": "signal", "sent": bool}``
``{"do": "status"}``                                                  ``{"answer": "status", "pid": N|null}``
``{"do": "end"}``: kill all that is in the house                      none: the connection closes
====================================================================  ===========================================

What cannot be done is answered with ``{"answer": …, "error": "…"}``. When the worker has gone, every
connection gets ``{"event": "exit", "pid": N, "code": C, "at": wall seconds}`` (``C`` negative for a
signal), the same stands in ``<house>/exit.json`` for an agent that was away, and the holder ends:
the kernel then ends whatever the worker left in the pid namespace.
"""

from __future__ import annotations

import os
import select
import signal
import socket
import sys
import time

TYPE_CHECKING = False  # not from typing: importing that takes as long as all the rest
if TYPE_CHECKING:
    from types import ModuleType

HOUSE = "/run/dynamo-snapshot/house"
"""Where every replica finds its house; snapshots bake it in."""
SOCKET = "holder.sock"
EXIT_FILE = "exit.json"
CONTROL = "control"
LOGS = "logs"
WORKER_LOG = f"{LOGS}/worker.log"
READY_LINE = "ready"
"""What the holder writes to its standard output, before it closes it, once it listens."""

FIRST_WORKER_PID = 300
"""Workers get pids from here on, so that their numbers are free in every house they are restored into."""
_MAX_LINE = 1 << 20
_STRAYS_KEPT = 64


def _json() -> ModuleType:
    """The module, loaded when it is first needed: a house should stand before anyone asks it anything."""
    import json

    return json


class Refused(Exception):
    """A request that cannot be done; its text is the answer."""


def raise_pid_counter(first: int) -> None:
    """Makes the next process get pid ``first`` or above: by the kernel's counter, or by burning numbers."""
    try:
        with open("/proc/sys/kernel/ns_last_pid", "w") as counter:
            counter.write(str(first - 1))
        return
    except OSError:
        pass  # not privileged, as in a pod
    while True:
        pid = os.fork()
        if pid == 0:
            os._exit(0)
        os.waitpid(pid, 0)
        if pid >= first - 1:
            return


def find_program(name: str, search_path: str) -> str:
    """Returns what a shell would run for ``name``; raises :class:`Refused` if there is nothing to run."""
    if "/" in name:
        candidates = [name]
    else:
        candidates = [os.path.join(folder or ".", name) for folder in search_path.split(os.pathsep)]
    for candidate in candidates:
        if os.access(candidate, os.X_OK) and not os.path.isdir(candidate):
            return candidate
    raise Refused(f"{name} is not an executable file" + ("" if "/" in name else f" in PATH ({search_path})"))


class Holder:
    """One house's pid 1: a single-threaded loop over its socket and its children."""

    def __init__(self, house: str) -> None:
        self._house = house
        self._worker: int | None = None
        self._exit: tuple[int, float] | None = None
        self._strays: dict[int, tuple[int, float]] = {}
        """How children ended that were not, or not yet, known to be the worker."""
        self._clients: dict[int, tuple[socket.socket, bytes]] = {}
        """By descriptor: the connection, and what it sent of a line so far."""
        self._poll = select.poll()
        self._wakeup, writer = os.pipe()
        os.set_blocking(self._wakeup, False)
        os.set_blocking(writer, False)
        signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
        for number in (signal.SIGCHLD, signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: None)
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        path = os.path.join(house, SOCKET)
        if os.path.exists(path):
            os.unlink(path)
        self._listener.bind(path)
        os.chmod(path, 0o600)
        self._listener.listen(8)
        self._listener.setblocking(False)
        self._poll.register(self._listener, select.POLLIN)
        self._poll.register(self._wakeup, select.POLLIN)

    def run(self) -> int:
        """Serves until the worker has gone or someone ends the house; returns the exit status for a shell."""
        while self._exit is None:
            for descriptor, _ in self._poll.poll():
                if descriptor == self._listener.fileno():
                    self._accept()
                elif descriptor == self._wakeup:
                    if not self._on_signals(os.read(self._wakeup, 512)):
                        return 0
                elif descriptor in self._clients and not self._on_readable(descriptor):
                    return 0
        code, at = self._exit
        self._record_exit(code, at)
        # Whoever comes from now on is refused, and finds the record.
        self._listener.close()
        for descriptor in list(self._clients):
            self._send(descriptor, {"event": "exit", "pid": self._worker, "code": code, "at": at})
        return code if code >= 0 else 128 - code

    def _accept(self) -> None:
        try:
            client, _ = self._listener.accept()
        except OSError:  # it has gone again, or there is no descriptor left: no reason to end a worker
            return
        client.setblocking(False)
        self._clients[client.fileno()] = (client, b"")
        self._poll.register(client, select.POLLIN)

    def _drop(self, descriptor: int) -> None:
        self._poll.unregister(descriptor)
        self._clients.pop(descriptor)[0].close()

    def _send(self, descriptor: int, message: dict[str, object]) -> None:
        try:
            self._clients[descriptor][0].sendall(_json().dumps(message).encode() + b"\n")
        except OSError:  # gone, or it does not read: it finds exit.json instead
            self._drop(descriptor)

    def _on_signals(self, numbers: bytes) -> bool:
        """Returns False when the house is to end."""
        while self._exit is None:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                break
            if pid == 0:
                break
            ended = (os.waitstatus_to_exitcode(status), time.time())
            if pid == self._worker:
                self._exit = ended
            else:
                self._strays[pid] = ended
                if len(self._strays) > _STRAYS_KEPT:
                    del self._strays[next(iter(self._strays))]
        if self._exit is None and (signal.SIGTERM in numbers or signal.SIGINT in numbers):
            # A kubelet stops a pod by a signal to pid 1: it is the worker's drain.
            return self._signal(signal.SIGTERM)
        return True

    def _on_readable(self, descriptor: int) -> bool:
        """Returns False when the house is to end."""
        client, earlier = self._clients[descriptor]
        try:
            data = client.recv(65536)
        except BlockingIOError:
            return True
        except OSError:
            data = b""
        *lines, rest = (earlier + data).split(b"\n")
        if not data or len(rest) > _MAX_LINE:
            self._drop(descriptor)
            return True
        self._clients[descriptor] = (client, rest)
        return all(self._answer(descriptor, line) for line in lines)

    def _answer(self, descriptor: int, line: bytes) -> bool:
        """Returns False when the house is to end."""
        if descriptor not in self._clients:
            return True  # dropped over an earlier line
        what: object = None
        try:
            request = _json().loads(line)
            what = request.get("do")
            if what == "end":
                return False
            answer: dict[str, object]
            if what == "start":
                answer = {"pid": self._start(request)}
            elif what == "expect":
                answer = {"pid": self._expect(int(request["pid"]))}
            elif what == "signal":
                answer = {"sent": self._signal(int(request["signal"]))}
            elif what == "status":
                answer = {"pid": self._worker}
            else:
                raise Refused(f"unknown request {what!r}")
        except Refused as error:
            answer = {"error": str(error)}
        except OSError as error:
            answer = {"error": f"{what} failed: {error.strerror}"}
        except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError) as error:
            answer = {"error": f"malformed request: {type(error).__name__}: {error}"}
        self._send(descriptor, {"answer": what, **answer})
        return True

    def _expect(self, pid: int) -> int:
        if self._worker is not None:
            raise Refused(f"the worker is already {self._worker}")
        self._worker = pid
        self._exit = self._strays.get(pid)
        return pid

    def _start(self, request: dict[str, object]) -> int:
        if self._worker is not None:
            raise Refused(f"the worker is already {self._worker}")
        command, env, log = request["command"], request["env"], request["log"]
        if not (isinstance(command, list) and command and isinstance(env, dict) and isinstance(log, str)):
            raise Refused("start needs a command, an environment and a log")
        program = find_program(str(command[0]), str(env.get("PATH", os.defpath)))
        raise_pid_counter(FIRST_WORKER_PID)
        home = os.getcwd()
        try:
            # posix_spawn has no working directory of its own; this process has one thread, so borrowing is safe.
            os.chdir(str(request.get("cwd") or "/"))
            # The files are opened here, inside the mount namespace: CRIU cannot dump any other.
            self._worker = os.posix_spawn(
                program,
                [str(part) for part in command],
                {str(name): str(value) for name, value in env.items()},
                file_actions=[
                    (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0),
                    (os.POSIX_SPAWN_OPEN, 1, log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644),
                    (os.POSIX_SPAWN_DUP2, 1, 2),
                ],
                setsid=True,
                setsigdef=[signal.SIGPIPE, signal.SIGXFSZ],
            )
        except OSError as error:
            raise Refused(f"{program}: {error.strerror}") from error
        finally:
            os.chdir(home)
        return self._worker

    def _signal(self, number: int) -> bool:
        if self._worker is None:
            return False
        try:
            os.kill(self._worker, number)
        except ProcessLookupError:
            return False
        return True

    def _record_exit(self, code: int, at: float) -> None:
        path = os.path.join(self._house, EXIT_FILE)
        try:
            # No fsync: the file is for an agent that was away, and no house survives its host's crash.
            with open(path + ".tmp", "w") as file:
                _json().dump({"pid": self._worker, "code": code, "at": at}, file)
            os.rename(path + ".tmp", path)
        except OSError as error:
            try:  # noqa: SIM105  # contextlib is one more import, and a house should stand at once
                print(f"{path} cannot be written: {error.strerror}", file=sys.stderr, flush=True)
            except OSError:  # the log lies on the same full disk; whoever is connected is told all the same
                pass


def main(arguments: list[str]) -> int:
    house = arguments[1] if arguments[:1] == ["--house"] and len(arguments) == 2 else HOUSE
    # Descriptors from outside (locks of the house) stay here and reach no worker.
    for name in os.listdir("/proc/self/fd"):
        try:
            os.set_inheritable(int(name), int(name) <= 2)
        except OSError:
            continue
    holder = Holder(house)
    print(READY_LINE, flush=True)
    _json()
    # The pipe's other end must see its end; a worker gets files of its own.
    null = os.open(os.devnull, os.O_RDWR)
    os.dup2(null, 0)
    os.dup2(null, 1)
    os.close(null)
    return holder.run()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
