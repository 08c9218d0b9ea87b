"""A small worker that speaks the control protocol, for tests of house, holder and agent. Standard library only.

It has what makes capturing hard: threads, memory, a child process, an inotify watch, a shared-memory segment and
a log. Environment: ``TOY_MEMORY_MIB``, ``TOY_BOOT_S``, ``TOY_FLAW`` (``io_uring``, ``tcp``: open what CRIU cannot
dump; ``never_register``; ``never_park``; ``die_at_boot``; ``driver_socket``: the CUDA driver's, by a name that no
other replica can have); ``TOY_REFUSE`` in its restore context makes an incarnation fail.
``TOY_CUDA`` (a ``FakeProcess`` as JSON) makes it a GPU worker for the fake driver, whose weights, in host memory,
are out of its image; ``TOY_ZEROS_MIB``: see there.
"""

from __future__ import annotations

import ctypes
import hashlib
import json
import os
import random
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from multiprocessing import shared_memory
from pathlib import Path
from typing import Any

CONTROL = Path(os.environ["DYNAMO_SNAPSHOT_STATE_DIR"])
FLAW = os.environ.get("TOY_FLAW", "")
history: list[tuple[str, float]] = []
context: dict[str, Any] = {}
libc = ctypes.CDLL(None, use_errno=True)


def write(name: str, content: str) -> None:
    temporary = CONTROL / f".{name}.tmp"
    temporary.write_text(content)
    temporary.rename(CONTROL / name)


def say(state: str, reason: str | None = None, message: str = "", evidence: dict[str, str] | None = None) -> None:
    now = time.time()
    history.append((state, now))
    tested = [at for name, at in history if name == "SELF_TESTING"]
    write(
        "worker-state.json",
        json.dumps({
            "state": state, "since": now, "incarnation": context.get("incarnation"), "pid": os.getpid(),
            "reason": reason, "message": message, "self_test_at": tested[-1] if tested else None,
            "history": history, "evidence": evidence or {},
        }),
    )  # fmt: skip


def wait_for(name: str) -> None:
    watch = libc.inotify_init1(0)
    libc.inotify_add_watch(watch, str(CONTROL).encode(), 0x80 | 0x100)  # IN_MOVED_TO | IN_CREATE
    while not (CONTROL / name).exists():
        select.select([watch], [], [], 60)
        os.read(watch, 65536)
    os.close(watch)


def flaw() -> None:
    if FLAW == "io_uring":
        ring = libc.syscall(425, 8, ctypes.create_string_buffer(256))
        assert ring >= 0, os.strerror(ctypes.get_errno())
        assert libc.mmap(None, 4096, 3, 1, ring, 0) != -1  # as an event loop has it: PROT_READ|PROT_WRITE, MAP_SHARED
    if FLAW == "driver_socket":
        listener = socket.socket(socket.AF_UNIX)
        listener.bind(f"\0cuda-uvmfd-{os.stat('/proc/self/ns/pid').st_ino}-{os.getpid()}\0")
        listener.listen()
        kept.append(listener)
    if FLAW == "tcp":
        server = socket.create_server(("127.0.0.1", 0))
        kept.extend([server, socket.create_connection(server.getsockname()), server.accept()])


kept: list[object] = []


def main() -> None:
    say("BOOTING")
    print("boot", flush=True)
    if FLAW == "die_at_boot":
        print("the engine found no weights", flush=True)
        sys.exit(3)
    time.sleep(float(os.environ.get("TOY_BOOT_S", "0")))
    memory = bytearray(os.urandom(1 << 16) * (int(os.environ.get("TOY_MEMORY_MIB", "8")) << 4))
    digest = hashlib.sha256(memory).hexdigest()
    segment = shared_memory.SharedMemory(create=True, size=1 << 16)
    segment.buf[:5] = b"share"
    child = subprocess.Popen([sys.executable, "-I", "-S", "-c", "import time\nwhile 1: time.sleep(0.2)"])
    threading.Thread(target=threading.Event().wait, daemon=True).start()
    stop = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: stop.set())
    flaw()
    gpu = None
    if "TOY_CUDA" in os.environ:
        sys.path.insert(0, str(Path(__file__).parent))
        from toy_gpu import ToyGpu

        gpu = ToyGpu(os.environ["TOY_CUDA"], CONTROL)
    say("ENGINE_READY")
    if os.environ.get("SNAPSHOT_CONTROL_DIR"):
        say("QUIESCING")
        if gpu:
            gpu.quiesce()
        say("READY_FOR_SNAPSHOT")
        write("ready-for-snapshot", "ready")
        wait_for("restore-complete")
        say("RESTORED")
        context.update(json.loads((CONTROL / "restore-context.json").read_text()))
        for name, value in context["env"].items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value
        if os.environ.get("TOY_REFUSE"):
            say("FAILED", "restore_context_invalid", "told to refuse")
            os._exit(4)
        random.seed()
        say("IDENTITY_APPLIED")
        if context.get("park") and FLAW != "never_park":
            # Before it says so: it may be told to end at once.
            signal.signal(signal.SIGTERM, lambda *_: (say("STOPPED"), os._exit(0)))
            say("PARKED")
            wait_for("wake")
            signal.signal(signal.SIGTERM, lambda *_: stop.set())
        say("RESUMING")
        if gpu:
            gpu.resume()
    say("SELF_TESTING")
    assert hashlib.sha256(memory).hexdigest() == digest
    assert bytes(segment.buf[:5]) == b"share"
    assert child.poll() is None
    if FLAW == "never_register":
        stop.wait()
        sys.exit(0)
    evidence = {"first_random": repr(random.random()), "resident_digest": digest, "child": str(child.pid),
                "port": os.environ["DYN_TCP_RPC_PORT"], **(gpu.evidence() if gpu else {})}  # fmt: skip
    say("REGISTERED", evidence=evidence)
    print("registered", flush=True)
    stop.wait()
    say("DRAINING")
    child.kill()
    child.wait()
    segment.close()
    segment.unlink()
    say("STOPPED")
    print("stopped", flush=True)


if __name__ == "__main__":
    main()
