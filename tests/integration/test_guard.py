"""The guard looks at real processes, from outside, as the agent does."""

import os
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from worker_hooks.guard import Finding, scan
from worker_hooks.proc_net import Address, connections
from worker_hooks.reasons import HookReason

Holding = Callable[..., int]

PRELUDE = """
import ctypes, os, socket, subprocess, sys, threading, time
libc = ctypes.CDLL(None, use_errno=True)
"""


@pytest.fixture
def holding(tmp_path: Path) -> Iterator[Holding]:
    """Starts a process that runs ``code`` and stays; returns its pid once it is there."""
    started: list[subprocess.Popen[str]] = []

    def start(code: str, *arguments: object, **options: Any) -> int:
        text = f"{PRELUDE}\n{code}\nprint('there', flush=True)\ntime.sleep(600)\n"
        subject = subprocess.Popen(
            [sys.executable, "-c", text, *map(str, arguments)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            text=True,
            cwd=tmp_path,
            start_new_session=True,
            **options,
        )
        started.append(subject)
        assert subject.stdout is not None
        assert subject.stdout.readline() == "there\n"
        return int(subject.pid)

    yield start
    for subject in started:
        for child in Path(f"/proc/{subject.pid}/task/{subject.pid}/children").read_text().split():
            os.kill(int(child), 9)
        subject.kill()
        subject.wait()


@pytest.fixture
def server() -> Iterator[int]:
    """A TCP port on loopback, outside the subject's tree."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield listener.getsockname()[1]


def _only(findings: list[Finding]) -> Finding:
    assert len(findings) == 1, findings
    return findings[0]


CLEAN = """
import asyncio, multiprocessing, tempfile
loop = asyncio.new_event_loop()
listener = socket.create_server(("127.0.0.1", 0))
everywhere = socket.create_server(("0.0.0.0", 0))
inner = socket.create_connection(listener.getsockname())
accepted, _ = listener.accept()
idle = socket.socket()
datagrams = socket.socket(type=socket.SOCK_DGRAM)
datagrams.bind(("127.0.0.1", 0))
memory = os.memfd_create("weights")
pair = socket.socketpair()
reading, writing = os.pipe()
deleted = tempfile.TemporaryFile()
deleted.write(b"x" * 5000)
log = open("log", "a")
eyes = libc.inotify_init1(0)
event = os.eventfd(0)
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
"""


def test_what_a_quiesced_engine_holds_is_no_finding(holding: Holding) -> None:
    assert scan(holding(CLEAN)) == []


def test_an_outside_connection(holding: Holding, server: int) -> None:
    pid = holding('out = socket.create_connection(("127.0.0.1", int(sys.argv[1])))', server)
    finding = _only(scan(pid))
    assert (finding.reason, finding.pid) == (HookReason.OUTSIDE_SOCKET, pid)
    assert finding.fd is not None
    assert str(finding) == f"{finding.process} (pid {pid}, fd {finding.fd}): tcp connection to 127.0.0.1:{server}"


def test_an_outside_connection_over_ipv6(holding: Holding) -> None:
    with socket.create_server(("::1", 0), family=socket.AF_INET6) as listener:
        port = listener.getsockname()[1]
        finding = _only(scan(holding('out = socket.create_connection(("::1", int(sys.argv[1])))', port)))
    assert finding.what == f"tcp connection to [::1]:{port}"


def test_a_connected_datagram_socket(holding: Holding) -> None:
    with socket.socket(type=socket.SOCK_DGRAM) as other:
        other.bind(("127.0.0.1", 0))
        port = other.getsockname()[1]
        code = 'out = socket.socket(type=socket.SOCK_DGRAM); out.connect(("127.0.0.1", int(sys.argv[1])))'
        assert _only(scan(holding(code, port))).what == f"udp connection to 127.0.0.1:{port}"


def test_a_connection_that_a_grandchild_holds(holding: Holding, server: int) -> None:
    code = """
grandchild = '''import socket, sys, time
out = socket.create_connection(("127.0.0.1", int(sys.argv[1])))
print("there", flush=True)
time.sleep(600)'''
child = subprocess.Popen([sys.executable, "-c", f'''import subprocess, sys, time
subprocess.Popen([sys.executable, "-c", {grandchild!r}, sys.argv[1]])
time.sleep(600)''', sys.argv[1]], stdout=subprocess.PIPE)
child.stdout.readline()
os.close(child.stdout.fileno())
"""
    pid = holding(code, server)
    finding = _only([each for each in scan(pid) if each.reason is HookReason.OUTSIDE_SOCKET])
    assert finding.pid != pid


def test_a_runtime_thread_by_its_name(holding: Holding) -> None:
    code = """
ready = threading.Event()
def run():
    libc.prctl(15, b"tokio-rt-worker", 0, 0, 0)
    ready.set()
    time.sleep(600)
threading.Thread(target=run, daemon=True).start()
ready.wait()
"""
    pid = holding(code)
    finding = _only(scan(pid))
    assert finding.reason is HookReason.RUNTIME_THREAD
    assert finding.what == "runtime thread tokio-rt-worker"
    assert finding.thread not in (None, pid)


def test_an_io_uring(holding: Holding) -> None:
    pid = holding("parameters = (ctypes.c_char * 120)(); ring = libc.syscall(425, 4, parameters); assert ring > 0")
    finding = _only(scan(pid))
    assert (finding.reason, finding.what) == (HookReason.IO_URING_OPEN, "an io_uring")


def test_a_mapped_io_uring_whose_descriptor_is_closed(holding: Holding) -> None:
    code = """
import mmap
parameters = (ctypes.c_char * 120)()
ring = libc.syscall(425, 4, parameters)
queue = mmap.mmap(ring, 4096, offset=0)
os.close(ring)
"""
    reasons = {each.reason for each in scan(holding(code))}
    assert reasons == {HookReason.IO_URING_OPEN}


@pytest.mark.parametrize(
    ("code", "what"),
    [
        ("import pty; ours, terminal = pty.openpty()", "the terminal /dev/pts/"),
        ("fd = libc.syscall(323, 1); assert fd > 0", "anon_inode:[userfaultfd], which CRIU cannot dump"),
        (
            'fd = os.open("/proc/self/ns/mnt", os.O_RDONLY); libc.unshare(0x00020000)',
            "a namespace that is not the worker's",
        ),
        ('log = open("old.log", "a"); libc.unshare(0x00020000)', "old.log, opened in another mount namespace"),
        (
            'import tempfile; big = tempfile.TemporaryFile(dir="."); big.truncate(600 << 20)',
            "unlinked and too large (600 MiB) to go into the image",
        ),
    ],
)
def test_a_file_that_cannot_be_opened_again(holding: Holding, code: str, what: str) -> None:
    found = [each for each in scan(holding(code)) if each.reason is HookReason.UNREOPENABLE_FILE]
    assert any(what in each.what for each in found), found
    assert all(each.fd is not None for each in found)


def test_a_pipe_to_the_outside(holding: Holding) -> None:
    reading, writing = os.pipe()
    pid = holding("pass", pass_fds=[writing])
    finding = _only(scan(pid))
    assert finding.what.endswith("whose other end is outside")
    assert finding.fd == writing
    os.close(reading)
    os.close(writing)


def test_a_pid_that_is_not_there() -> None:
    gone = subprocess.Popen(["true"])
    gone.wait()
    with pytest.raises(ProcessLookupError):
        scan(gone.pid)


def test_the_kernel_tables_are_read_right(tmp_path: Path) -> None:
    (tmp_path / "tcp").write_text(
        "  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid  timeout inode\n"
        "   0: 0100007F:1F90 00000000:0000 0A 00000000:00000000 00:00000000 00000000     0        0 11 1 0\n"
        "   1: 0100007F:C350 0200000A:094B 01 00000000:00000000 00:00000000 00000000     0        0 12 1 0\n"
    )
    (tmp_path / "tcp6").write_text(
        "  sl  local_address                         remote_address                        st ...\n"
        "   0: 0000000000000000FFFF00000100007F:1F90 0000000000000000FFFF00000200000A:0050 01 "
        "00000000:00000000 00:00000000 00000000     0        0 13 1 0 100 0 0 10 0\n"
    )
    listener, connected, mapped = connections(tmp_path)
    assert (listener.local, listener.remote) == (Address("127.0.0.1", 8080), None)
    assert (connected.inode, connected.remote) == (12, Address("10.0.0.2", 2379))
    assert (mapped.protocol, mapped.local, mapped.remote) == (
        "tcp",
        Address("127.0.0.1", 8080),
        Address("10.0.0.2", 80),
    )
