"""What the agent and a resident child say to each other: one line of JSON a request, one an answer, in any order."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import msgspec

from dynamo_snapshot.errors import SnapshotError
from dynamo_snapshot.model import Reason


class Request(msgspec.Struct, frozen=True, kw_only=True):
    """One request; ``body`` is what the child's own protocol says."""

    id: int
    body: msgspec.Raw


class Failure(msgspec.Struct, frozen=True, kw_only=True):
    reason: Reason
    message: str
    remedy: str = ""

    @classmethod
    def of(cls, error: BaseException) -> Failure:
        if isinstance(error, SnapshotError):
            return cls(reason=error.reason, message=error.message, remedy=error.remedy)
        return cls(reason=Reason.INTERNAL_ERROR, message=f"{type(error).__name__}: {error}")

    def error(self) -> SnapshotError:
        return SnapshotError(self.reason, self.message, self.remedy)


class Answer(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The answer to the request with the same ``id``."""

    id: int
    value: msgspec.Raw = msgspec.Raw(b"null")
    failure: Failure | None = None


def serve(connection: socket.socket, handle: Callable[[bytes], object], at_once: int) -> None:
    """The child's loop: answers requests until the other side closes, then finishes those under way.

    Args:
        connection: a connected stream socket.
        handle: makes the answer's value from a request's body, in one of ``at_once`` threads. What it raises
            is the answer too.
    """
    writing = threading.Lock()

    def answer(request: Request) -> None:
        try:
            found = Answer(id=request.id, value=msgspec.Raw(msgspec.json.encode(handle(bytes(request.body)))))
        except Exception as error:
            found = Answer(id=request.id, failure=Failure.of(error))
        try:
            with writing:
                connection.sendall(msgspec.json.encode(found) + b"\n")
        except OSError:
            pass  # nobody is left to be told

    decoder = msgspec.json.Decoder(Request)
    # ConnectionError is how an agent ends that is killed with an answer unread.
    with ThreadPoolExecutor(at_once) as requests, connection.makefile("rb") as lines, suppress(ConnectionError):
        for line in lines:
            requests.submit(answer, decoder.decode(line))
