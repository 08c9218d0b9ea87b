"""The agent's side of a control directory: releasing a worker, and reading what it says of itself."""

from __future__ import annotations

import os
from pathlib import Path

import msgspec

from dynamo_snapshot.errors import SnapshotError
from dynamo_snapshot.model import Reason
from worker_hooks import control
from worker_hooks.control import WorkerState


class ControlDirectory:
    """The control directory of one house, as seen from the host."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def state(self) -> WorkerState | None:
        """What the worker said last; None before it has said anything (or if it does not speak the protocol)."""
        try:
            return msgspec.json.decode((self.path / control.WORKER_STATE).read_bytes(), type=WorkerState)
        except FileNotFoundError:
            return None
        except (OSError, msgspec.MsgspecError) as error:
            raise SnapshotError(
                Reason.WORKER_NOT_READY,
                f"{self.path / control.WORKER_STATE} cannot be read: {error}",
                "The worker writes it by rename; something else wrote there.",
            ) from error

    def is_ready_for_snapshot(self) -> bool:
        return (self.path / control.READY_FOR_SNAPSHOT).exists()

    def is_released(self) -> bool:
        return (self.path / control.RESTORE_COMPLETE).exists()

    def refuse_if_released(self) -> None:
        """Raises ``worker_not_ready`` if a ``restore-complete`` lies here: it would set off the next worker at once."""
        if self.is_released():
            raise SnapshotError(
                Reason.WORKER_NOT_READY,
                f"{self.path / control.RESTORE_COMPLETE} is there before its restore",
                "It belongs to another incarnation: restore into a fresh house.",
            )

    def is_woken(self) -> bool:
        return (self.path / control.WAKE).exists()

    def release(self, incarnation: str, environment: dict[str, str | None], *, park: bool = False) -> None:
        """Lets the waiting worker go on as ``incarnation``, with ``environment`` applied (None unsets a name).

        Args:
            park: it goes no further than to its identity, until :meth:`wake`.
        """
        context = {"env": environment, "incarnation": incarnation, **({"park": True} if park else {})}
        self._write(control.RESTORE_CONTEXT, msgspec.json.encode(context))
        self._write(control.RESTORE_COMPLETE, f"incarnation={incarnation}\n".encode())

    def wake(self, incarnation: str) -> None:
        """Lets the parked worker go on."""
        self._write(control.WAKE, f"incarnation={incarnation}\n".encode())

    def _write(self, name: str, data: bytes) -> None:
        temporary = self.path / f".{name}.tmp"
        temporary.write_bytes(data)
        os.chmod(temporary, 0o644)
        temporary.rename(self.path / name)
