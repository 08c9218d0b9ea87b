"""Does this criu work on this kernel? Answered by dumping and restoring a process that holds an inet socket.

``criu check`` is not enough: CRIU 4.1 passes it on Linux 6.16 and later, yet cannot dump a socket there.
"""

from __future__ import annotations

import os
import select
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

from dynamo_snapshot.agent.criu import command as criu_program
from dynamo_snapshot.errors import SnapshotError
from dynamo_snapshot.model import Value

_TIMEOUT_S = 30.0
_GREETING = b"restored"

# Listens, says where, and after its restore answers one caller. It keeps no descriptor that leads out of it.
_PROGRAM = f"""
import os, socket, sys
listener = socket.socket()
listener.bind(("127.0.0.1", 0))
listener.listen()
report = int(sys.argv[1])
os.write(report, str(listener.getsockname()[1]).encode())
os.close(report)
caller, _ = listener.accept()
caller.sendall({_GREETING!r})
"""


class CriuProbe(Value, frozen=True):
    """What a probe found."""

    version: str
    """As criu says it, such as ``4.2.1``; empty where it does not run."""
    works: bool
    problem: str = ""
    """The step that failed and CRIU's first error; empty where it works."""


def probe_criu(criu: Path) -> CriuProbe:
    """Dumps and restores a small process with ``criu``, the restore in namespaces of its own; takes about 0.5 s."""
    try:
        version = criu_program.version(criu)
    except SnapshotError as error:
        return CriuProbe(version="", works=False, problem=error.message)
    with tempfile.TemporaryDirectory(prefix="dynamo-snapshot-probe-") as folder:
        problem = _round_trip(criu, Path(folder))
    return CriuProbe(version=version, works=not problem, problem=problem)


def _round_trip(criu: Path, folder: Path) -> str:
    """Returns what went wrong, or nothing."""
    source, port = _start_source(folder)
    try:
        problem = _dump(criu, folder, source.pid)
    except subprocess.TimeoutExpired:
        problem = f"dump did not end within {_TIMEOUT_S:.0f} s"
    finally:
        source.kill()  # a dump that worked has ended it already
        source.wait()
    return problem or _restore(criu, folder, port)


def _start_source(folder: Path) -> tuple[subprocess.Popen[bytes], int]:
    reader, writer = os.pipe()
    try:
        source = subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", _PROGRAM, str(writer)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            cwd=folder,
            pass_fds=(writer,),
            start_new_session=True,
        )
    finally:
        os.close(writer)
    with os.fdopen(reader) as report:
        return source, int(report.read())


def _dump(criu: Path, folder: Path, pid: int) -> str:
    command = [str(criu), "dump", "-t", str(pid), "-D", str(folder), "-o", "dump.log", "-v4"]
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, timeout=_TIMEOUT_S, check=False)
    return f"dump: {_why(folder / 'dump.log', done.stderr)}" if done.returncode else ""


def _restore(criu: Path, folder: Path, port: int) -> str:
    # In a pid namespace of its own the old number is free, and all in it ends with its init, the shell.
    command = ["unshare", "--pid", "--fork", "--mount-proc", "--kill-child"]
    command += ["sh", "-c", '"$@" && echo restored && read -r _', "sh"]
    command += [str(criu), "restore", "-d", "-D", str(folder), "-o", "restore.log", "-v4"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as init:
        try:
            assert init.stdout
            if not select.select([init.stdout], [], [], _TIMEOUT_S)[0]:
                return f"restore did not end within {_TIMEOUT_S:.0f} s"
            if not init.stdout.readline():
                assert init.stderr
                return f"restore: {_why(folder / 'restore.log', init.stderr.read())}"
            with socket.create_connection(("127.0.0.1", port), timeout=_TIMEOUT_S) as caller:
                answer = caller.recv(len(_GREETING), socket.MSG_WAITALL)
            return "" if answer == _GREETING else "restore: the restored process does not answer on its socket"
        except OSError as error:
            return f"restore: the restored process does not answer on its socket: {error}"
        finally:
            init.kill()


def _why(log: Path, stderr: bytes) -> str:
    text = log.read_text(errors="replace") if log.exists() else ""
    return criu_program.first_error(text) or stderr.decode(errors="replace").strip()[-300:] or "it gave no reason"
