"""Proves that one instance serves: requests pinned to it, all of which must be answered by it.

The frontend never migrates a pinned request, whatever its migration limit: when the instance dies, the
stream ends with an error. So no second frontend without migration is needed for this proof.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass

from dynamo_snapshot.replay.chat import WORKER_HEADER, Endpoint, ask, client_session
from dynamo_snapshot.replay.prompts import prompt


@dataclass(frozen=True)
class PinResult:
    """How requests pinned to one instance went."""

    instance_id: int
    sent: int
    succeeded: int
    """Answered in full, and by that instance."""
    errors: tuple[str, ...] = ()


async def pinned_requests(
    endpoint: Endpoint,
    instance_id: int,
    count: int = 20,
    *,
    input_tokens: int = 16,
    output_tokens: int = 4,
    concurrency: int = 4,
) -> PinResult:
    """Sends ``count`` requests pinned to ``instance_id``, at most ``concurrency`` at once."""
    slots = asyncio.Semaphore(concurrency)

    async with client_session() as session:

        async def one(index: int) -> str | None:
            async with slots:
                answer = await ask(
                    session,
                    endpoint,
                    prompt(index, input_tokens),
                    output_tokens,
                    clock=time.monotonic,
                    headers={WORKER_HEADER: str(instance_id)},
                )
            if answer.error is None and answer.worker != instance_id:
                return f"answered by instance {answer.worker}"
            return answer.error

        outcomes = await asyncio.gather(*(one(index) for index in range(count)))
    errors = tuple(outcome for outcome in outcomes if outcome is not None)
    return PinResult(instance_id, count, count - len(errors), errors)
