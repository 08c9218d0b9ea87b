"""Listeners whose ports a clone can share."""

from __future__ import annotations

import errno
import os
import socket
from typing import Any

import pytest

from worker_hooks.engines.shared_ports import sharing_ports


def listener(family: socket.AddressFamily = socket.AF_INET, host: str = "127.0.0.1") -> socket.socket:
    made = socket.socket(family)
    made.bind((host, 0))
    made.listen()
    return made


def clone_of(original: socket.socket) -> socket.socket:
    """Binds as CRIU does."""
    made = socket.socket(original.family)
    made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    made.bind(original.getsockname())
    made.listen()
    return made


@pytest.mark.parametrize(("family", "host"), [(socket.AF_INET, "127.0.0.1"), (socket.AF_INET6, "::1")])
def test_clones_listen_beside_the_source_and_each_other(family: socket.AddressFamily, host: str) -> None:
    with sharing_ports():
        source = listener(family, host)
    with source, clone_of(source) as first, clone_of(source) as second:
        assert first.getsockname() == second.getsockname() == source.getsockname()


def test_what_listened_before_is_left_alone() -> None:
    with listener() as before:
        with sharing_ports():
            pass
        with pytest.raises(OSError) as refused:  # noqa: PT011  # its number is looked at below
            clone_of(before)
    assert refused.value.errno == errno.EADDRINUSE


def test_what_is_closed_again_or_no_listener_is_no_matter() -> None:
    with sharing_ports():
        listener().close()
        pair = socket.socketpair()
    for end in pair:
        assert end.getsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT) == 0
        end.close()


@pytest.mark.parametrize("asked", ["getsockopt", "setsockopt"])
def test_one_that_another_thread_closes_while_it_is_looked_at_is_no_matter(
    monkeypatch: pytest.MonkeyPatch, asked: str
) -> None:
    class Closing(socket.socket):
        """Has been closed, and its number given to a file, when it is asked."""

        def getsockopt(self, *arguments: Any) -> Any:
            return self._lose("getsockopt", *arguments)

        def setsockopt(self, *arguments: Any) -> None:
            self._lose("setsockopt", *arguments)

        def _lose(self, name: str, *arguments: Any) -> Any:
            if name == asked and self.fileno() == short_lived.fileno():
                with open(os.devnull) as file:
                    os.dup2(file.fileno(), self.fileno())
            return getattr(super(), name)(*arguments)

    with sharing_ports():
        short_lived = listener()
        monkeypatch.setattr(socket, "socket", Closing)
    os.close(short_lived.detach())


def test_it_leaves_no_descriptor_behind_and_closes_none() -> None:
    before = os.listdir("/proc/self/fd")
    with sharing_ports(), listener() as one:
        pass
    assert one.fileno() == -1
    assert os.listdir("/proc/self/fd") == before
