"""Start-up models by name, and what they draw."""

from __future__ import annotations

import random
import statistics

import pytest

from dynamo_snapshot.model import Way
from dynamo_snapshot.replay.simulation.startup import StartupModel, startup_model


def draws(model: StartupModel, count: int = 4000) -> list[tuple[tuple[Way, float, bool], ...]]:
    return [tuple(tuple(attempt) for attempt in model.draw(random.Random(seed))) for seed in range(count)]


@pytest.mark.parametrize(
    ("spec", "restore_s", "cold_s", "failures", "spread"),
    [
        ("restore-2s", 2.0, 45.0, 0.0, 0.1),
        ("restore-8s", 8.0, 45.0, 0.0, 0.1),
        ("cold-45s", None, 45.0, 0.0, 0.1),
        ("cold-100s", None, 100.0, 0.0, 0.1),
        ("restore(2, cold=100, failures=0.02)", 2.0, 100.0, 0.02, 0.1),
        ("restore(0.5,spread=0)", 0.5, 45.0, 0.0, 0.0),
        ("cold(60,spread=0.3)", None, 60.0, 0.0, 0.3),
    ],
)
def test_specs_are_read(spec: str, restore_s: float | None, cold_s: float, failures: float, spread: float) -> None:
    model = startup_model(spec)
    assert (model.restore_s, model.cold_s, model.failures, model.spread) == (restore_s, cold_s, failures, spread)
    assert startup_model(model.name) == model


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("warm-2s", "expected restore-<seconds>s"),
        ("restore", "expected restore-<seconds>s"),
        ("restore(2,cold=-1)", "expected restore-<seconds>s"),
        ("restore(2,warm=1)", "warm is not known for restore"),
        ("cold(45,failures=0.1)", "failures is not known for cold"),
        ("restore(2,failures=1.5)", "failures must be from 0 to 1"),
        ("restore-0s", "restore_s must be a positive number"),
        ("restore(2,spread=3)", "spread must be from 0 to 2"),
    ],
)
def test_wrong_specs_say_what_was_expected(spec: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        startup_model(spec)


def test_restores_take_about_their_median() -> None:
    seconds = [attempts[0][1] for attempts in draws(startup_model("restore-2s"))]
    assert statistics.median(seconds) == pytest.approx(2.0, rel=0.01)
    assert statistics.quantiles(seconds, n=20)[-1] == pytest.approx(
        startup_model("restore-2s").quantile_s(0.95), rel=0.02
    )
    assert startup_model("restore(2.2)").quantile_s(0.95) == pytest.approx(2.6, abs=0.02)


def test_a_failed_restore_is_followed_by_a_cold_start() -> None:
    found = draws(startup_model("restore(2,cold=45,failures=0.25)"))
    failed = [attempts for attempts in found if len(attempts) == 2]
    assert len(failed) / len(found) == pytest.approx(0.25, abs=0.03)
    assert all([attempt[::2] for attempt in one] == [(Way.RESTORE, False), (Way.COLD_START, True)] for one in failed)
    assert statistics.median(one[1][1] for one in failed) == pytest.approx(45, rel=0.03)


def test_without_snapshot_every_start_is_cold() -> None:
    assert {(len(attempts), attempts[0][0]) for attempts in draws(startup_model("cold-45s"), 50)} == {
        (1, Way.COLD_START)
    }


def test_without_spread_every_start_takes_the_median() -> None:
    assert {attempts[0][1] for attempts in draws(startup_model("restore(3,spread=0)"), 50)} == {3.0}
