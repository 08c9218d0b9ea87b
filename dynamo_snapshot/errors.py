"""One error type: it names the thing, the cause and the remedy, under a stable reason."""

from __future__ import annotations

from dynamo_snapshot.model import Reason


class SnapshotError(Exception):
    """A failure with a reason that people and programs can act on.

    Args:
        reason: the stable code.
        message: what went wrong, naming the thing and the cause, without a full stop.
        remedy: what the reader can do about it; empty where nothing can be said.
    """

    def __init__(self, reason: Reason, message: str, remedy: str = "") -> None:
        super().__init__(message)
        self.reason = reason
        self.message = message
        self.remedy = remedy

    def __str__(self) -> str:
        return f"{self.message} [{self.reason}]" + (f". {self.remedy}" if self.remedy else "")
