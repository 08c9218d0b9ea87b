"""A TCP port of its own for each incarnation: it tells whose instance an instance is."""

from __future__ import annotations

import errno
import socket

from dynamo_snapshot.errors import SnapshotError
from dynamo_snapshot.model import Reason


class Ports:
    """Gives out the ports from ``first`` to ``last`` in turn, so that one just freed is not met again at once."""

    def __init__(self, first: int, last: int, host: str = "127.0.0.1") -> None:
        self._first, self._count, self._host = first, last - first + 1, host
        self._next = 0
        self._taken: set[int] = set()

    def take(self) -> int:
        """Returns a port that no replica has and nobody listens on.

        Raises:
            SnapshotError: ``port_in_use`` when there is none.
        """
        for step in range(self._count):
            port = self._first + (self._next + step) % self._count
            if port not in self._taken and self._free(port):
                self._next = port - self._first + 1
                self._taken.add(port)
                return port
        raise SnapshotError(
            Reason.PORT_IN_USE,
            f"no free TCP port for a worker between {self._first} and {self._first + self._count - 1}",
            "Widen agent.rpc_ports in fleet.yaml, or stop what listens there.",
        )

    def hold(self, port: int) -> None:
        """Notes a port that a worker already has."""
        self._taken.add(port)

    def release(self, port: int) -> None:
        self._taken.discard(port)

    def _free(self, port: int) -> bool:
        with socket.socket() as probe:
            # As servers do: ports in TIME_WAIT may be taken over.
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((self._host, port))
            except OSError as error:
                if error.errno in (errno.EADDRINUSE, errno.EACCES):
                    return False
                raise
        return True
