"""A resident child's loop ends with its agent, however that ended."""

from __future__ import annotations

import socket
import threading

import msgspec
import pytest

from dynamo_snapshot.agent.resident_wire import Request, serve


@pytest.mark.parametrize("unread", [False, True], ids=["closed", "killed with an answer unread"])
def test_the_loop_returns_when_its_agent_has_gone(unread: bool) -> None:
    ours, theirs = socket.socketpair()
    answered = threading.Event()
    loop = threading.Thread(target=serve, args=(theirs, lambda body: answered.set(), 2))
    loop.start()
    ours.sendall(msgspec.json.encode(Request(id=1, body=msgspec.Raw(b"{}"))) + b"\n")
    assert answered.wait(10)
    if unread:
        assert ours.recv(1, socket.MSG_PEEK), "the answer is there"
    else:
        ours.recv(1000)
    ours.close()
    loop.join(10)
    assert not loop.is_alive()
    theirs.close()
