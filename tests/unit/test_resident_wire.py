"""A resident child's loop ends with its agent, however that ended."""

from __future__ import annotations

import socket
import threading
from concurrent.futures import ThreadPoolExecutor

import msgspec
import pytest

from dynamo_snapshot.agent.resident_wire import Request, serve


@pytest.mark.parametrize("unread", [False, True], ids=["closed", "killed with an answer unread"])
def test_the_loop_returns_when_its_agent_has_gone(unread: bool) -> None:
    ours, theirs = socket.socketpair()
    answered = threading.Event()
    with ThreadPoolExecutor(1) as pool:
        loop = pool.submit(serve, theirs, lambda body: answered.set(), 2)
        ours.sendall(msgspec.json.encode(Request(id=1, body=msgspec.Raw(b"{}"))) + b"\n")
        assert answered.wait(10)
        if unread:
            assert ours.recv(1, socket.MSG_PEEK), "the answer is there"
        else:
            ours.recv(1000)
        ours.close()
        loop.result(10)
    theirs.close()
