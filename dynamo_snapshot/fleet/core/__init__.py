"""The fleet's decisions: ``step(state, event, now) -> (state, commands)``. No I/O, no clock, no log."""

from dynamo_snapshot.fleet.core.state import State, initial
from dynamo_snapshot.fleet.core.step import step

__all__ = ["State", "initial", "step"]
