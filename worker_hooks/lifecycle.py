"""The worker's lifecycle: one table, and what walks it.

An event that the table does not have raises and leaves the state as it was. The diagram in the
documentation is rendered from the table.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from enum import StrEnum

from worker_hooks.control import WorkerState


class State(StrEnum):
    BOOTING = "BOOTING"
    ENGINE_READY = "ENGINE_READY"
    QUIESCING = "QUIESCING"
    READY_FOR_SNAPSHOT = "READY_FOR_SNAPSHOT"
    RESTORED = "RESTORED"
    IDENTITY_APPLIED = "IDENTITY_APPLIED"
    PARKED = "PARKED"
    RESUMING = "RESUMING"
    SELF_TESTING = "SELF_TESTING"
    REGISTERED = "REGISTERED"
    DRAINING = "DRAINING"
    STOPPED = "STOPPED"
    FAILED = "FAILED"


class Event(StrEnum):
    BOOTED = "booted"
    QUIESCE = "quiesce"
    QUIESCED = "quiesced"
    REFUSED = "refused"
    """The guard found what cannot be captured."""
    RESTORED = "restored"
    RELEASED = "released"
    """The capture failed or was not wanted: the same incarnation goes on."""
    IDENTITY_APPLIED = "identity_applied"
    PARK = "park"
    RESUME = "resume"
    SELF_TEST = "self_test"
    REGISTERED = "registered"
    LEASE_LOST = "lease_lost"
    DRAIN = "drain"
    STOP = "stop"
    FAIL = "fail"


FINAL = frozenset({State.STOPPED, State.FAILED})

TRANSITIONS: Mapping[tuple[State, Event], State] = {
    (State.BOOTING, Event.BOOTED): State.ENGINE_READY,
    (State.ENGINE_READY, Event.QUIESCE): State.QUIESCING,
    (State.ENGINE_READY, Event.SELF_TEST): State.SELF_TESTING,
    (State.QUIESCING, Event.QUIESCED): State.READY_FOR_SNAPSHOT,
    (State.QUIESCING, Event.REFUSED): State.RESUMING,
    (State.READY_FOR_SNAPSHOT, Event.RESTORED): State.RESTORED,
    (State.READY_FOR_SNAPSHOT, Event.RELEASED): State.RESUMING,
    (State.RESTORED, Event.IDENTITY_APPLIED): State.IDENTITY_APPLIED,
    (State.IDENTITY_APPLIED, Event.PARK): State.PARKED,
    (State.IDENTITY_APPLIED, Event.RESUME): State.RESUMING,
    (State.PARKED, Event.RESUME): State.RESUMING,
    (State.RESUMING, Event.SELF_TEST): State.SELF_TESTING,
    (State.SELF_TESTING, Event.REGISTERED): State.REGISTERED,
    (State.REGISTERED, Event.LEASE_LOST): State.SELF_TESTING,
    (State.REGISTERED, Event.DRAIN): State.DRAINING,
    # A stop asked for before registration has nothing to drain.
    **{(state, Event.STOP): State.STOPPED for state in State if state not in FINAL | {State.REGISTERED}},
    **{(state, Event.FAIL): State.FAILED for state in State if state not in FINAL},
}

NEW_INCARNATION = frozenset({Event.RESTORED})
"""Events that begin another incarnation: what the one before had proved counts no more."""


class IllegalEvent(Exception):
    """The table has no such transition; the state is as it was."""

    def __init__(self, state: State, event: Event) -> None:
        legal = ", ".join(sorted(known for at, known in TRANSITIONS if at is state)) or "none"
        super().__init__(f"event {event} is illegal in state {state}; legal there: {legal}")
        self.state = state
        self.event = event


def next_state(state: State, event: Event) -> State:
    """The state that ``event`` leads to; raises :class:`IllegalEvent` where the table has none."""
    try:
        return TRANSITIONS[state, event]
    except KeyError:
        raise IllegalEvent(state, event) from None


class Lifecycle:
    """One worker's walk through the table; each transition is handed to ``report``.

    Args:
        report: called with the whole state at the start and after each transition, before ``fire`` returns.
        pid: of the worker, in its own namespace.
        incarnation: its name, where it was given one.
        clock: wall-clock seconds.
    """

    def __init__(
        self,
        report: Callable[[WorkerState], None],
        *,
        pid: int,
        incarnation: str | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._report = report
        self._clock = clock
        self._pid = pid
        self.state = State.BOOTING
        self.incarnation = incarnation
        self.self_test_at: float | None = None
        self.evidence: dict[str, str] = {}
        self._reason: str | None = None
        self._message = ""
        self._history: list[tuple[str, float]] = []
        self._enter(State.BOOTING)

    def __repr__(self) -> str:
        return f"Lifecycle({self.state}, incarnation={self.incarnation!r})"

    def fire(self, event: Event, *, reason: str | None = None, message: str = "") -> None:
        """Takes ``event``'s transition and reports it; raises :class:`IllegalEvent`, changing nothing."""
        state = next_state(self.state, event)
        if event in NEW_INCARNATION:
            self.self_test_at = None
        self._reason, self._message = reason, message
        self._enter(state)

    def passed_self_test(self) -> None:
        """Stamps the self-test of this incarnation; the next transition reports it."""
        self.self_test_at = self._clock()

    @property
    def snapshot(self) -> WorkerState:
        state, since = self._history[-1]
        return WorkerState(
            state=state,
            since=since,
            incarnation=self.incarnation,
            pid=self._pid,
            reason=self._reason,
            message=self._message,
            self_test_at=self.self_test_at,
            history=tuple(self._history),
            evidence=dict(self.evidence),
        )

    def _enter(self, state: State) -> None:
        self.state = state
        self._history.append((state.value, self._clock()))
        self._report(self.snapshot)


def mermaid(transitions: Iterable[tuple[tuple[State, Event], State]] = TRANSITIONS.items()) -> str:
    """The table as a Mermaid state diagram; ``fail`` and ``stop`` are drawn once, as from any state."""
    lines = ["stateDiagram-v2", f"    [*] --> {State.BOOTING}"]
    for (state, event), target in transitions:
        if event is Event.FAIL or (event is Event.STOP and state is not State.DRAINING):
            continue
        lines.append(f"    {state} --> {target}: {event}")
    lines += [f"    {state} --> [*]" for state in (State.STOPPED, State.FAILED)]
    lines += [
        "    note right of FAILED : from any state but STOPPED, by fail",
        "    note right of STOPPED : from any state before REGISTERED, by stop",
    ]
    return "\n".join(lines) + "\n"
