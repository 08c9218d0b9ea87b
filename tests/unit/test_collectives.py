"""A communicator between a worker's processes is seen by the names of NCCL's threads."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack

import pytest

from dynamo_snapshot.agent.cuda.collectives import refuse_collectives
from dynamo_snapshot.errors import SnapshotError
from dynamo_snapshot.model import Reason

# pthread_setname_np, as NCCL does it: the kernel keeps 15 bytes.
NAMED = """
import ctypes, sys, threading
def service():
    ctypes.CDLL(None).prctl(15, sys.argv[1].encode(), 0, 0, 0)
    print("named", flush=True)
    threading.Event().wait()
threading.Thread(target=service, daemon=True).start()
sys.stdin.read()
"""


@pytest.fixture
def process() -> Iterator[Callable[[str], int]]:
    """Returns a function that starts a process with a thread of that name; gives its pid."""
    with ExitStack() as stack:

        def start(name: str) -> int:
            started = stack.enter_context(
                subprocess.Popen([sys.executable, "-c", NAMED, name], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
            )
            assert started.stdin is not None
            assert started.stdout is not None
            stack.callback(started.stdin.close)
            started.stdout.readline()
            return started.pid

        yield start


def test_two_processes_with_a_communicator_are_refused(process: Callable[[str], int]) -> None:
    ranks = [process("NCCL Service  0"), process("NCCL Service  1")]
    with pytest.raises(SnapshotError, match="NCCL communicator") as refused:
        refuse_collectives([os.getpid(), *ranks])
    assert refused.value.reason is Reason.COLLECTIVE_ALIVE


def test_one_process_with_a_communicator_of_its_own_is_not(process: Callable[[str], int]) -> None:
    refuse_collectives([os.getpid(), process("NCCL Service  0"), process("pt_nccl_watchdg")])


def test_a_process_that_has_ended_has_none() -> None:
    with subprocess.Popen([sys.executable, "-c", ""]) as ended:
        pass
    refuse_collectives([ended.pid, ended.pid])
