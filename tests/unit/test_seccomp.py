import subprocess
import sys

import pytest

from worker_hooks.seccomp import PROGRAM

ENOSYS_RETURN = 0x00050000 | 38
ALLOW = 0x7FFF0000


def _judge(number: int) -> int:
    """Interprets the filter for one system call number."""
    at, accumulator = 0, 0
    while True:
        code, yes, no, k = PROGRAM[at]
        at += 1
        if code == 0x20:
            accumulator = number
        elif code == 0x54:
            accumulator &= k
        elif code == 0x35:
            at += yes if accumulator >= k else no
        elif code == 0x25:
            at += yes if accumulator > k else no
        elif code == 0x06:
            return k
        else:
            raise AssertionError(f"unknown instruction {code:#x}")


@pytest.mark.parametrize("abi", [0, 0x40000000], ids=["native", "x32"])
def test_it_judges_io_uring_alone(abi: int) -> None:
    for number in range(600):
        expected = ENOSYS_RETURN if number in (425, 426, 427) else ALLOW
        assert _judge(number | abi) == expected


SUBJECT = """
import ctypes, errno, os, subprocess, sys, threading
from worker_hooks.seccomp import block_io_uring, io_uring_blocked

go, answers = threading.Event(), []

def older_thread():
    go.wait()
    answers.append(io_uring_blocked())

thread = threading.Thread(target=older_thread)
thread.start()
block_io_uring()
block_io_uring()
assert io_uring_blocked()
go.set()
thread.join()
assert answers == [True], "a thread from before the filter is not under it"
child = "from worker_hooks.seccomp import io_uring_blocked; print(io_uring_blocked())"
assert subprocess.run([sys.executable, "-c", child], capture_output=True, text=True).stdout == "True\\n"
import uvloop
async def main():
    paths = [f"/proc/self/fd/{fd}" for fd in os.listdir("/proc/self/fd")]
    return [os.readlink(path) for path in paths if os.path.lexists(path)]
links = uvloop.run(main())
assert not any("io_uring" in link for link in links), links
print("ok")
"""


def test_threads_children_and_uvloop_are_under_it() -> None:
    done = subprocess.run([sys.executable, "-c", SUBJECT], capture_output=True, text=True, timeout=60)
    assert done.stdout == "ok\n", done.stderr
