import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from worker_hooks.control import WorkerState
from worker_hooks.lifecycle import FINAL, TRANSITIONS, Event, IllegalEvent, Lifecycle, State, mermaid, next_state

ARCHITECTURE = """
BOOTING booted ENGINE_READY
ENGINE_READY quiesce QUIESCING
ENGINE_READY self_test SELF_TESTING
QUIESCING quiesced READY_FOR_SNAPSHOT
QUIESCING refused RESUMING
READY_FOR_SNAPSHOT restored RESTORED
READY_FOR_SNAPSHOT released RESUMING
RESTORED identity_applied IDENTITY_APPLIED
IDENTITY_APPLIED park PARKED
IDENTITY_APPLIED resume RESUMING
PARKED resume RESUMING
RESUMING self_test SELF_TESTING
SELF_TESTING registered REGISTERED
REGISTERED lease_lost SELF_TESTING
REGISTERED drain DRAINING
"""
EXPECTED = {(a, e): b for a, e, b in (line.split() for line in ARCHITECTURE.split("\n") if line)}


class Wall:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        self.now += 1
        return self.now


def walker(state: State) -> tuple[Lifecycle, list[WorkerState]]:
    reports: list[WorkerState] = []
    lifecycle = Lifecycle(reports.append, pid=7, clock=Wall())
    lifecycle.state = state
    return lifecycle, reports


@pytest.mark.parametrize("event", Event)
@pytest.mark.parametrize("state", State)
def test_every_event_in_every_state(state: State, event: Event) -> None:
    expected: str | None
    if event is Event.FAIL:
        expected = None if state in FINAL else "FAILED"
    elif event is Event.STOP:
        expected = None if state in FINAL or state is State.REGISTERED else "STOPPED"
    else:
        expected = EXPECTED.get((state, event))
    lifecycle, reports = walker(state)
    before = (lifecycle.snapshot, len(reports))
    if expected is None:
        with pytest.raises(IllegalEvent, match=f"event {event} is illegal in state {state}"):
            lifecycle.fire(event)
        assert (lifecycle.snapshot, len(reports)) == before
        assert lifecycle.state is state
    else:
        lifecycle.fire(event, reason="why", message="because")
        assert lifecycle.state == expected == next_state(state, event)
        assert (reports[-1].state, reports[-1].reason, reports[-1].message) == (expected, "why", "because")
        assert reports[-1].history[-1] == (expected, reports[-1].since)


@given(st.lists(st.sampled_from(Event), max_size=60))
def test_no_order_of_events_breaks_the_laws(events: list[Event]) -> None:
    reports: list[WorkerState] = []
    lifecycle = Lifecycle(reports.append, pid=7, incarnation="first", clock=Wall())
    for event in events:
        before = lifecycle.state
        if event is Event.REGISTERED and before is State.SELF_TESTING:
            lifecycle.passed_self_test()
        try:
            lifecycle.fire(event)
        except IllegalEvent:
            assert lifecycle.state is before
    states = [report.state for report in reports]
    assert states == [state for state, _ in lifecycle.snapshot.history]
    assert [at for _, at in lifecycle.snapshot.history] == sorted(at for _, at in lifecycle.snapshot.history)
    for index, state in enumerate(states):
        if state == State.REGISTERED:  # registration is the last step, right after a self-test of this incarnation
            assert states[index - 1] == State.SELF_TESTING
            assert reports[index].self_test_at is not None
        if state == State.RESTORED:
            assert reports[index].self_test_at is None
            assert State.IDENTITY_APPLIED in states[index + 1 :] or states[index + 1 :] in ([], ["FAILED"], ["STOPPED"])
        if state in FINAL:
            assert index == len(states) - 1


def test_every_state_can_be_reached_and_left() -> None:
    reached = {State.BOOTING} | set(TRANSITIONS.values())
    assert reached == set(State)
    assert {state for state, _ in TRANSITIONS} == set(State) - FINAL


def test_the_diagram_has_every_transition_of_the_table() -> None:
    drawn = set(re.findall(r"^    (\w+) --> (\w+): (\w+)$", mermaid(), re.MULTILINE))
    table = {(state.value, target.value, event.value) for (state, event), target in TRANSITIONS.items()}
    assert drawn == {each for each in table if each[2] not in ("fail", "stop")} | {("DRAINING", "STOPPED", "stop")}
    assert mermaid().startswith("stateDiagram-v2\n    [*] --> BOOTING\n")
