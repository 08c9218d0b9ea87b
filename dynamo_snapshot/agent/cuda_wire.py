"""What the agent and its CUDA helper say to each other: one line of JSON a call, one an answer."""

from __future__ import annotations

import msgspec

from dynamo_snapshot.agent.cuda_driver import CheckpointDriver, Operation
from dynamo_snapshot.errors import SnapshotError
from dynamo_snapshot.model import Reason


class Call(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One call of the driver; ``operation`` None asks for the inventory."""

    id: int
    operation: Operation | None = None
    pid: int = 0
    timeout_ms: int = 0
    devices: dict[str, str] = {}


class Failure(msgspec.Struct, frozen=True, kw_only=True):
    reason: Reason
    message: str
    remedy: str = ""

    @classmethod
    def of(cls, error: Exception) -> Failure:
        if isinstance(error, SnapshotError):
            return cls(reason=error.reason, message=error.message, remedy=error.remedy)
        return cls(reason=Reason.INTERNAL_ERROR, message=f"{type(error).__name__}: {error}")

    def error(self) -> SnapshotError:
        return SnapshotError(self.reason, self.message, self.remedy)


class Answer(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The answer to the call with the same ``id``."""

    id: int
    value: msgspec.Raw = msgspec.Raw(b"null")
    failure: Failure | None = None


def carry_out(driver: CheckpointDriver, call: Call) -> Answer:
    """Makes ``call``; whatever goes wrong is in the answer."""
    value: object = None
    try:
        match call.operation:
            case None:
                value = driver.inventory()
            case Operation.STATE:
                value = driver.state(call.pid)
            case Operation.LOCK:
                driver.lock(call.pid, call.timeout_ms)
            case Operation.CHECKPOINT:
                driver.checkpoint(call.pid)
            case Operation.RESTORE:
                driver.restore(call.pid, call.devices)
            case Operation.UNLOCK:
                driver.unlock(call.pid)
    except Exception as error:
        return Answer(id=call.id, failure=Failure.of(error))
    return Answer(id=call.id, value=msgspec.Raw(msgspec.json.encode(value)))
