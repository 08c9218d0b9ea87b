"""TCP ports on this host: which are free, and a clear refusal where one is not."""

from __future__ import annotations

import socket

from dynamo_snapshot.errors import SnapshotError
from dynamo_snapshot.model import Reason


def free_port(host: str = "127.0.0.1") -> int:
    """A TCP port nobody listens on at ``host`` now."""
    with socket.socket() as probe:
        probe.bind((host, 0))
        return int(probe.getsockname()[1])


def require_free(host: str, port: int, user: str, remedy: str) -> None:
    """Raises ``SnapshotError(port_in_use)`` naming ``user`` if ``host:port`` cannot be listened on."""
    with socket.socket() as probe:
        # A connection in TIME_WAIT does not count; servers set the same option.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
            probe.listen(1)
        except OSError as error:
            raise SnapshotError(
                Reason.PORT_IN_USE, f"{host}:{port}, which {user} needs, cannot be used: {error.strerror}", remedy
            ) from error
