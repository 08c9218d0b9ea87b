"""Parked replicas in what is looked for ahead: as long as they are enough, a start takes no longer than a wake.

The fleet wakes before it restores. So the forecast is made for a wake first, and holds if what it wants can be
had by waking; else it is made for the start that the rest will take, with what is parked on top of what is there.
"""

from __future__ import annotations

from dataclasses import replace

from planner.forecast import Forecast, Knowledge, Objectives, look_ahead
from planner.observation import Observation


def look_ahead_with_parked(
    knowledge: Knowledge, observation: Observation, objectives: Objectives, there: int, lowest: int, highest: int
) -> Forecast | None:
    """As :func:`planner.forecast.look_ahead`."""
    parked = observation.pool.parked if observation.pool else 0
    if parked:
        waking = replace(knowledge, start=replace(knowledge.start, wakes=True))
        woken = look_ahead(waking, observation, objectives, there, lowest, highest)
        if woken is None or woken.rise <= there + parked:
            return woken
    forecast = look_ahead(knowledge, observation, objectives, there, lowest, highest)
    if forecast is None or not parked:
        return forecast
    return replace(forecast, rise=max(forecast.rise, there + parked), keep=max(forecast.keep, there + parked))
