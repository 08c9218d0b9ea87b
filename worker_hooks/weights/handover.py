"""Loaded memory passed from a loader to a worker: descriptors over a unix socket in the replica's house.

The loader listens on :data:`SOCKET` in the house before the worker runs. Once all bytes are in place it
sends the first who connects one packet a segment, in order: JSON with ``index``, ``digest`` and
``size``, and the memory's descriptor beside it; or a single packet with ``reason`` and ``message``.
Then it lets go of the memory: a descriptor on its way keeps it alive, and after that the worker does.
"""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from worker_hooks.reasons import HookError, HookReason
from worker_hooks.weights.segment import Segment

SOCKET = "weights.sock"
_PACKET = 4096


@contextmanager
def _address(path: Path) -> Iterator[str]:
    """An address for ``path`` whatever its length: a socket's path may have 107 bytes, a house's may be longer."""
    folder = os.open(path.parent, os.O_PATH | os.O_DIRECTORY)
    try:
        yield f"/proc/self/fd/{folder}/{path.name}"
    finally:
        os.close(folder)


def listen(path: Path) -> socket.socket:
    """Returns a socket that listens at ``path``, in the place of what a loader that died may have left there."""
    path.unlink(missing_ok=True)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        with _address(path) as address:
            listener.bind(address)
        listener.listen(1)
    except OSError:
        listener.close()
        raise
    return listener


def send(connection: socket.socket, index: int, digest: str, size: int, descriptor: int) -> None:
    """Hands one segment over; ``descriptor`` stays the caller's."""
    header = json.dumps({"index": index, "digest": digest, "size": size}).encode()
    socket.send_fds(connection, [header], [descriptor])


def send_failure(connection: socket.socket, failure: HookError) -> None:
    connection.send(json.dumps({"reason": failure.reason, "message": failure.message}).encode()[:_PACKET])


def receive(path: Path, segments: Sequence[Segment], timeout_s: float) -> Iterator[tuple[Segment, int]]:
    """Yields each of ``segments`` with the descriptor of its loaded memory, which is the caller's to close.

    Raises:
        HookError: ``loader_died`` when there is no loader, it goes, or is silent for ``timeout_s``;
            ``weights_corrupt`` when it hands over something else; or the loader's own failure.
    """
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as connection:
        connection.settimeout(timeout_s)
        try:
            with _address(path) as address:
                connection.connect(address)
        except OSError as error:
            raise HookError(HookReason.LOADER_DIED, f"no loader answers at {path}: {error.strerror}") from error
        for index, segment in enumerate(segments):
            yield segment, _next(connection, path, index, segment)


def _next(connection: socket.socket, path: Path, index: int, segment: Segment) -> int:
    try:
        packet, descriptors, _, _ = socket.recv_fds(connection, _PACKET, 1)
    except OSError as error:
        raise HookError(HookReason.LOADER_DIED, f"the loader at {path} fell silent: {error}") from error
    if not packet:
        raise HookError(HookReason.LOADER_DIED, f"the loader at {path} ended before it had handed over")
    header = json.loads(packet)
    if "reason" in header:
        raise HookError(HookReason(header["reason"]), header["message"])
    if not descriptors or header != {"index": index, "digest": segment.digest, "size": segment.size}:
        for descriptor in descriptors:
            os.close(descriptor)
        raise HookError(
            HookReason.WEIGHTS_CORRUPT,
            f"the loader handed over {header} where {segment.digest} of {segment.size} bytes was due",
        )
    return descriptors[0]
