"""Our policy in the simulator: the same object, the same decisions, and nothing but the observation."""

from __future__ import annotations

from dataclasses import replace

import pytest
from policy_signals import signals

from dynamo_snapshot.replay.policies.snapshot import Snapshot, knobs
from dynamo_snapshot.replay.simulation.run import simulate
from dynamo_snapshot.replay.simulation.setting import Setting
from dynamo_snapshot.replay.simulation.signals import Signals
from dynamo_snapshot.replay.simulation.startup import startup_model
from dynamo_snapshot.replay.simulation.timing import EngineTiming
from dynamo_snapshot.replay.trace import bundled_trace
from planner.observation import Role
from planner.policy import LoadPolicy, Memory

SETTING = Setting(engine=EngineTiming(speed=0.33))


class Recorder(Snapshot):
    """Keeps what it was shown and what it said."""

    def __init__(self, setting: Setting) -> None:
        super().__init__(setting)
        self.seen: list[tuple[Signals, int | None]] = []

    def decide(self, signals: Signals) -> int | None:
        size = super().decide(signals)
        self.seen.append((signals, size))
        return size


def test_recorded_observations_give_the_planners_policy_the_same_decisions() -> None:
    recorder = Recorder(SETTING)
    simulate(bundled_trace(), recorder, SETTING, startup_model("restore-2s"), seed=1)
    policy = LoadPolicy(
        role=Role.DECODE,
        min_replicas=1,
        max_replicas=16,
        ttft_objective_s=SETTING.ttft_objective_s,
        itl_objective_s=SETTING.itl_objective_s,
    )
    memory = Memory()
    for shown, said in recorder.seen:
        proposal, memory = policy.decide(shown.observation, memory, shown.now)
        assert proposal.replicas == said
    assert len({said for _, said in recorder.seen}) > 2


def test_it_reads_nothing_but_the_observation() -> None:
    plain, told = Snapshot(SETTING), Snapshot(SETTING)
    for second in range(30):
        shown = signals(float(second), ready=2)
        misled = replace(shown, in_flight=1e6, waiting=999, arrivals=999, finished=999, busy=1.0)
        assert plain.decide(shown) == told.decide(misled)


def test_bounds_and_objectives_are_the_settings() -> None:
    assert not {"role", "min_replicas", "max_replicas", "ttft_objective_s", "itl_objective_s"} & knobs().keys()
    assert "miss_cost_s" in knobs()
    assert Snapshot(Setting(min_replicas=3, initial_replicas=3)).decide(signals(0.0, ready=3)) == 3


def test_a_tick_of_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="tick_s"):
        Snapshot(SETTING, tick_s=0)
